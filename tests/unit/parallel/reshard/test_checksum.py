"""Checksums add up over any cut and notice one changed bit or two swapped rows."""

from __future__ import annotations

import pytest
import torch

from megatron_dapo.parallel.reshard.boxes import Box, flat_range_boxes
from megatron_dapo.parallel.reshard.checksum import box_checksum, tensor_checksum

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.uint8]


def _values(dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(6, 5, 3, generator=torch.Generator().manual_seed(0)) * 20).abs().to(dtype)


def _part(values: torch.Tensor, box: Box) -> torch.Tensor:
    return values[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape))]


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_add_up_to_the_definition(dtype):
    values = _values(dtype)
    bits = (
        values.reshape(-1)
        .view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
        .tolist()
    )
    expected = sum((2 * i + 1) * b for i, b in enumerate(bits)) & (2**64 - 1)
    assert int(tensor_checksum(values)) & (2**64 - 1) == expected
    parts = [b for r in ((0, 17), (17, 60), (60, 90)) for b in flat_range_boxes(tuple(values.shape), *r)]
    total = sum(box_checksum(_part(values, box), box, tuple(values.shape)) for box in parts)
    assert int(total) & (2**64 - 1) == expected


def test_one_bit_and_swapped_rows_are_noticed():
    values = _values(torch.float32)
    before = int(tensor_checksum(values))
    flipped = values.clone()
    flipped.view(torch.int32)[3, 2, 1] ^= 1
    swapped = values.clone()
    swapped[[0, 1]] = values[[1, 0]]
    assert before not in (int(tensor_checksum(flipped)), int(tensor_checksum(swapped)))


def test_large_tensor_is_summed_in_chunks():
    values = torch.arange(3_000_000, dtype=torch.int32).view(1_000_000, 3)
    index = torch.arange(3_000_000)
    assert int(tensor_checksum(values)) == int(((2 * index + 1) * index).sum())


def test_scalar():
    assert int(tensor_checksum(torch.tensor(7, dtype=torch.int64))) == 7
