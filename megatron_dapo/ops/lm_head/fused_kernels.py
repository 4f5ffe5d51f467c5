"""Triton kernels of the head: a tile of logits is computed, reduced and, unless a training pass keeps it, thrown away without
leaving the chip.

Both kernels with products multiply [BLOCK_TOKENS, width] hidden states by [width, BLOCK_COLUMNS] of the transposed weight in
steps of BLOCK_WIDTH, with fp32 sums. Pointers are to the first element; rows are `*_stride` elements apart, elements of a row
are adjacent. Offsets are 64-bit: a weight can have more than 2^31 elements. WIDEN multiplies in fp32, where the sums of 16-bit
factors are the same: Triton's interpreter takes bf16 factors for integers.

TMA: tiles are copied by the tensor memory accelerator of compute capability 9.0, which needs rows and their strides of a
multiple of 16 bytes. FLATTEN: a program's loops over tiles and over the width become one, so that the next tile's factors are
on their way while the last one is reduced.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

LEAST = tl.constexpr(-3.4028234663852886e38)  # the least fp32: the maximum of no logits
LEAST_HALF = tl.constexpr(-65504.0)  # the least fp16


@triton.jit
def _rows(matrix, num_rows, width, stride, BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr, TMA: tl.constexpr):
    """A factor as `_tile` loads it: its pointer or, for TMA, a description of the matrix."""
    if TMA:
        return tl.make_tensor_descriptor(matrix, [num_rows, width], [stride, 1], [BLOCK_ROWS, BLOCK_WIDTH])
    else:
        return matrix


@triton.jit
def _tile(
    hidden,  # pointers from `_rows`, like `weight`
    weight,
    first_token,
    first_column,
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
    TMA: tl.constexpr,
):
    """fp32 products [BLOCK_TOKENS, BLOCK_COLUMNS] from these first token and column on; 0 beyond the last of either."""
    total = tl.zeros((BLOCK_TOKENS, BLOCK_COLUMNS), tl.float32)
    steps = tl.arange(0, BLOCK_WIDTH)
    if not TMA:
        tokens, columns = first_token + tl.arange(0, BLOCK_TOKENS), first_column + tl.arange(0, BLOCK_COLUMNS)
        left = hidden + tokens.to(tl.int64)[:, None] * hidden_stride + steps[None, :]
        right = weight + columns.to(tl.int64)[None, :] * weight_stride + steps[:, None]
        has_token, has_column = tokens[:, None] < num_tokens, columns[None, :] < num_columns
    for start in range(0, width, BLOCK_WIDTH):
        if TMA:
            a = hidden.load([first_token, start])
            b = weight.load([first_column, start]).T
        else:
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
    kept,  # out [tokens, columns] logits relative to the largest of the token's tile; not used without KEEP
    kept_largest,  # out [tokens, groups of GROUP columns] fp32, of the tile that the group is in
    num_tokens,
    num_columns,
    width,
    columns_a_split,  # a multiple of BLOCK_COLUMNS
    hidden_stride,
    weight_stride,
    kept_stride,
    groups_stride,
    one_over_temperature,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    TMA: tl.constexpr,
    FLATTEN: tl.constexpr,
    KEEP: tl.constexpr,
    GROUP: tl.constexpr,  # divides BLOCK_COLUMNS
):
    """Program (split of the columns, block of tokens): those that run at a time take few blocks of tokens, which stay in the
    cache while every split goes through its columns."""
    first_token = tl.program_id(1) * BLOCK_TOKENS
    tokens = first_token + tl.arange(0, BLOCK_TOKENS)
    split, num_splits = tl.program_id(0), tl.num_programs(0)
    has_token = tokens < num_tokens
    left = _rows(hidden, num_tokens, width, hidden_stride, BLOCK_TOKENS, BLOCK_WIDTH, TMA)
    right = _rows(weight, num_columns, width, weight_stride, BLOCK_COLUMNS, BLOCK_WIDTH, TMA)
    target_column = tl.load(target_columns + tokens, mask=has_token, other=-1)
    largest, total, weighted, target = _begin(BLOCK_TOKENS)
    first = split * columns_a_split
    for start in tl.range(first, min(first + columns_a_split, num_columns), BLOCK_COLUMNS, flatten=FLATTEN):
        columns = start + tl.arange(0, BLOCK_COLUMNS)
        logits = one_over_temperature * _tile(
            left,
            right,
            first_token,
            start,
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
            TMA,
        )
        if KEEP:
            row = tokens.to(tl.int64)
            real = has_token[:, None] & (columns[None, :] < num_columns)
            of_tile = tl.max(tl.where(columns[None, :] < num_columns, logits, LEAST), axis=1)
            relative = logits - of_tile[:, None]
            # The probability is 0 either way; a NaN stays one.
            relative = tl.where(relative < LEAST_HALF, LEAST_HALF, relative)
            place = kept + row[:, None] * kept_stride + columns[None, :]
            tl.store(place, relative.to(kept.dtype.element_ty), mask=real)
            for group in tl.static_range(BLOCK_COLUMNS // GROUP):
                of_group = kept_largest + row * groups_stride + start // GROUP + group
                tl.store(of_group, of_tile, mask=has_token & (start + group * GROUP < num_columns))
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
def _store_gradients(
    logits,  # a tile of them
    tokens,
    columns,
    target_columns,
    maxima,  # [tokens], of the whole vocabulary, as are all that follow
    one_over_totals,
    constants,  # [tokens] what multiplies p whatever the logit
    slopes,  # [tokens] what multiplies p * (logit - maximum); not read without HAS_SLOPE
    to_targets,  # [tokens] what is added at the target
    gradients,  # out [tokens, columns] in the type of the products to come
    num_tokens,
    num_columns,
    gradient_stride,
    HAS_SLOPE: tl.constexpr,
):
    has_token = tokens < num_tokens
    relative = logits - tl.load(maxima + tokens, mask=has_token, other=0.0)[:, None]
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


@triton.jit
def logit_gradients(
    hidden,
    weight,
    target_columns,  # columns of `gradients`, see `_store_gradients`
    maxima,
    one_over_totals,
    constants,
    slopes,
    to_targets,
    gradients,
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
    TMA: tl.constexpr,
    HAS_SLOPE: tl.constexpr,
):
    """Program (block of columns in a group, block of tokens, group): a group's columns stay in the cache for all tokens."""
    first_token = tl.program_id(1) * BLOCK_TOKENS
    first_column = (tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)) * BLOCK_COLUMNS
    products = _tile(
        _rows(hidden, num_tokens, width, hidden_stride, BLOCK_TOKENS, BLOCK_WIDTH, TMA),
        _rows(weight, num_columns, width, weight_stride, BLOCK_COLUMNS, BLOCK_WIDTH, TMA),
        first_token,
        first_column,
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
        TMA,
    )
    _store_gradients(
        products * one_over_temperature,
        first_token + tl.arange(0, BLOCK_TOKENS),
        first_column + tl.arange(0, BLOCK_COLUMNS),
        target_columns,
        maxima,
        one_over_totals,
        constants,
        slopes,
        to_targets,
        gradients,
        num_tokens,
        num_columns,
        gradient_stride,
        HAS_SLOPE,
    )


@triton.jit
def gradients_of_kept(
    kept,  # the logits kept by `partial_sums`, from this tile's first token and column on
    kept_largest,  # largest logits, from the first token and the first column's group on
    target_columns,
    maxima,
    one_over_totals,
    constants,
    slopes,
    to_targets,
    gradients,
    num_tokens,
    num_columns,
    kept_stride,
    groups_stride,
    gradient_stride,
    BLOCK_TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_SLOPE: tl.constexpr,
):
    """Program (group of columns, block of tokens): what `logit_gradients` gives, from logits that are read once."""
    tokens = tl.program_id(1) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    columns = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    row, has_token = tokens.to(tl.int64), tokens < num_tokens
    largest = tl.load(kept_largest + row * groups_stride + tl.program_id(0), mask=has_token, other=0.0)
    there = has_token[:, None] & (columns[None, :] < num_columns)
    logits = tl.load(kept + row[:, None] * kept_stride + columns[None, :], mask=there, other=0.0).to(tl.float32)
    _store_gradients(
        logits + largest[:, None],
        tokens,
        columns,
        target_columns,
        maxima,
        one_over_totals,
        constants,
        slopes,
        to_targets,
        gradients,
        num_tokens,
        num_columns,
        gradient_stride,
        HAS_SLOPE,
    )


IS_INTERPRETED = not isinstance(partial_sums, JITFunction)
