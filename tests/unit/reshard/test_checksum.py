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

BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float64: torch.int64, torch.uint8: torch.uint8}
MASK = (1 << 64) - 1


def _mixer(number: int, seed: int) -> int:
    """The factor of a row or word, in Python integers."""
    mixed = (number + seed) * 0x9E3779B97F4A7C15 & MASK
    for multiplier, shift in ((0xBF58476D1CE4E5B9, 30), (0x94D049BB133111EB, 27), (1, 31)):
        arithmetic = signed(mixed) >> shift
        mixed = (mixed ^ arithmetic) * multiplier & MASK
    return mixed | 1


def _oracle(values: torch.Tensor) -> int:
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


def _filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator).view(dtype)[..., 0]


@pytest.mark.parametrize("dtype", list(BITS))
@pytest.mark.parametrize("shape", [(1,), (7,), (8,), (3, 5), (4, 16), (2, 3, 12), (1, 1)])
def test_follows_its_definition(shape, dtype):
    values = _filled(shape, dtype)
    assert tensor_checksum(values) == _oracle(values)


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_parts_add_up_whatever_the_cut(data):
    dtype = data.draw(st.sampled_from(list(BITS)))
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    values = _filled(shape, dtype, 1)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_single_bit_counts(dtype):
    values = _filled((3, 6), dtype)
    before, words = tensor_checksum(values), values.contiguous().view(-1).view(BITS[dtype])
    for index in range(words.numel()):
        for bit in range(8 * dtype.itemsize - 1):
            words[index] ^= 1 << bit
            assert tensor_checksum(words.view(dtype).view(3, 6)) != before
            words[index] ^= 1 << bit


def test_places_count():
    values = _filled((64, 32), torch.float32)
    before = tensor_checksum(values)
    swapped_rows = values[[1, 0, *range(2, 64)]]
    swapped_halves = torch.cat([values[32:], values[:32]])
    shifted = values.view(-1).roll(1).view(64, 32)
    swapped_columns = values[:, [1, 0, *range(2, 32)]]
    others = [swapped_rows, swapped_halves, shifted, swapped_columns, values.roll(2, 1), values.t().reshape(64, 32)]
    assert before not in [tensor_checksum(other) for other in others]


def test_memory_that_is_not_aligned_or_contiguous():
    storage = _filled((400,), torch.float32)
    odd = storage[1:385].view(12, 32)  # starts inside a word
    assert tensor_checksum(odd) == tensor_checksum(odd.clone())
    wide = storage[:390].view(10, 39)[:, :32]  # rows begin inside words
    assert tensor_checksum(wide) == tensor_checksum(wide.clone())
    turned = storage[:384].view(12, 32).t()
    assert tensor_checksum(turned) == tensor_checksum(turned.contiguous())


def test_empty_and_scalar():
    assert tensor_checksum(torch.zeros(0, 4)) == 0
    assert tensor_checksum(torch.tensor(1.5)) == tensor_checksum(torch.tensor([1.5]))
