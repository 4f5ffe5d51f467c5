"""The checksum against its definition in Python integers, its additivity over parts, and what it must notice."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dapo.reshard.checksum import signed, slice_checksum, tensor_checksum
from megatron_dapo.reshard.slices import Slice, subtract, whole
from tests.examples import examples

BITS = {
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float64: torch.int64,
    torch.uint8: torch.uint8,
    torch.float8_e4m3fn: torch.uint8,
}
DTYPES = list(BITS)
MASK = (1 << 64) - 1


def _mixer(number: int, seed: int) -> int:
    """The factor of a row or word, in Python integers."""
    mixed = (number + seed) * 0x9E3779B97F4A7C15 & MASK
    for multiplier, shift in ((0xBF58476D1CE4E5B9, 30), (0x94D049BB133111EB, 27), (1, 31)):
        arithmetic = signed(mixed) >> shift
        mixed = (mixed ^ arithmetic) * multiplier & MASK
    return mixed | 1


def oracle(values: torch.Tensor) -> int:
    """Row by row, word by word."""
    elements = 8 // values.dtype.itemsize
    rows = values.reshape(-1, values.shape[-1]).contiguous().view(BITS[values.dtype]).tolist()
    total = 0
    for r, row in enumerate(rows):
        for c, bits in enumerate(row):
            unsigned = bits & ((1 << 8 * values.dtype.itemsize) - 1)
            word = unsigned << (8 * values.dtype.itemsize * (c % elements))
            total += _mixer(r, 0x1234567) * _mixer(c // elements, 0x7654321) * word
    return signed(total & MASK)


def filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator).view(dtype)[..., 0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (7,), (8,), (3, 5), (4, 16), (2, 3, 12), (1, 1)])
def test_follows_its_definition(shape, dtype):
    values = filled(shape, dtype)
    assert tensor_checksum(values) == oracle(values)


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_parts_add_up_whatever_the_cut(data):
    dtype = data.draw(st.sampled_from(DTYPES))
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    values = filled(shape, dtype, 1)
    slices = [whole(shape)]
    for _ in range(3):
        start = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
        size = tuple(data.draw(st.integers(1, n - o)) for n, o in zip(shape, start))
        hole = Slice(start, size)
        slices = [part for bounds in slices for part in subtract(bounds, hole)] + [hole]
    assert sum(bounds.volume for bounds in slices) == prod(shape)
    total = sum(slice_checksum(_view(values, bounds), bounds, shape) for bounds in slices)
    assert signed(total) == tensor_checksum(values)


def _view(values: torch.Tensor, bounds: Slice) -> torch.Tensor:
    for dim, (start, size) in enumerate(zip(bounds.offset, bounds.shape)):
        values = values.narrow(dim, start, size)
    return values


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_single_bit_counts(dtype):
    values = filled((3, 6), dtype)
    before, octets = tensor_checksum(values), values.view(-1).view(torch.uint8)
    for index in range(octets.numel()):
        for bit in range(8):
            octets[index] ^= 1 << bit
            assert tensor_checksum(values) != before
            octets[index] ^= 1 << bit
    assert tensor_checksum(values) == before


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [(0, 13), (13, 26), (3, 5), (16, 26), (1, 23)])
def test_slices_that_begin_and_end_inside_words(dtype, columns):
    """A slice counts like a tensor of zeros around it."""
    values, (start, stop) = filled((5, 26), dtype), columns
    padded = torch.zeros(5, 26 * dtype.itemsize, dtype=torch.uint8).view(dtype)
    padded.view(torch.uint8)[:, start * dtype.itemsize : stop * dtype.itemsize] = values.view(torch.uint8)[
        :, start * dtype.itemsize : stop * dtype.itemsize
    ]
    part = values[:, start:stop]
    for held in (part, part.clone()):
        assert slice_checksum(held, Slice((0, start), (5, stop - start)), (5, 26)) == oracle(padded)


def test_places_count():
    values = filled((64, 32), torch.float32)
    before = tensor_checksum(values)
    swapped_rows = values[[1, 0, *range(2, 64)]]
    swapped_halves = torch.cat([values[32:], values[:32]])
    shifted = values.view(-1).roll(1).view(64, 32)
    swapped_columns = values[:, [1, 0, *range(2, 32)]]
    others = [swapped_rows, swapped_halves, shifted, swapped_columns, values.roll(2, 1), values.t().reshape(64, 32)]
    assert before not in [tensor_checksum(other) for other in others]


def test_memory_that_is_not_aligned_or_contiguous():
    storage = filled((400,), torch.float32)
    odd = storage[1:385].view(12, 32)  # starts inside a word
    assert tensor_checksum(odd) == tensor_checksum(odd.clone())
    wide = storage[:390].view(10, 39)[:, :32]  # rows begin inside words
    assert tensor_checksum(wide) == tensor_checksum(wide.clone())
    turned = storage[:384].view(12, 32).t()
    assert tensor_checksum(turned) == tensor_checksum(turned.contiguous())


def test_empty_and_scalar():
    assert tensor_checksum(torch.zeros(0, 4)) == 0
    assert tensor_checksum(torch.tensor(1.5)) == tensor_checksum(torch.tensor([1.5]))
