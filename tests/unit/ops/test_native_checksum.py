"""The compiled checksum against Python integers: every slice, layout of memory and bit, counted only or while copied."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dapo.bridge.protocol import checksums
from megatron_dapo.bridge.protocol.checksums import CountedSlice, copy_and_count, native_sum, slice_sums
from megatron_dapo.ops import native, native_checksum
from megatron_dapo.reshard.checksum import slice_checksum
from megatron_dapo.reshard.layout import slice_view
from megatron_dapo.reshard.slices import Slice, whole
from tests.examples import examples
from tests.unit.reshard.test_checksum import DTYPES, filled, oracle

pytestmark = pytest.mark.skipif(native_checksum.library() is None, reason="there is no C compiler")


def part(values: torch.Tensor) -> CountedSlice:
    shape = tuple(values.shape)
    return CountedSlice(values, whole(shape), shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(8,), (7,), (3, 16), (2, 3, 24), (300, 2048), (3, 5000), (0, 8)])
def test_follows_the_definition(shape, dtype):
    values = filled(shape, dtype)
    expected = oracle(values) if values.numel() < 2000 else slice_checksum(*part(values))
    copied = torch.empty_like(values)
    assert [native_sum(part(values)), *slice_sums([part(values)]).tolist()] == [expected] * 2
    assert copy_and_count(copied, part(values)) == expected and torch.equal(_bits(copied), _bits(values))


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_slices_of_any_layout_are_counted_and_copied(data):
    """Turned, sliced and shifted by odd bytes, at both ends."""
    dtype = data.draw(st.sampled_from(DTYPES))
    shape = tuple(data.draw(st.lists(st.sampled_from([1, 2, 3, 5, 8, 16]), min_size=1, max_size=4)))
    start = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    bounds = Slice(start, tuple(data.draw(st.integers(1, n - o)) for n, o in zip(shape, start)))
    tensor, holder = filled(shape, dtype, data.draw(st.integers(0, 9))), torch.zeros(shape, dtype=dtype)
    if data.draw(st.booleans()):
        order = data.draw(st.permutations(range(len(shape))))
        back = [order.index(dim) for dim in range(len(shape))]
        tensor = tensor.permute(order).contiguous().permute(back)
    values, target = slice_view(tensor, bounds), slice_view(holder, bounds)
    if data.draw(st.booleans()):
        room = torch.zeros(values.numel() * dtype.itemsize + 8, dtype=torch.uint8)
        first = dtype.itemsize * data.draw(st.integers(0, 8 // dtype.itemsize))
        target = room[first : first + values.numel() * dtype.itemsize].view(dtype).view(bounds.shape)
    expected = slice_checksum(values, bounds, shape)
    counted = CountedSlice(values, bounds, shape)
    assert native_sum(counted) == expected and copy_and_count(target, counted) == expected
    assert torch.equal(_bits(target), _bits(values))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_counts(dtype):
    values = filled((2, 16), dtype)
    before, octets = native_sum(part(values)), values.view(-1).view(torch.uint8)
    for index in range(octets.numel()):
        for bit in range(8):
            octets[index] ^= 1 << bit
            assert native_sum(part(values)) != before != copy_and_count(torch.empty_like(values), part(values))
            octets[index] ^= 1 << bit
    assert native_sum(part(values)) == before


def test_the_source_is_counted_whatever_becomes_of_the_copy():
    """All rows land in the memory of one row, as a wrong stride would write them."""
    values, target = filled((6, 8), torch.float32), torch.zeros(1, 8).expand(6, 8)
    assert copy_and_count(target, part(values)) == oracle(values)
    assert torch.equal(_bits(target[:1]), _bits(values[5:]))


def test_without_a_compiler_numpy_counts(monkeypatch):
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    assert native_checksum.library.__wrapped__() is None
    monkeypatch.setattr(checksums, "native", lambda: None)
    values = filled((4, 16), torch.bfloat16)
    copied = torch.empty_like(values)
    assert [*slice_sums([part(values)]).tolist(), copy_and_count(copied, part(values))] == [oracle(values)] * 2
    assert torch.equal(_bits(copied), _bits(values))


def test_a_compiler_that_fails_is_no_error(monkeypatch, tmp_path):
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(native.shutil, "which", lambda name: str(broken))
    assert native_checksum.library.__wrapped__() is None
