"""Partitions of sizes into parts of nearly equal sums. Pure and deterministic: every rank computes the same result from
the same sizes."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

Parts = list[list[int]]


def balanced_partition(sizes: Sequence[int], num_parts: int, max_items: int | None = None) -> Parts:
    """Partition the indices of `sizes` into `num_parts` parts of nearly equal sums and at most `max_items` indices
    each.

    Longest processing time first (R. Graham, 1969): the largest remaining size goes to the part with the smallest
    sum, so the largest sum is at most 4/3 of the optimum if `max_items` does not bind. No part is empty unless there
    are fewer sizes than parts. Sizes are positive. Raise ValueError if the parts cannot hold all sizes.
    """
    room = len(sizes) if max_items is None else max_items
    if num_parts * room < len(sizes):
        raise ValueError(
            f"{len(sizes)} items do not fit into {num_parts} parts of at most {room}; allow at least "
            f"{-(-len(sizes) // num_parts)}"
        )
    parts: Parts = [[] for _ in range(num_parts)]
    open_parts = [(0, part) for part in range(num_parts)]
    heapify(open_parts)  # equal sums: the lower part comes first on every rank
    for index in largest_first(sizes):
        load, part = heappop(open_parts)
        parts[part].append(index)
        if len(parts[part]) < room:
            heappush(open_parts, (load + sizes[index], part))
    return parts


def fewest_parts(sizes: Sequence[int], capacity: int, max_items: int | None = None) -> Parts:
    """Partition the indices of `sizes` into few non-empty parts, each with sum at most `capacity` and at most
    `max_items` indices.

    Best fit decreasing: each size goes to the fullest part with room for it; this gives at most 11/9 of the fewest
    possible parts, plus one. Every size is at most `capacity`.
    """
    parts: Parts = []
    free: list[tuple[int, int]] = []  # (free room, part), sorted, without full parts
    for index in largest_first(sizes):
        assert sizes[index] <= capacity, f"size {sizes[index]} exceeds the capacity {capacity}"
        # `free` is sorted by room, so the first part with enough room is the fullest.
        place = bisect_left(free, (sizes[index], -1))
        left, part = free.pop(place) if place < len(free) else (capacity, len(parts))
        if part == len(parts):
            parts.append([])
        parts[part].append(index)
        if max_items is None or len(parts[part]) < max_items:
            insort(free, (left - sizes[index], part))
    return parts


def spread(parts: Parts, sizes: Sequence[int], num_parts: int) -> Parts:
    """Split parts until there are `num_parts` >= len(parts), none empty and no sum larger than before.

    Each split moves the smallest index of the multi-index part with the largest sum into a new part."""
    parts = [sorted(part, key=lambda index: (-sizes[index], index)) for part in parts]
    assert len(parts) <= num_parts <= sum(map(len, parts)), (
        f"cannot spread {sum(map(len, parts))} items over {num_parts} parts"
    )
    several = [(-sum(sizes[index] for index in part), place) for place, part in enumerate(parts) if len(part) > 1]
    heapify(several)
    while len(parts) < num_parts:
        negative_load, place = heappop(several)
        moved = parts[place].pop()
        parts.append([moved])
        if len(parts[place]) > 1:
            heappush(several, (negative_load + sizes[moved], place))
    return parts


def largest_first(sizes: Sequence[int]) -> list[int]:
    """Return indices by decreasing size, keeping the order of equal ones."""
    return sorted(range(len(sizes)), key=lambda index: -sizes[index])
