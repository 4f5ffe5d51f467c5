"""A tensor checksum at memory speed, which holders of its parts compute separately and add up.

The rows of a tensor (its last dimension) are read as 64-bit words, the tail filled with zeros. The checksum is

    sum over rows r and words w of  row(r) * column(w) * word[r, w]   modulo 2^64

with pseudo-random odd factors of the row and word number in the WHOLE tensor. An odd factor is invertible, so a change
of any one element changes the sum. Misplaced rows, columns or elements and shifted data change it unless their
difference times a pseudo-random factor vanishes modulo 2^64. The inner sum is one integer matrix-vector product.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

import torch

from megatron_dapo.reshard.slices import Coordinates, Slice, whole

_WORD_BYTES = 8
_UNSIGNED_BITS = {1: (torch.uint8, 0xFF), 2: (torch.int16, 0xFFFF), 4: (torch.int32, 0xFFFFFFFF), 8: (torch.int64, -1)}
_ROW_SEED, _COLUMN_SEED = 0x1234567, 0x7654321
_CHUNK_WORDS = 1 << 22


def slice_checksum(values: torch.Tensor, bounds: Slice, shape: Coordinates) -> int:
    """Return the signed 64-bit sum of slice `bounds` of a tensor of shape `shape`; `values` have the slice's shape."""
    if not bounds.volume:
        return 0
    if not shape:  # a scalar is a row of one element
        values, bounds, shape = values.view(1), Slice((0,), (1,)), (1,)
    start, size = bounds.offset[-1], bounds.shape[-1]
    elements = _WORD_BYTES // values.dtype.itemsize
    rows = _row_factors(bounds, shape, values.device)
    if start % elements or size % elements:
        dots = _element_dots(values, start, elements)
    else:
        columns = _column_factors(start // elements, (start + size) // elements, values.device)
        dots = _word_dots(_words(values, elements), columns)
    return int((dots * rows).sum())  # int64 wraps: sums and products are modulo 2^64


def tensor_checksum(values: torch.Tensor) -> int:
    """Return `slice_checksum` of a whole tensor."""
    shape = tuple(values.shape)
    return slice_checksum(values.detach(), whole(shape), shape)


def signed(value: int) -> int:
    """Return an integer modulo 2^64 as the signed 64-bit number that int64 sums give."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def _words(values: torch.Tensor, elements: int) -> torch.Tensor:
    """Return the values as [rows, words], without a copy if the memory layout allows it."""
    rows = values.reshape(-1, values.shape[-1])
    aligned = (
        rows.stride(1) == 1
        and rows.stride(0) % elements == 0
        and rows.storage_offset() % elements == 0
        and rows.data_ptr() % _WORD_BYTES == 0
    )
    return (rows if aligned else rows.clone(memory_format=torch.contiguous_format)).view(torch.int64)


def _word_dots(words: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Sum each row's words times their factors."""
    if words.device.type == "cpu":
        return torch.mv(words, columns)
    # There is no integer matrix product on accelerators.
    rows = max(1, _CHUNK_WORDS // words.shape[1])
    return torch.cat([(words[s : s + rows] * columns).sum(1) for s in range(0, words.shape[0], rows)])


def _element_dots(values: torch.Tensor, start: int, elements: int) -> torch.Tensor:
    """Compute `_word_dots` element by element, for rows that begin or end inside a word."""
    dtype, mask = _UNSIGNED_BITS[values.dtype.itemsize]
    numbers = torch.arange(start, start + values.shape[-1], device=values.device)
    # A word is little-endian: its first element is in the lowest bits.
    shifts = (numbers % elements) * (8 * values.dtype.itemsize)
    factors = _odd(numbers.div(elements, rounding_mode="floor"), _COLUMN_SEED) << shifts
    bits = values.reshape(-1, values.shape[-1]).contiguous().view(dtype)
    rows = max(1, _CHUNK_WORDS // bits.shape[1])
    # The mask undoes the sign extension, which would spill into the bits of the word's other elements.
    return torch.cat([((b.to(torch.int64) & mask) * factors).sum(1) for b in bits.split(rows)])


# A model's layers share a few shapes. On a GPU their factors take about thirty small kernels to make and five to use.
@lru_cache(maxsize=64)
def _row_factors(bounds: Slice, shape: Coordinates, device: torch.device) -> torch.Tensor:
    return _odd(_row_numbers(bounds, shape, device), _ROW_SEED)


@lru_cache(maxsize=64)
def _column_factors(start: int, end: int, device: torch.device) -> torch.Tensor:
    return _odd(torch.arange(start, end, device=device), _COLUMN_SEED)


def _row_numbers(bounds: Slice, shape: Coordinates, device: torch.device) -> torch.Tensor:
    """Return each slice row's number in the whole tensor, in the slice's order."""
    numbers = torch.zeros((), dtype=torch.int64, device=device)
    for dim, (start, size) in enumerate(zip(bounds.offset[:-1], bounds.shape[:-1])):
        index = torch.arange(start, start + size, device=device) * prod(shape[dim + 1 : -1])
        numbers = numbers.unsqueeze(-1) + index
    return numbers.reshape(-1)


def _odd(numbers: torch.Tensor, seed: int) -> torch.Tensor:
    """Return pseudo-random odd 64-bit factors for integers, mixed by wrapping multiplications and shifts."""
    # SplitMix64's finalizer, with arithmetic shifts: torch has no unsigned ones for int64.
    mixed = (numbers + seed) * signed(0x9E3779B97F4A7C15)
    for multiplier, shift in ((0xBF58476D1CE4E5B9, 30), (0x94D049BB133111EB, 27)):
        mixed = (mixed ^ (mixed >> shift)) * signed(multiplier)
    return (mixed ^ (mixed >> 31)) | 1
