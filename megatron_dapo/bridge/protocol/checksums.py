"""Checksums of many slices at once, by the fastest means that the process has. Nothing waits for the device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

import torch

from megatron_dapo.reshard.checksum import COLUMN_SEED, MULTIPLIERS, ROW_SEED, slice_sum
from megatron_dapo.reshard.slices import Coordinates, Slice


class CountedSlice(NamedTuple):
    """Values of slice `bounds` of a tensor of shape `shape`."""

    values: torch.Tensor
    bounds: Slice
    shape: Coordinates


def slice_sums(parts: Sequence[CountedSlice]) -> torch.Tensor:
    """Return int64 [parts] on the parts' one device: each part's `slice_checksum`."""
    if not parts:
        return torch.zeros(0, dtype=torch.int64)
    if parts[0].values.is_cuda and _fused() is not None:
        return fused_sums(parts)
    return torch.stack([slice_sum(*part) for part in parts])


def fused_sums(parts: Sequence[CountedSlice]) -> torch.Tensor:
    """Compute `slice_sums` by Triton's kernel."""
    fused = _fused()
    assert fused is not None, "Triton cannot be imported"
    factors = fused.Factors(ROW_SEED, COLUMN_SEED, MULTIPLIERS)
    slices = [(part.values.detach(), part.bounds.offset, part.shape) for part in parts]
    sums: torch.Tensor = fused.slice_sums(slices, factors)
    return sums


@cache
def _fused() -> ModuleType | None:
    """Return the module of the kernel; None if there is no Triton."""
    try:
        return import_module("megatron_dapo.ops.fused_checksum")
    # A package that is installed and broken (another CUDA, a missing symbol) raises more than ImportError.
    except Exception:
        return None
