"""A layout cut into regions: disjoint slices, each with the set of ranks that hold it, and one owner for each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from megatron_dapo.reshard.layout import Layout, Shard
from megatron_dapo.reshard.slices import Slice, intersect, subtract


class Region(NamedTuple):
    """A slice of a source tensor that no other region overlaps, and what each holder group calls it."""

    bounds: Slice
    holders: Mapping[int, Shard]  # holder group -> the group's shard that contains the slice


class ReplicaGroups:
    """Ranks of a layout grouped by equal shards: data- and context-parallel replicas are planned once."""

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

    def by_tensor(self) -> dict[str, list[tuple[int, int, Shard]]]:
        """tensor -> (group, index of the shard within the group, shard)."""
        index: dict[str, list[tuple[int, int, Shard]]] = {}
        for group, shards in enumerate(self.shards):
            for position, shard in enumerate(shards):
                index.setdefault(shard.tensor, []).append((group, position, shard))
        return index


def partition(holders: Iterable[tuple[int, Shard]]) -> tuple[Region, ...]:
    """Disjoint regions of one tensor, from the (group, shard) pairs that hold parts of it, sorted by offset."""
    by_bounds: dict[Slice, dict[int, Shard]] = {}
    for group, shard in holders:
        if shard.bounds.volume:
            by_bounds.setdefault(shard.bounds, {}).setdefault(group, shard)
    regions: list[Region] = []
    for bounds, shards in by_bounds.items():
        regions = _insert(regions, Region(bounds, shards))
    return tuple(sorted(regions, key=lambda region: region.bounds))


def _insert(regions: list[Region], new: Region) -> list[Region]:
    """Adds a slice to disjoint regions: overlapped ones are cut at its border and gain its holders."""
    result, rest = [], [new.bounds]
    for region in regions:
        common = intersect(region.bounds, new.bounds)
        if common is None:
            result.append(region)
            continue
        result.append(Region(common, {**new.holders, **region.holders}))
        result += [Region(part, region.holders) for part in subtract(region.bounds, common)]
        rest = [part for bounds in rest for part in subtract(bounds, common)]
    return result + [Region(bounds, new.holders) for bounds in rest]


def regions_of(
    source: Layout, groups: ReplicaGroups, tensors: Iterable[str]
) -> dict[str, tuple[tuple[Region, frozenset[int]], ...]]:
    """Each tensor's regions with the holder groups of each; equal sets of groups are one object."""
    held, known = groups.by_tensor(), {}
    result = {}
    for name in tensors:
        regions = partition((group, shard) for group, _, shard in held.get(name, ()))
        sets = (frozenset(region.holders) for region in regions)
        result[name] = tuple((region, known.setdefault(groups, groups)) for region, groups in zip(regions, sets))
    return result


def assign_owners(items: Sequence[tuple[str, int, Sequence[int]]]) -> dict[str, int]:
    """One owner for each (name, size, holder ranks): largest first, each to its least loaded holder, the lowest rank on
    a tie.

    Who writes or sums what all replicas hold (ByteCheckpoint, arXiv 2407.20143, worst-fit de-duplication).
    """
    load: dict[int, int] = {}
    owner: dict[str, int] = {}
    for name, size, holders in sorted(items, key=lambda item: -item[1]):
        assert holders, f"nobody holds {name}"
        owner[name] = min(holders, key=lambda rank: (load.get(rank, 0), rank))
        load[owner[name]] = load.get(owner[name], 0) + size
    return owner


def held_regions(layout: Layout, groups: ReplicaGroups) -> list[tuple[str, Region]]:
    """Every tensor cut into its regions, in an order that depends on the layout alone."""
    held = groups.by_tensor()
    return [
        (tensor, region)
        for tensor in layout.tensors
        for region in partition((group, shard) for group, _, shard in held.get(tensor, ()))
    ]


def owned_slices(layout: Layout) -> dict[int, list[tuple[Slice, Shard]]]:
    """rank -> (slice, the rank's shard that holds it): every element is owned once, bytes balanced over holders."""
    groups = ReplicaGroups(layout)
    entries: dict[str, Region] = {}
    items = []
    for number, (tensor, region) in enumerate(held_regions(layout, groups)):
        key = f"{tensor}#{number}"
        entries[key] = region
        ranks = sorted(rank for group in region.holders for rank in groups.ranks[group])
        items.append((key, region.bounds.volume * layout.tensors[tensor].dtype.itemsize, ranks))
    owned: dict[int, list[tuple[Slice, Shard]]] = {rank: [] for rank in range(layout.num_ranks)}
    for key, rank in assign_owners(items).items():
        bounds, holders = entries[key]
        owned[rank].append((bounds, holders[groups.group_of[rank]]))
    return owned
