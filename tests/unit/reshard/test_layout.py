"""Shards as views of buffers, and padding as what no shard covers."""

from __future__ import annotations

import pytest
import torch

from megatron_dapo.reshard.layout import Shard, SingleHolderLayout, TensorSpec, local_holes, shard_view
from megatron_dapo.reshard.slices import Slice
from tests.reshard_oracles import flat_range_shards


def test_a_slice_shard_is_a_view_of_its_region():
    buffer = torch.zeros(4, 5)
    shard = Shard("w", (10, 20), (2, 3), "b", (1, 2))
    shard_view(buffer, shard, Slice((11, 20), (1, 2))).fill_(1)
    assert buffer.nonzero().tolist() == [[2, 2], [2, 3]]


def test_a_flat_shard_takes_a_range_of_a_flat_buffer():
    shape = (3, 4)
    values = torch.arange(12).view(shape)
    buffer = torch.full((14,), -1)
    shards = flat_range_shards("w", shape, 2, 11, "b", 4)
    for shard in shards:
        bounds = shard.bounds
        shard_view(buffer, shard).copy_(values[tuple(slice(o, o + n) for o, n in zip(bounds.offset, bounds.shape))])
    assert buffer.tolist() == [-1] * 4 + list(range(2, 11)) + [-1]
    middle = next(p for p in shards if p.global_offset == (1, 0))
    assert shard_view(buffer, middle, Slice((1, 1), (1, 2))).tolist() == [[5, 6]]


def test_a_shard_that_does_not_fit_its_buffer_is_refused():
    with pytest.raises(AssertionError, match="does not fit its buffer of shape"):
        shard_view(torch.zeros(2, 2), Shard("w", (0, 0), (2, 3), "b", (0, 0)))


def test_local_holes_are_the_padding_and_overlap_is_refused():
    top, bottom = Shard("w", (0, 0), (2, 3), "b", (0, 0)), Shard("v", (0, 0), (1, 3), "b", (1, 0))
    assert local_holes([top], {"b": (5, 3), "c": (2,)}) == {"b": (Slice((2, 0), (3, 3)),), "c": (Slice((0,), (2,)),)}
    with pytest.raises(ValueError, match=r"fill 9 elements of buffer 'b' \(5, 3\), but 6 different"):
        local_holes([top, bottom], {"b": (5, 3)})


def test_single_holder():
    layout = SingleHolderLayout({"w": TensorSpec((2, 3), torch.float32)}, num_ranks=3, holder=1)
    assert [len(layout.shards(rank)) for rank in range(3)] == [0, 1, 0]
