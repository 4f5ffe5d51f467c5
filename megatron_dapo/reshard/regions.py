"""A layout cut into regions: disjoint slices, each with the replica groups that hold it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from megatron_dapo.reshard.layout import Layout, Shard
from megatron_dapo.reshard.slices import Slice, intersect, subtract


class Region(NamedTuple):
    """A slice of a source tensor that no other region overlaps, and each replica group's shard around it."""

    bounds: Slice
    holders: Mapping[int, Shard]  # replica group -> the group's shard that contains the slice


class ReplicaGroups:
    """Ranks of a layout grouped by equal shards, so that data- and context-parallel replicas are planned once."""

    def __init__(self, layout: Layout) -> None:
        self.shards: list[tuple[Shard, ...]] = []
        self.ranks: list[list[int]] = []
        self.group_of: list[int] = []
        by_identity: dict[int, int] = {}
        by_value: dict[tuple[Shard, ...], int] = {}
        for rank in range(layout.num_ranks):
            shards = layout.shards(rank)
            group = by_identity.get(id(shards))
            if group is None:
                group = by_value.setdefault(shards, len(self.shards))
                if group == len(self.shards):
                    self.shards.append(shards)
                    self.ranks.append([])
                # Valid only while this tuple is alive, which self.shards ensures for the first of equal tuples.
                if self.shards[group] is shards:
                    by_identity[id(shards)] = group
            self.ranks[group].append(rank)
            self.group_of.append(group)

    def by_tensor(self) -> dict[str, list[tuple[int, Shard]]]:
        """Return tensor -> (group, shard) of each of its shards."""
        index: dict[str, list[tuple[int, Shard]]] = {}
        for group, shards in enumerate(self.shards):
            for shard in shards:
                index.setdefault(shard.tensor, []).append((group, shard))
        return index


def partition(holders: Iterable[tuple[int, Shard]]) -> tuple[Region, ...]:
    """Return the disjoint regions of one tensor, sorted by offset, from its (group, shard) pairs."""
    by_bounds: dict[Slice, dict[int, Shard]] = {}
    for group, shard in holders:
        if shard.bounds.volume:
            # A group that holds a slice twice serves it from its first shard.
            by_bounds.setdefault(shard.bounds, {}).setdefault(group, shard)
    regions: list[Region] = []
    for bounds, shards in by_bounds.items():
        regions = _insert(regions, Region(bounds, shards))
    return tuple(sorted(regions, key=lambda region: region.bounds))


def _insert(regions: list[Region], new: Region) -> list[Region]:
    """Add a slice to disjoint regions: overlapped ones are cut at its border and gain its holders."""
    result, rest = [], [new.bounds]
    for region in regions:
        common = intersect(region.bounds, new.bounds)
        if common is None:
            result.append(region)
            continue
        result.append(Region(common, {**new.holders, **region.holders}))
        result += [Region(piece, region.holders) for piece in subtract(region.bounds, common)]
        rest = [part for bounds in rest for part in subtract(bounds, common)]
    return result + [Region(bounds, new.holders) for bounds in rest]


def regions_of(
    source: Layout, groups: ReplicaGroups, tensors: Iterable[str]
) -> dict[str, tuple[tuple[Region, frozenset[int]], ...]]:
    """Return each tensor's regions with the replica groups of each; equal sets of groups are one object."""
    held = groups.by_tensor()
    known: dict[frozenset[int], frozenset[int]] = {}
    result = {}
    for name in tensors:
        regions = partition(held.get(name, ()))
        sets = (frozenset(region.holders) for region in regions)
        result[name] = tuple((region, known.setdefault(groups, groups)) for region, groups in zip(regions, sets))
    return result
