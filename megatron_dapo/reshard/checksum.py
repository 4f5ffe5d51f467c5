"""A tensor checksum at memory speed, which holders of its parts compute separately and add up.

The rows of a tensor (its last dimension) are read as 64-bit words, the tail filled with zeros. The checksum is

    sum over rows r and words w of  row(r) * column(w) * word[r, w]   modulo 2^64

with pseudo-random odd factors of the row and word number in the WHOLE tensor. An odd factor is invertible, so a change
of any one element changes the sum. Misplaced rows, columns or elements and shifted data change it unless their
difference times a pseudo-random factor vanishes modulo 2^64: two changes of only the highest bit of a word cancel, and
changes of only the k highest bits of several words with a probability of 2^-k. The inner sum is one integer
matrix-vector product. `ops.fused_checksum` computes the same on GPUs, and `ops.native_checksum` on CPUs with a C compiler.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

import numpy as np
import torch

from megatron_dapo.reshard.slices import Coordinates, Slice, whole
from megatron_dapo.rounding import round_up

WORD_BYTES = 8
_UNSIGNED_BITS = {1: (torch.uint8, 0xFF), 2: (torch.int16, 0xFFFF), 4: (torch.int32, 0xFFFFFFFF), 8: (torch.int64, -1)}
ROW_SEED, COLUMN_SEED = 0x1234567, 0x7654321
# SplitMix64's finalizer, with arithmetic shifts: torch has no unsigned ones for int64.
MULTIPLIERS = tuple(n - (1 << 64) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))  # signed
_CHUNK_WORDS = 1 << 22


def slice_checksum(values: torch.Tensor, bounds: Slice, shape: Coordinates) -> int:
    """Return the signed 64-bit sum of slice `bounds` of a tensor of shape `shape`; `values` have the slice's shape."""
    return int(slice_sum(values, bounds, shape))


def slice_sum(values: torch.Tensor, bounds: Slice, shape: Coordinates) -> torch.Tensor:
    """Return `slice_checksum` as an int64 scalar on the values' device, without waiting for the device."""
    if not bounds.volume:
        return torch.zeros((), dtype=torch.int64, device=values.device)
    if not shape:  # a scalar is a row of one element
        values, bounds, shape = values.view(1), Slice((0,), (1,)), (1,)
    dots = _dots(values.detach().reshape(-1, bounds.shape[-1]), bounds.offset[-1])
    return (dots * row_factors(bounds, shape, values.device)).sum()  # int64 wraps: sums and products are modulo 2^64


def tensor_checksum(values: torch.Tensor) -> int:
    """Return `slice_checksum` of a whole tensor."""
    shape = tuple(values.shape)
    return slice_checksum(values, whole(shape), shape)


def signed(value: int) -> int:
    """Return an integer modulo 2^64 as the signed 64-bit number that int64 sums give."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def _dots(rows: torch.Tensor, start: int) -> torch.Tensor:
    """Sum each row's words times their factors; `rows` [rows, elements] begin at element `start` of the tensor's rows."""
    elements, stop = WORD_BYTES // rows.dtype.itemsize, start + rows.shape[1]
    first, last = round_up(start, elements), stop // elements * elements
    if first >= last:
        return _element_dots(rows, start, elements)
    inner = _words(rows[:, first - start : last - start], elements)
    dots = _word_dots(inner, column_factors(first // elements, last // elements, rows.device))
    if start < first:
        dots = dots + _element_dots(rows[:, : first - start], start, elements)
    if last < stop:
        dots = dots + _element_dots(rows[:, last - start :], last, elements)
    return dots


def _words(rows: torch.Tensor, elements: int) -> torch.Tensor:
    """Return the rows as [rows, words], without a copy if the memory layout allows it."""
    aligned = (
        rows.stride(1) == 1
        and rows.stride(0) % elements == 0
        and rows.storage_offset() % elements == 0
        and rows.data_ptr() % WORD_BYTES == 0
    )
    return (rows if aligned else rows.clone(memory_format=torch.contiguous_format)).view(torch.int64)


def _word_dots(words: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Sum each row's words times their factors."""
    if words.device.type == "cpu":
        # Twice as fast as torch.mv. Unsigned numbers wrap.
        dots = np.einsum("rw,w->r", words.numpy().view(np.uint64), columns.numpy().view(np.uint64))
        return torch.from_numpy(dots.view(np.int64))
    # There is no integer matrix product on accelerators.
    rows = max(1, _CHUNK_WORDS // words.shape[1])
    return torch.cat([(words[s : s + rows] * columns).sum(1) for s in range(0, words.shape[0], rows)])


def _element_dots(rows: torch.Tensor, start: int, elements: int) -> torch.Tensor:
    """Compute `_word_dots` element by element, for rows that begin or end inside a word."""
    dtype, mask = _UNSIGNED_BITS[rows.dtype.itemsize]
    numbers = torch.arange(start, start + rows.shape[1], device=rows.device)
    # A word is little-endian: its first element is in the lowest bits.
    shifts = (numbers % elements) * (8 * rows.dtype.itemsize)
    factors = _odd(numbers.div(elements, rounding_mode="floor"), COLUMN_SEED) << shifts
    bits = rows.contiguous().view(dtype)
    # The mask undoes the sign extension, which would spill into the bits of the word's other elements.
    parts = bits.split(max(1, _CHUNK_WORDS // bits.shape[1]))
    return torch.cat([((part.to(torch.int64) & mask) * factors).sum(1) for part in parts])


# A model's layers share a few shapes.
@lru_cache(maxsize=64)
def row_factors(bounds: Slice, shape: Coordinates, device: torch.device) -> torch.Tensor:
    """Return int64 [rows]: the factors of a slice's rows, in the slice's order."""
    return _odd(_row_numbers(bounds, shape, device), ROW_SEED)


@lru_cache(maxsize=64)
def column_factors(start: int, end: int, device: torch.device) -> torch.Tensor:
    """Return int64 [end - start]: the factors of words `start` to `end` of a row."""
    return _odd(torch.arange(start, end, device=device), COLUMN_SEED)


def _row_numbers(bounds: Slice, shape: Coordinates, device: torch.device) -> torch.Tensor:
    """Return each slice row's number in the whole tensor, in the slice's order."""
    numbers = torch.zeros((), dtype=torch.int64, device=device)
    for dim, (start, size) in enumerate(zip(bounds.offset[:-1], bounds.shape[:-1])):
        index = torch.arange(start, start + size, device=device) * prod(shape[dim + 1 : -1])
        numbers = numbers.unsqueeze(-1) + index
    return numbers.reshape(-1)


def _odd(numbers: torch.Tensor, seed: int) -> torch.Tensor:
    """Return pseudo-random odd 64-bit factors for integers, mixed by wrapping multiplications and shifts."""
    mixed = (numbers + seed) * MULTIPLIERS[0]
    mixed = (mixed ^ (mixed >> 30)) * MULTIPLIERS[1]
    mixed = (mixed ^ (mixed >> 27)) * MULTIPLIERS[2]
    return (mixed ^ (mixed >> 31)) | 1
