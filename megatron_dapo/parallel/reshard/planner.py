"""From two layouts to who sends which box to whom: pure, deterministic, without communication.

The source is first cut into regions: disjoint boxes, each with the set of ranks that hold it. A destination piece meets
the regions it overlaps; each such part comes from exactly one holder: the destination itself if it holds it, else a
rank of the same node, else any. Among equals a rotation by destination rank and tensor name spreads the load, so that
the choice for one (rank, piece) needs no knowledge of the others: what rank 731 of 1024 sends is computed from the
tensors it holds alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple
from zlib import crc32

from megatron_dapo.parallel.reshard.boxes import Box, intersect, subtract, whole
from megatron_dapo.parallel.reshard.layout import Layout, Piece, check_layout

PLANNER_VERSION = 1  # part of the digest: two processes with different planners must not exchange tensors


class Transfer(NamedTuple):
    """Global box `box` of `tensor` goes from rank `source` to rank `destination`; it lies inside both pieces."""

    tensor: str
    box: Box
    source: int
    destination: int
    source_piece: Piece
    destination_piece: Piece


class Region(NamedTuple):
    """A box of a source tensor that no other region overlaps, and what each holder group calls it."""

    box: Box
    holders: Mapping[int, Piece]  # holder group -> the group's piece that contains the box


class Traffic(NamedTuple):
    """Bytes of one rank in one execution, counted in the source's element type."""

    sent: int
    received: int
    local: int


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


class ReshardPlan:
    """What every rank sends to and receives from every other; made by `plan`.

    Source and destination ranks are numbered in one world: rank r of both layouts is the same process.
    """

    def __init__(self, source: Layout, destination: Layout, ranks_per_node: int) -> None:
        self.source = source
        self.destination = destination
        self.ranks_per_node = ranks_per_node
        self._sources = HolderGroups(source)
        self._destinations = HolderGroups(destination)
        self._destination_index = self._destinations.by_tensor()
        held = self._sources.by_tensor()
        self._regions = {
            name: partition((group, piece) for group, _, piece in held.get(name, ())) for name in destination.tensors
        }
        self._parts: dict[tuple[str, Box], tuple[Region, ...]] = {}
        self._received: dict[int, tuple[Transfer, ...]] = {}
        self._sent: dict[int, tuple[Transfer, ...]] = {}

    @property
    def num_ranks(self) -> int:
        return max(self.source.num_ranks, self.destination.num_ranks)

    @cached_property
    def digest(self) -> bytes:
        """32 bytes, equal exactly where both layouts and the planner are: ranks compare them before they exchange."""
        canonical = hashlib.sha256(f"reshard plan {PLANNER_VERSION} node {self.ranks_per_node}".encode())
        canonical.update(_layout_digest(self.source, self._sources))
        canonical.update(_layout_digest(self.destination, self._destinations))
        return canonical.digest()

    def receives(self, rank: int, tensors: Collection[str] | None = None) -> tuple[Transfer, ...]:
        """Transfers into `rank`, from itself included, in the order of its pieces; only of `tensors` where given."""
        if rank not in self._received:
            pieces = self.destination.pieces(rank) if rank < self.destination.num_ranks else ()
            self._received[rank] = tuple(transfer for piece in pieces for transfer in self._into(rank, piece))
        return _only(self._received[rank], tensors)

    def sends(self, rank: int, tensors: Collection[str] | None = None) -> tuple[Transfer, ...]:
        """Transfers out of `rank`, those to itself included, by destination rank, then in the order of its pieces."""
        if rank not in self._sent:
            self._sent[rank] = self._out_of(rank) if rank < self.source.num_ranks else ()
        return _only(self._sent[rank], tensors)

    def traffic(self, rank: int) -> Traffic:
        """Bytes that `rank` sends, receives, and copies within itself."""
        sends, receives = self.sends(rank), self.receives(rank)
        return Traffic(
            sent=sum(self.num_bytes(t) for t in sends if t.destination != rank),
            received=sum(self.num_bytes(t) for t in receives if t.source != rank),
            local=sum(self.num_bytes(t) for t in receives if t.source == rank),
        )

    def num_bytes(self, transfer: Transfer) -> int:
        return transfer.box.volume * self.source.tensors[transfer.tensor].dtype.itemsize

    def _out_of(self, rank: int) -> tuple[Transfer, ...]:
        own_group = self._sources.group_of[rank]
        held = dict.fromkeys(piece.tensor for piece in self._sources.pieces[own_group])
        keyed = [
            ((destination, position), transfer)
            for tensor in held
            for group, position, piece in self._destination_index.get(tensor, ())
            for destination in self._destinations.ranks[group]
            for transfer in self._into(destination, piece, only=own_group)
            if transfer.source == rank
        ]
        # The sort is stable, so parts of one piece keep the order in which the receiver lists them.
        return tuple(transfer for _, transfer in sorted(keyed, key=lambda pair: pair[0]))

    def _into(self, destination: int, piece: Piece, only: int | None = None) -> Iterator[Transfer]:
        """Transfers that fill one destination piece (those of holder group `only` where given)."""
        for box, holders in self._parts_of(piece):
            if only is not None and only not in holders:
                continue
            source = self._holder(destination, piece.tensor, holders)
            yield Transfer(piece.tensor, box, source, destination, holders[self._sources.group_of[source]], piece)

    def _parts_of(self, piece: Piece) -> tuple[Region, ...]:
        """The destination piece cut at the borders of the source's regions."""
        key = (piece.tensor, piece.box)
        if key not in self._parts:
            overlaps = ((intersect(region.box, piece.box), region.holders) for region in self._regions[piece.tensor])
            self._parts[key] = tuple(Region(box, holders) for box, holders in overlaps if box is not None)
        return self._parts[key]

    def _holder(self, destination: int, tensor: str, holders: Mapping[int, Piece]) -> int:
        """The rank that serves a part: the destination itself, else one of its node, else any."""
        group_of = self._sources.group_of
        if destination < len(group_of) and group_of[destination] in holders:
            return destination
        turn = destination + crc32(tensor.encode())
        first = destination - destination % self.ranks_per_node
        near = [
            rank for rank in range(first, min(first + self.ranks_per_node, len(group_of))) if group_of[rank] in holders
        ]
        if near:
            return near[turn % len(near)]
        groups = [self._sources.ranks[group] for group in sorted(holders)]
        turn %= sum(len(ranks) for ranks in groups)
        for ranks in groups:
            if turn < len(ranks):
                return ranks[turn]
            turn -= len(ranks)
        raise AssertionError(f"no holder of {tensor}")


def _only(transfers: tuple[Transfer, ...], tensors: Collection[str] | None) -> tuple[Transfer, ...]:
    return transfers if tensors is None else tuple(transfer for transfer in transfers if transfer.tensor in tensors)


def plan(source: Layout, destination: Layout, *, ranks_per_node: int = 8) -> ReshardPlan:
    """The plan that fills every piece of `destination` from `source`, each element exactly once.

    `destination` may hold fewer tensors than `source`. Raises ValueError where it holds one that the source lacks or
    has in another shape, or where the source does not hold every element of it.
    """
    for name, spec in destination.tensors.items():
        if name not in source.tensors:
            raise ValueError(
                f"reshard: the destination wants {name!r}, which the source's {len(source.tensors)} tensors lack"
            )
        if tuple(source.tensors[name].shape) != tuple(spec.shape):
            raise ValueError(
                f"reshard: {name!r} is {tuple(source.tensors[name].shape)} in the source, "
                f"{tuple(spec.shape)} in the destination"
            )
    result = ReshardPlan(source, destination, ranks_per_node)
    for name, regions in result._regions.items():
        if sum(region.box.volume for region in regions) != whole(destination.tensors[name].shape).volume:
            check_layout(source)  # names the hole
            raise AssertionError(f"regions of {name} do not add up to the tensor")
    return result


def _layout_digest(layout: Layout, groups: HolderGroups) -> bytes:
    """Hash of the tensors and of each rank's pieces, whatever objects they are stored in."""
    canonical = hashlib.sha256()
    for name, spec in sorted(layout.tensors.items()):
        canonical.update(repr((name, tuple(spec.shape), str(spec.dtype))).encode())
    of_group = [hashlib.sha256(repr([tuple(piece) for piece in pieces]).encode()).digest() for pieces in groups.pieces]
    for group in groups.group_of:
        canonical.update(of_group[group])
    return canonical.digest()


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
