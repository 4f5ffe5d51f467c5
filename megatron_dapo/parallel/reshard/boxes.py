"""Arithmetic of n-dimensional boxes: intersection, difference, and flat ranges as boxes.

A box is [offset, offset + shape) of a row-major tensor; a scalar is the box ((), ()) of volume 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import NamedTuple

Coordinates = tuple[int, ...]


class Box(NamedTuple):
    """The elements [offset, offset + shape) of a tensor, one pair of numbers a dimension."""

    offset: Coordinates
    shape: Coordinates

    @property
    def volume(self) -> int:
        return prod(self.shape)

    def __str__(self) -> str:
        return "[" + ", ".join(f"{o}:{o + n}" for o, n in zip(self.offset, self.shape)) + "]"


def whole(shape: Coordinates) -> Box:
    """The box of a full tensor of this shape."""
    return Box((0,) * len(shape), tuple(shape))


def intersect(a: Box, b: Box) -> Box | None:
    """The common part of two boxes of the same number of dimensions, None where they share no element."""
    offset, shape = [], []
    for a_start, a_size, b_start, b_size in zip(a.offset, a.shape, b.offset, b.shape):
        start = a_start if a_start > b_start else b_start
        size = min(a_start + a_size, b_start + b_size) - start
        if size <= 0:
            return None
        offset.append(start)
        shape.append(size)
    return Box(tuple(offset), tuple(shape))


def subtract(a: Box, b: Box) -> tuple[Box, ...]:
    """Disjoint boxes that cover a without b: at most two a dimension."""
    common = intersect(a, b)
    if common is None:
        return (a,) if a.volume else ()
    parts: list[Box] = []
    offset, shape = list(a.offset), list(a.shape)
    for dim, (start, size) in enumerate(zip(common.offset, common.shape)):
        for part_start, part_end in ((offset[dim], start), (start + size, offset[dim] + shape[dim])):
            if part_end > part_start:
                part_offset, part_shape = list(offset), list(shape)
                part_offset[dim], part_shape[dim] = part_start, part_end - part_start
                parts.append(Box(tuple(part_offset), tuple(part_shape)))
        # What is left to cut agrees with the common part in this dimension.
        offset[dim], shape[dim] = start, size
    return tuple(parts)


def uncovered(target: Box, boxes: Iterable[Box]) -> tuple[Box, ...]:
    """Disjoint boxes of `target` that no box of `boxes` reaches; empty where they cover it. Overlaps are allowed."""
    holes: tuple[Box, ...] = (target,) if target.volume else ()
    for box in boxes:
        if not holes:
            break
        holes = tuple(part for hole in holes for part in subtract(hole, box))
    return holes


def flat_range_boxes(shape: Coordinates, start: int, stop: int) -> tuple[Box, ...]:
    """Elements [start, stop) of the flattened tensor as at most 2 * ndim - 1 boxes, in memory order.

    Each box is contiguous in row-major memory, so box after box is the range itself: this is what turns a ZeRO shard of
    a flat buffer into regular pieces without an all-gather (ByteCheckpoint, arXiv 2407.20143, irregular tensor
    sharding). Raises ValueError where the range is not inside the tensor.
    """
    size = prod(shape)
    if not 0 <= start <= stop <= size:
        raise ValueError(
            f"flat range [{start}, {stop}) is not inside the {size} elements of a tensor of shape {tuple(shape)}"
        )
    return tuple(_flat_boxes((), tuple(shape), start, stop)) if stop > start else ()


def _flat_boxes(index: Coordinates, shape: Coordinates, start: int, stop: int) -> list[Box]:
    """Boxes of [start, stop) of the flattened sub-tensor tensor[index], whose shape is `shape`."""
    ones = (1,) * len(index)
    if not shape:
        return [Box(index, ones)]
    row = prod(shape[1:])
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if first == last:
        return _flat_boxes((*index, first), shape[1:], head, tail)
    boxes: list[Box] = []
    if head:
        boxes += _flat_boxes((*index, first), shape[1:], head, row)
        first += 1
    if last > first:
        zeros = (0,) * (len(shape) - 1)
        boxes.append(Box((*index, first, *zeros), (*ones, last - first, *shape[1:])))
    if tail:
        boxes += _flat_boxes((*index, last), shape[1:], 0, tail)
    return boxes
