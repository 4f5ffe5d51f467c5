"""Checksums of many slices of tensors in one pass over their memory, by one kernel for each size of word.

The definition is `reshard.checksum`'s: the sum over rows and 64-bit words of row(r) * column(w) * word[r, w] modulo 2^64.
Factors are computed in registers. Nothing waits for the device: the sums of all slices are one tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
import triton
import triton.language as tl

WORD_BYTES = 8
MOST_SPLITS = 128  # programs a slice
BLOCK_ROWS, BLOCK_COLUMNS = 8, 512
_FIELDS = tl.constexpr(10)


@dataclass(frozen=True)
class Factors:
    """Constants of the pseudo-random factors: seeds of rows and columns, multipliers of the mixer."""

    row_seed: int
    column_seed: int
    multipliers: tuple[int, ...]


class _Axis(NamedTuple):
    """A leading dimension of a slice: its steps in memory, in elements, and in numbers of the whole tensor's rows."""

    size: int
    stride: int
    numbers: int


class _Rows(NamedTuple):
    """One row of the kernel's table; memory in elements of the table's size."""

    address: int
    num_columns: int
    first_column: int
    first_row: int
    outer: _Axis
    inner: _Axis

    def fields(self) -> list[int]:
        return [*self[:4], *self.outer, *self.inner]


@triton.jit
def _odd(numbers, SEED: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr):
    """Pseudo-random odd factors of int64 numbers."""
    mixed = (numbers + SEED) * FIRST
    mixed = (mixed ^ (mixed >> 30)) * SECOND
    mixed = (mixed ^ (mixed >> 27)) * THIRD
    return (mixed ^ (mixed >> 31)) | 1


@triton.jit
def partial_sums(
    table,  # int64 [slices, _FIELDS]
    sums,  # int64 [slices, splits]
    splits,
    BITS: tl.constexpr,  # size of an element
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    ROW_SEED: tl.constexpr,
    COLUMN_SEED: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
):
    """Sum every splits-th tile of a slice."""
    entry, split = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    fields = table + entry * _FIELDS
    address, num_columns = tl.load(fields), tl.load(fields + 1)
    first_column, first_row = tl.load(fields + 2), tl.load(fields + 3)
    num_outer, outer_stride, outer_numbers = tl.load(fields + 4), tl.load(fields + 5), tl.load(fields + 6)
    num_inner, inner_stride, inner_numbers = tl.load(fields + 7), tl.load(fields + 8), tl.load(fields + 9)
    if BITS == 64:
        memory = address.to(tl.pointer_type(tl.int64))
    elif BITS == 32:
        memory = address.to(tl.pointer_type(tl.uint32))
    elif BITS == 16:
        memory = address.to(tl.pointer_type(tl.uint16))
    else:
        memory = address.to(tl.pointer_type(tl.uint8))
    num_rows = num_outer * num_inner
    across = tl.cdiv(num_columns, BLOCK_COLUMNS)
    total = tl.zeros((BLOCK_ROWS,), tl.int64)
    for tile in range(split, tl.cdiv(num_rows, BLOCK_ROWS) * across, splits):
        rows = (tile // across) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS).to(tl.int64)
        columns = (tile % across) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS).to(tl.int64)
        outer, inner = rows // num_inner, rows % num_inner
        places = memory + (outer * outer_stride + inner * inner_stride)[:, None] + columns[None, :]
        is_inside = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
        # Unsigned elements: a sign would spill into the bits of the word's other elements.
        values = tl.load(places, mask=is_inside, other=0).to(tl.int64)
        numbers = first_column + columns
        factors = _odd(numbers // (64 // BITS), COLUMN_SEED, FIRST, SECOND, THIRD) << (numbers % (64 // BITS) * BITS)
        row_numbers = first_row + outer * outer_numbers + inner * inner_numbers
        total += tl.sum(values * factors[None, :], 1) * _odd(row_numbers, ROW_SEED, FIRST, SECOND, THIRD)
    tl.store(sums + entry * splits + split, tl.sum(total, 0))


def slice_sums(
    slices: Sequence[tuple[torch.Tensor, Sequence[int], Sequence[int]]], factors: Factors
) -> torch.Tensor:
    """Return int64 [slices]: the sum of each (values, offset in the whole tensor, shape of the whole tensor).

    All values are on one device, of at least one slice.
    """
    device = slices[0][0].device
    tables: dict[int, list[_Rows]] = {}
    owners: dict[int, list[int]] = {}
    alive = []  # copies must outlive the launch
    for index, (values, offset, shape) in enumerate(slices):
        if not values.numel():
            continue
        if values.dim() and values.stride(-1) != 1 and values.size(-1) > 1:
            values = values.contiguous()
            alive.append(values)
        for size, rows in _rows(values, offset, shape):
            tables.setdefault(size, []).append(rows)
            owners.setdefault(size, []).append(index)
    found = torch.zeros(len(slices), dtype=torch.int64, device=device)
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        for size, table in tables.items():
            sums = _launch(_to_device([rows.fields() for rows in table], device), 8 * size, _splits(table), factors)
            found.index_add_(0, _to_device(owners[size], device), sums)
    return found


def _splits(table: Sequence[_Rows]) -> int:
    """Return the programs a slice: no more than the largest has tiles."""
    sizes = ((rows.outer.size * rows.inner.size, rows.num_columns) for rows in table)
    return min(MOST_SPLITS, max(triton.cdiv(r, BLOCK_ROWS) * triton.cdiv(c, BLOCK_COLUMNS) for r, c in sizes))


def _launch(entries: torch.Tensor, bits: int, splits: int, factors: Factors) -> torch.Tensor:
    """Return the sum of each of the table's entries."""
    partial = torch.empty(len(entries), splits, dtype=torch.int64, device=entries.device)
    blocks = {"BLOCK_ROWS": BLOCK_ROWS, "BLOCK_COLUMNS": BLOCK_COLUMNS}
    partial_sums[(len(entries), splits)](entries, partial, splits, BITS=bits, **blocks, **constants(factors))
    return partial.sum(1)


def constants(factors: Factors) -> dict[str, int]:
    """Return the kernel's constants of the factors."""
    first, second, third = factors.multipliers
    return {
        "ROW_SEED": factors.row_seed,
        "COLUMN_SEED": factors.column_seed,
        "FIRST": first,
        "SECOND": second,
        "THIRD": third,
    }


def _to_device(numbers: list, device: torch.device) -> torch.Tensor:
    """Return int64 numbers on the device, which is not waited for."""
    return torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def _rows(values: torch.Tensor, offset: Sequence[int], shape: Sequence[int]) -> Iterator[tuple[int, _Rows]]:
    """Yield the size of an element and the table's rows of a slice: whole words if memory is aligned to them."""
    if not values.dim():
        values, offset, shape = values.view(1), (0,), (1,)
    numbers = [prod(shape[dim + 1 : -1]) for dim in range(len(shape) - 1)]
    first_row = sum(start * step for start, step in zip(offset[:-1], numbers))
    leading = [_Axis(*axis) for axis in zip(values.shape[:-1], values.stride()[:-1], numbers)]
    axes = _merged([axis for axis in leading if axis.size > 1])
    columns = (values.size(-1), offset[-1])
    size = values.dtype.itemsize
    in_bytes = [number * size for number in (*columns, *(axis.stride for axis in axes))]
    if values.data_ptr() % WORD_BYTES == 0 and not any(number % WORD_BYTES for number in in_bytes):
        elements, size = WORD_BYTES // size, WORD_BYTES
        columns = (columns[0] // elements, columns[1] // elements)
        axes = [axis._replace(stride=axis.stride // elements) for axis in axes]
    for address, row, outer, inner in _nested(values.data_ptr(), first_row, axes, size):
        yield size, _Rows(address, *columns, row, outer, inner)


def _merged(axes: Sequence[_Axis]) -> list[_Axis]:
    """Join neighboring axes that are one in memory and in the numbers of rows."""
    found: list[_Axis] = []
    for axis in axes:
        if found and (found[-1].stride, found[-1].numbers) == (axis.size * axis.stride, axis.size * axis.numbers):
            found[-1] = axis._replace(size=found[-1].size * axis.size)
        else:
            found.append(axis)
    return found


def _nested(address: int, row: int, axes: Sequence[_Axis], size: int) -> Iterator[tuple[int, int, _Axis, _Axis]]:
    """Yield (address, first row, outer axis, inner axis); the kernel has two axes, so others are walked here."""
    if len(axes) > 2:
        for step in range(axes[0].size):
            start = address + step * axes[0].stride * size
            yield from _nested(start, row + step * axes[0].numbers, axes[1:], size)
        return
    outer, inner = [_Axis(1, 0, 0)] * (2 - len(axes)) + list(axes)
    yield address, row, outer, inner
