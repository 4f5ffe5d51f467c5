"""Checksums of many slices at once, by the fastest means that the process has. Nothing waits for the device."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import CDLL
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

import torch

from megatron_dapo.reshard.checksum import (
    COLUMN_SEED,
    MULTIPLIERS,
    ROW_SEED,
    WORD_BYTES,
    column_factors,
    row_factors,
    slice_checksum,
    slice_sum,
)
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
    device = parts[0].values.device
    if device.type == "cuda" and _fused() is not None:
        return fused_sums(parts)
    if device.type == "cpu" and native() is not None:
        return torch.tensor([native_sum(part) for part in parts], dtype=torch.int64)
    return torch.stack([slice_sum(*part) for part in parts])


def fused_sums(parts: Sequence[CountedSlice]) -> torch.Tensor:
    """Compute `slice_sums` by Triton's kernel."""
    fused = _fused()
    assert fused is not None, "Triton cannot be imported"
    factors = fused.Factors(ROW_SEED, COLUMN_SEED, MULTIPLIERS)
    slices = [(part.values.detach(), part.bounds.offset, part.shape) for part in parts]
    sums: torch.Tensor = fused.slice_sums(slices, factors)
    return sums


def native_sum(part: CountedSlice) -> int:
    """Compute a part's `slice_checksum` by compiled code, by NumPy if its rows are not whole words."""
    compiled, rows = native(), _rows(part.values, part.bounds)
    if compiled is None or rows is None:
        return slice_checksum(*part)
    row, column = _factors(part)
    return int(compiled.count(*_memory(rows), len(row), len(column), row.data_ptr(), column.data_ptr()))


def copy_and_count(target: torch.Tensor, source: CountedSlice) -> int:
    """Copy to memory of the same shape and type on the CPU; return the source's `slice_checksum`, of one reading."""
    compiled, rows = native(), _rows(source.values, source.bounds)
    target_rows = _rows(target, source.bounds)
    if compiled is None or rows is None or target_rows is None:
        total = native_sum(source)
        target.copy_(source.values)
        return total
    row, column = _factors(source)
    ends = (*_memory(target_rows), *_memory(rows))
    return int(compiled.copy_and_count(*ends, len(row), len(column), row.data_ptr(), column.data_ptr()))


def _memory(rows: torch.Tensor) -> tuple[int, int]:
    """Return the address of rows and the bytes from one to the next."""
    return rows.data_ptr(), rows.stride(0) * rows.element_size()


def _rows(values: torch.Tensor, bounds: Slice) -> torch.Tensor | None:
    """Return a view [rows, elements] whose rows are whole words; None if there is none."""
    elements = WORD_BYTES // values.dtype.itemsize
    if not bounds.volume or not bounds.shape or bounds.offset[-1] % elements or bounds.shape[-1] % elements:
        return None
    values = values.detach()
    try:
        rows = values.view(-1, bounds.shape[-1])
    except RuntimeError:  # no one stride leads from row to row
        return None
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else None


def _factors(part: CountedSlice) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the factors of the rows and words of a part whose rows are whole words."""
    cpu, elements = torch.device("cpu"), WORD_BYTES // part.values.dtype.itemsize
    first = part.bounds.offset[-1] // elements
    words = part.bounds.shape[-1] // elements
    return row_factors(part.bounds, part.shape, cpu), column_factors(first, first + words, cpu)


@cache
def _fused() -> ModuleType | None:
    """Return the module of the kernel; None if there is no Triton."""
    try:
        return import_module("megatron_dapo.ops.fused_checksum")
    # A package that is installed and broken (another CUDA, a missing symbol) raises more than ImportError.
    except Exception:
        return None


def native() -> CDLL | None:
    """Return the compiled functions; None if there is no C compiler."""
    found: CDLL | None = import_module("megatron_dapo.ops.native_checksum").library()
    return found
