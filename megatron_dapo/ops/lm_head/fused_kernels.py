"""Triton kernels of the head: a tile of logits is computed, reduced and thrown away without leaving the chip.

Both kernels multiply [BLOCK_TOKENS, width] hidden states by [width, BLOCK_COLUMNS] of the transposed weight in steps of
BLOCK_WIDTH, with fp32 sums. Pointers are to the first element; rows are `*_stride` elements apart, elements of a row are
adjacent. Offsets are 64-bit: a weight can have more than 2^31 elements. WIDEN multiplies in fp32, where the sums of 16-bit
factors are the same: Triton's interpreter takes bf16 factors for integers.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

LEAST = tl.constexpr(-3.4028234663852886e38)  # the least fp32: the maximum of no logits


@triton.jit
def _tile(
    hidden,
    weight,
    tokens,
    columns,
    num_tokens,
    num_columns,
    width,
    hidden_stride,
    weight_stride,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """fp32 products [BLOCK_TOKENS, BLOCK_COLUMNS] of these tokens and columns; 0 beyond the last of either."""
    steps = tl.arange(0, BLOCK_WIDTH)
    left = hidden + tokens.to(tl.int64)[:, None] * hidden_stride + steps[None, :]
    right = weight + columns.to(tl.int64)[None, :] * weight_stride + steps[:, None]
    has_token, has_column = tokens[:, None] < num_tokens, columns[None, :] < num_columns
    total = tl.zeros((BLOCK_TOKENS, BLOCK_COLUMNS), tl.float32)
    for start in range(0, width, BLOCK_WIDTH):
        a = tl.load(left + start, mask=has_token & (steps[None, :] < width - start), other=0.0)
        b = tl.load(right + start, mask=has_column & (steps[:, None] < width - start), other=0.0)
        if WIDEN:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    return total


@triton.jit
def _begin(BLOCK_TOKENS: tl.constexpr):
    """The running numbers of tokens of which no logit was seen: maximum, sum exp, sum exp * logit, the target's."""
    zeros = tl.zeros((BLOCK_TOKENS,), tl.float32)
    return tl.full((BLOCK_TOKENS,), LEAST, tl.float32), zeros, zeros, zeros


@triton.jit
def _take(largest, total, weighted, target, logits, columns, num_columns, target_column):
    """The running numbers of each token after one more tile of its logits."""
    real = columns[None, :] < num_columns
    target += tl.sum(tl.where(real & (columns[None, :] == target_column[:, None]), logits, 0.0), axis=1)
    larger = tl.maximum(largest, tl.max(tl.where(real, logits, LEAST), axis=1))
    shift = largest - larger
    factor = tl.exp(shift)
    relative = logits - larger[:, None]
    exponentials = tl.where(real, tl.exp(relative), 0.0)
    weighted = (weighted + total * shift) * factor + tl.sum(tl.where(real, relative * exponentials, 0.0), axis=1)
    total = total * factor + tl.sum(exponentials, axis=1)
    return larger, total, weighted, target


@triton.jit
def _store(maxima, sums, place, plane, has_token, largest, total, weighted, target):
    tl.store(maxima + place, largest, mask=has_token)
    tl.store(sums + place, total, mask=has_token)
    tl.store(sums + plane + place, weighted, mask=has_token)
    tl.store(sums + 2 * plane + place, target, mask=has_token)


@triton.jit
def partial_sums(
    hidden,
    weight,
    target_columns,  # [tokens] int64, counted from this weight's first row; outside it: another rank's
    maxima,  # out [splits, tokens]
    sums,  # out [3, splits, tokens]: sum exp, sum exp * logit, both relative to the maximum; the target's logit
    num_tokens,
    num_columns,
    width,
    columns_a_split,  # a multiple of BLOCK_COLUMNS
    hidden_stride,
    weight_stride,
    one_over_temperature,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Program (split of the columns, block of tokens): those that run at a time take few blocks of tokens, which stay in the
    cache while every split goes through its columns."""
    tokens = tl.program_id(1) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    split, num_splits = tl.program_id(0), tl.num_programs(0)
    has_token = tokens < num_tokens
    target_column = tl.load(target_columns + tokens, mask=has_token, other=-1)
    largest, total, weighted, target = _begin(BLOCK_TOKENS)
    first = split * columns_a_split
    for start in range(first, min(first + columns_a_split, num_columns), BLOCK_COLUMNS):
        columns = start + tl.arange(0, BLOCK_COLUMNS)
        logits = one_over_temperature * _tile(
            hidden,
            weight,
            tokens,
            columns,
            num_tokens,
            num_columns,
            width,
            hidden_stride,
            weight_stride,
            BLOCK_TOKENS,
            BLOCK_COLUMNS,
            BLOCK_WIDTH,
            PRECISION,
            WIDEN,
        )
        largest, total, weighted, target = _take(
            largest, total, weighted, target, logits, columns, num_columns, target_column
        )
    place, plane = split.to(tl.int64) * num_tokens + tokens, num_splits.to(tl.int64) * num_tokens
    _store(maxima, sums, place, plane, has_token, largest, total, weighted, target)


@triton.jit
def sums_of_logits(
    logits,  # [tokens, columns] fp32, a tile that another product has left in memory
    target_columns,
    maxima,  # out [tokens]
    sums,  # out [3, tokens]
    num_tokens,
    num_columns,
    logits_stride,
    one_over_temperature,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Program (block of tokens): what `partial_sums` gives, from logits that are read once."""
    tokens = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    has_token = tokens < num_tokens
    target_column = tl.load(target_columns + tokens, mask=has_token, other=-1)
    largest, total, weighted, target = _begin(BLOCK_TOKENS)
    for start in range(0, num_columns, BLOCK_COLUMNS):
        columns = start + tl.arange(0, BLOCK_COLUMNS)
        place = logits + tokens.to(tl.int64)[:, None] * logits_stride + columns[None, :]
        there = has_token[:, None] & (columns[None, :] < num_columns)
        tile = one_over_temperature * tl.load(place, mask=there, other=0.0)
        largest, total, weighted, target = _take(
            largest, total, weighted, target, tile, columns, num_columns, target_column
        )
    _store(maxima, sums, tokens, num_tokens, has_token, largest, total, weighted, target)


@triton.jit
def logit_gradients(
    hidden,
    weight,
    target_columns,
    maxima,  # [tokens], of the whole vocabulary, as are all that follow
    one_over_totals,
    constants,  # [tokens] what multiplies p whatever the logit
    slopes,  # [tokens] what multiplies p * (logit - maximum); not read without HAS_SLOPE
    to_targets,  # [tokens] what is added at the target
    gradients,  # out [tokens, columns] in the type of the products to come
    num_tokens,
    num_columns,
    width,
    hidden_stride,
    weight_stride,
    gradient_stride,
    one_over_temperature,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    HAS_SLOPE: tl.constexpr,
):
    """Program (block of columns in a group, block of tokens, group): a group's columns stay in the cache for all tokens."""
    tokens = tl.program_id(1) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    column_block = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    columns = column_block * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    has_token = tokens < num_tokens
    products = _tile(
        hidden,
        weight,
        tokens,
        columns,
        num_tokens,
        num_columns,
        width,
        hidden_stride,
        weight_stride,
        BLOCK_TOKENS,
        BLOCK_COLUMNS,
        BLOCK_WIDTH,
        PRECISION,
        WIDEN,
    )
    relative = products * one_over_temperature - tl.load(maxima + tokens, mask=has_token, other=0.0)[:, None]
    p = tl.exp(relative) * tl.load(one_over_totals + tokens, mask=has_token, other=0.0)[:, None]
    factor = tl.load(constants + tokens, mask=has_token, other=0.0)[:, None]
    if HAS_SLOPE:
        factor = factor + relative * tl.load(slopes + tokens, mask=has_token, other=0.0)[:, None]
    gradient = p * factor
    target_column = tl.load(target_columns + tokens, mask=has_token, other=-1)
    to_target = tl.load(to_targets + tokens, mask=has_token, other=0.0)
    gradient += tl.where(columns[None, :] == target_column[:, None], to_target[:, None], 0.0)
    place = gradients + tokens.to(tl.int64)[:, None] * gradient_stride + columns[None, :]
    real = has_token[:, None] & (columns[None, :] < num_columns)
    tl.store(place, gradient.to(gradients.dtype.element_ty), mask=real)


IS_INTERPRETED = not isinstance(partial_sums, JITFunction)
