"""A layout cut into regions: disjoint boxes, each with the set of ranks that hold it, and one owner for each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from megatron_dapo.parallel.reshard.boxes import Box, intersect, subtract
from megatron_dapo.parallel.reshard.layout import Layout, Piece


class Region(NamedTuple):
    """A box of a source tensor that no other region overlaps, and what each holder group calls it."""

    box: Box
    holders: Mapping[int, Piece]  # holder group -> the group's piece that contains the box


class HolderGroups:
    """Ranks of a layout grouped by equal pieces: data- and context-parallel replicas are planned once."""

    def __init__(self, layout: Layout) -> None:
        self.pieces: list[tuple[Piece, ...]] = []
        self.ranks: list[list[int]] = []
        self.group_of: list[int] = []
        by_identity: dict[int, int] = {}
        by_value: dict[tuple[Piece, ...], int] = {}
        for rank in range(layout.num_ranks):
            pieces = layout.pieces(rank)
            group = by_identity.get(id(pieces))
            if group is None:
                group = by_value.setdefault(pieces, len(self.pieces))
                if group == len(self.pieces):
                    self.pieces.append(pieces)
                    self.ranks.append([])
                # Valid only while this tuple is alive, which self.pieces ensures for the first of equal tuples.
                if self.pieces[group] is pieces:
                    by_identity[id(pieces)] = group
            self.ranks[group].append(rank)
            self.group_of.append(group)

    def by_tensor(self) -> dict[str, list[tuple[int, int, Piece]]]:
        """tensor -> (group, index of the piece within the group, piece)."""
        index: dict[str, list[tuple[int, int, Piece]]] = {}
        for group, pieces in enumerate(self.pieces):
            for position, piece in enumerate(pieces):
                index.setdefault(piece.tensor, []).append((group, position, piece))
        return index


def partition(holders: Iterable[tuple[int, Piece]]) -> tuple[Region, ...]:
    """Disjoint regions of one tensor, from the (group, piece) pairs that hold parts of it, sorted by offset."""
    by_box: dict[Box, dict[int, Piece]] = {}
    for group, piece in holders:
        if piece.box.volume:
            by_box.setdefault(piece.box, {}).setdefault(group, piece)
    regions: list[Region] = []
    for box, pieces in by_box.items():
        regions = _insert(regions, Region(box, pieces))
    return tuple(sorted(regions, key=lambda region: region.box))


def _insert(regions: list[Region], new: Region) -> list[Region]:
    """Adds a box to disjoint regions: overlapped ones are cut at its border and gain its holders."""
    result, rest = [], [new.box]
    for region in regions:
        common = intersect(region.box, new.box)
        if common is None:
            result.append(region)
            continue
        result.append(Region(common, {**new.holders, **region.holders}))
        result += [Region(part, region.holders) for part in subtract(region.box, common)]
        rest = [part for box in rest for part in subtract(box, common)]
    return result + [Region(box, new.holders) for box in rest]


def regions_of(
    source: Layout, groups: HolderGroups, tensors: Iterable[str]
) -> dict[str, tuple[tuple[Region, frozenset[int]], ...]]:
    """Each tensor's regions with the holder groups of each; equal sets of groups are one object."""
    held, known = groups.by_tensor(), {}
    result = {}
    for name in tensors:
        regions = partition((group, piece) for group, _, piece in held.get(name, ()))
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


def held_regions(layout: Layout, groups: HolderGroups) -> list[tuple[str, Region]]:
    """Every tensor cut into its regions, in an order that depends on the layout alone."""
    held = groups.by_tensor()
    return [
        (tensor, region)
        for tensor in layout.tensors
        for region in partition((group, piece) for group, _, piece in held.get(tensor, ()))
    ]


def owned_boxes(layout: Layout) -> dict[int, list[tuple[Box, Piece]]]:
    """rank -> (box, the rank's piece that holds it): every element is owned once, bytes balanced over holders."""
    groups = HolderGroups(layout)
    entries: dict[str, Region] = {}
    items = []
    for number, (tensor, region) in enumerate(held_regions(layout, groups)):
        key = f"{tensor}#{number}"
        entries[key] = region
        ranks = sorted(rank for group in region.holders for rank in groups.ranks[group])
        items.append((key, region.box.volume * layout.tensors[tensor].dtype.itemsize, ranks))
    owned: dict[int, list[tuple[Box, Piece]]] = {rank: [] for rank in range(layout.num_ranks)}
    for key, rank in assign_owners(items).items():
        box, holders = entries[key]
        owned[rank].append((box, holders[groups.group_of[rank]]))
    return owned
