"""Arithmetic of n-dimensional slices: intersection, difference, and flat ranges as slices.

A slice is [offset, offset + shape) of a row-major tensor; a scalar is the slice ((), ()) of volume 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import NamedTuple

Coordinates = tuple[int, ...]


class Slice(NamedTuple):
    """The elements [offset, offset + shape) of a tensor, one pair of numbers per dimension."""

    offset: Coordinates
    shape: Coordinates

    @property
    def volume(self) -> int:
        return prod(self.shape)

    def __str__(self) -> str:
        return "[" + ", ".join(f"{o}:{o + n}" for o, n in zip(self.offset, self.shape)) + "]"


def whole(shape: Coordinates) -> Slice:
    """Return the slice of a full tensor of this shape."""
    return Slice((0,) * len(shape), tuple(shape))


def intersect(a: Slice, b: Slice) -> Slice | None:
    """Return the intersection of two slices with equally many dimensions; None if they share no element."""
    offset, shape = [], []
    for a_start, a_size, b_start, b_size in zip(a.offset, a.shape, b.offset, b.shape):
        start = a_start if a_start > b_start else b_start
        size = min(a_start + a_size, b_start + b_size) - start
        if size <= 0:
            return None
        offset.append(start)
        shape.append(size)
    return Slice(tuple(offset), tuple(shape))


def subtract(a: Slice, b: Slice) -> tuple[Slice, ...]:
    """Return disjoint slices that cover a without b, at most two per dimension."""
    common = intersect(a, b)
    if common is None:
        return (a,) if a.volume else ()
    parts: list[Slice] = []
    offset, shape = list(a.offset), list(a.shape)
    for dim, (start, size) in enumerate(zip(common.offset, common.shape)):
        for part_start, part_end in ((offset[dim], start), (start + size, offset[dim] + shape[dim])):
            if part_end > part_start:
                part_offset, part_shape = list(offset), list(shape)
                part_offset[dim], part_shape[dim] = part_start, part_end - part_start
                parts.append(Slice(tuple(part_offset), tuple(part_shape)))
        # The remainder agrees with the common part in this dimension.
        offset[dim], shape[dim] = start, size
    return tuple(parts)


def uncovered(target: Slice, slices: Iterable[Slice]) -> tuple[Slice, ...]:
    """Return disjoint slices of `target` outside all `slices`, which may overlap; empty if they cover it."""
    holes: tuple[Slice, ...] = (target,) if target.volume else ()
    for bounds in slices:
        if not holes:
            break
        holes = tuple(part for hole in holes for part in subtract(hole, bounds))
    return holes


def flat_range_slices(shape: Coordinates, start: int, stop: int) -> tuple[Slice, ...]:
    """Elements [start, stop) of the flattened tensor as at most 2 * ndim - 1 slices, in memory order.

    Each slice is contiguous in row-major memory, so slice after slice is the range itself: this is what turns a ZeRO shard of
    a flat buffer into regular shards without an all-gather (ByteCheckpoint, arXiv 2407.20143, irregular tensor
    sharding). Raise ValueError if the range is not inside the tensor.
    """
    size = prod(shape)
    if not 0 <= start <= stop <= size:
        raise ValueError(
            f"flat range [{start}, {stop}) is not inside the {size} elements of a tensor of shape {tuple(shape)}"
        )
    return tuple(_flat_slices((), tuple(shape), start, stop)) if stop > start else ()


def _flat_slices(index: Coordinates, shape: Coordinates, start: int, stop: int) -> list[Slice]:
    """Slices of [start, stop) of the flattened sub-tensor tensor[index], whose shape is `shape`."""
    ones = (1,) * len(index)
    if not shape:
        return [Slice(index, ones)]
    row = prod(shape[1:])
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if first == last:
        return _flat_slices((*index, first), shape[1:], head, tail)
    slices: list[Slice] = []
    if head:
        slices += _flat_slices((*index, first), shape[1:], head, row)
        first += 1
    if last > first:
        zeros = (0,) * (len(shape) - 1)
        slices.append(Slice((*index, first, *zeros), (*ones, last - first, *shape[1:])))
    if tail:
        slices += _flat_slices((*index, last), shape[1:], 0, tail)
    return slices
