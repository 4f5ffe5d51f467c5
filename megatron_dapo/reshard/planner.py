"""From two layouts to who sends which slice to whom: pure, deterministic, without communication.

The source is first cut into regions: disjoint slices, each with the set of ranks that hold it. A destination shard meets
the regions it overlaps; each such part comes from exactly one holder: the destination itself if it holds it, else a
rank of the same node, else any. What all destinations want from one set of interchangeable holders is laid end to end
and cut evenly among them (`Spread`), which bounds what a rank sends (`ReshardPlan.sent_bound`). Ranks that hold the
same are planned once, so a plan for 16,384 ranks costs little more than one for a replica.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from megatron_dapo.reshard.layout import Layout, Shard, check_layout
from megatron_dapo.reshard.regions import ReplicaGroups, regions_of
from megatron_dapo.reshard.slices import Slice, intersect, whole

PLANNER_VERSION = 2  # part of the digest: two processes with different planners must not exchange tensors


ANYWHERE = -1  # in place of a node's number


class Transfer(NamedTuple):
    """Global slice `bounds` of `tensor` goes from rank `source` to rank `destination`; it lies inside both shards."""

    tensor: str
    bounds: Slice
    source: int
    destination: int
    source_shard: Shard
    destination_shard: Shard


class Traffic(NamedTuple):
    """Bytes of one rank in one execution, counted in the narrower of both element types, which crosses."""

    sent: int
    received: int
    local: int


class Overlap(NamedTuple):
    """What one region of the source gives to a destination shard."""

    bounds: Slice
    holders: Mapping[int, Shard]  # holder group -> the group's shard that contains the slice
    groups: frozenset[int]  # the keys of `holders`
    shard: Shard  # of the destination
    num_bytes: int


class Demand(NamedTuple):
    """What a destination rank wants from one set of holders, laid end to end. The arrays are of one length."""

    parts: array[int]  # indices into the parts of its holder group
    sizes: array[int]  # bytes of each
    middles: array[int]  # twice the byte where the middle of each lies

    @property
    def num_bytes(self) -> int:
        return (self.middles[-1] + self.sizes[-1]) // 2


Demands = Mapping[frozenset[int], Demand]  # by the holder groups that can serve it


class Station(NamedTuple):
    """All that decides where a destination rank gets its parts: what it wants, has, and what its node has."""

    group: int  # of the destination
    own: int  # holder group of the source that the rank is in, -1 outside of the source
    near: frozenset[int]  # holder groups of the source on its node


class Spread:
    """One set of interchangeable holders, and the bytes that destinations want from it, in order of their ranks.

    The bytes are cut evenly: holder k of n serves the parts whose middle lies in [k, k + 1) / n of them. So it sends at
    most its even share and half of the largest part at either end, and few holders serve each destination.
    """

    def __init__(self, members: Sequence[int], wanted: Iterable[tuple[int, int]]) -> None:
        """`wanted`: (destination rank, bytes)."""
        self.members = members
        ordered = sorted(wanted)
        self.ranks = [rank for rank, _ in ordered]
        self.starts = [0, *accumulate(num_bytes for _, num_bytes in ordered)]

    @property
    def num_bytes(self) -> int:
        return self.starts[-1]

    def start(self, rank: int) -> int:
        """First byte of what destination `rank` wants."""
        return self.starts[bisect_left(self.ranks, rank)]

    def senders(self, rank: int, middles: Sequence[int]) -> list[int]:
        """The holder that serves each part, given twice the byte of its middle within what `rank` wants."""
        count, start, total = len(self.members), 2 * self.start(rank), 2 * self.num_bytes
        return [self.members[(start + middle) * count // total] for middle in middles]

    def served_by(self, member: int) -> list[int]:
        """Destinations whose bytes reach into the share of one holder."""
        index, count, total = bisect_left(self.members, member), len(self.members), self.num_bytes
        first = bisect_right(self.starts, index * total // count) - 1
        last = bisect_left(self.starts, -(-(index + 1) * total // count))
        return self.ranks[first:last]


Key = tuple[int, frozenset[int]]  # node (-1: any), holder groups: interchangeable holders


class ReshardPlan:
    """What every rank sends to and receives from every other; made by `plan`.

    Source and destination ranks are numbered in one world: rank r of both layouts is the same process.
    """

    def __init__(self, source: Layout, destination: Layout, ranks_per_node: int) -> None:
        self.source = source
        self.destination = destination
        self.ranks_per_node = ranks_per_node
        self._sources = ReplicaGroups(source)
        self._destinations = ReplicaGroups(destination)
        self._itemsize = {name: _wire_itemsize(source, destination, name) for name in destination.tensors}
        self._regions = regions_of(source, self._sources, destination.tensors)
        self._parts: dict[int, tuple[Overlap, ...]] = {}
        self._wanted: dict[int, Demands] = {}
        self._demands: dict[Station, tuple[Demands, Demands]] = {}
        self._near: dict[int, frozenset[int]] = {}
        self._spreads: dict[Key, Spread] = {}
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
        """Transfers into `rank`, from itself included, in the order of its shards; only of `tensors` where given."""
        if rank not in self._received:
            self._received[rank] = tuple(self._into(rank)) if rank < self.destination.num_ranks else ()
        return _only(self._received[rank], tensors)

    def sends(self, rank: int, tensors: Collection[str] | None = None) -> tuple[Transfer, ...]:
        """Transfers out of `rank`, those to itself included, by destination rank, then in the order of its shards."""
        if rank not in self._sent:
            destinations = sorted(self._served_by(rank)) if rank < self.source.num_ranks else ()
            self._sent[rank] = tuple(t for destination in destinations for t in self._into(destination, rank))
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
        return transfer.bounds.volume * self._itemsize[transfer.tensor]

    def sent_bound(self, rank: int) -> int:
        """Bytes that `rank` cannot exceed in sending: its even share of every set of holders it is in, and a part each.

        The sum over the sets of (bytes wanted from the set / ranks in it + the largest part wanted from it).
        """
        bound = 0
        for key in self._keys_of(rank):
            spread = self.spread(key)
            bound += -(-spread.num_bytes // len(spread.members)) + self._largest(key)
        return bound

    def parts(self, group: int) -> tuple[Overlap, ...]:
        """The shards of a holder group of the destination, cut at the borders of the source's regions."""
        if group not in self._parts:
            self._parts[group] = tuple(self._cut(group))
        return self._parts[group]

    def wanted(self, group: int) -> Demands:
        """All parts of a holder group of the destination, by the holder groups of the source that have them."""
        if group not in self._wanted:
            found: dict[frozenset[int], list[tuple[int, int]]] = {}
            for index, part in enumerate(self._parts.get(group) or self._cut(group)):
                found.setdefault(part.groups, []).append((index, part.num_bytes))
            self._wanted[group] = {groups: _demand(parts) for groups, parts in found.items()}
        return self._wanted[group]

    def station(self, destination: int) -> Station:
        node, held = destination // self.ranks_per_node, self._sources.group_of
        if node not in self._near:
            self._near[node] = frozenset(held[node * self.ranks_per_node : (node + 1) * self.ranks_per_node])
        own = held[destination] if destination < len(held) else -1
        return Station(self._destinations.group_of[destination], own, self._near[node])

    @cached_property
    def stations(self) -> dict[Station, list[int]]:
        """Every station with its destination ranks, in order."""
        found: dict[Station, list[int]] = {}
        for rank in range(self.destination.num_ranks):
            found.setdefault(self.station(rank), []).append(rank)
        return found

    def node_content(self, node: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Holder groups of a node's ranks in the source and in the destination: nodes of equal content plan alike."""
        ranks = slice(node * self.ranks_per_node, (node + 1) * self.ranks_per_node)
        return tuple(self._sources.group_of[ranks]), tuple(self._destinations.group_of[ranks])

    def demands(self, station: Station) -> tuple[Demands, Demands]:
        """What a station wants from holders of its own node, and from holders anywhere."""
        if station not in self._demands:
            near: dict[frozenset[int], Demand] = {}
            far: dict[frozenset[int], Demand] = {}
            for groups, demand in self.wanted(station.group).items():
                if station.own in groups:
                    continue
                neighbors = groups & station.near
                if neighbors:
                    near[neighbors] = _joined(near[neighbors], demand) if neighbors in near else demand
                else:
                    far[groups] = demand
            self._demands[station] = (near, far)
        return self._demands[station]

    def demands_of(self, destination: int) -> Iterator[tuple[Key, Demand]]:
        near, far = self.demands(self.station(destination))
        node = destination // self.ranks_per_node
        yield from (((node, groups), demand) for groups, demand in near.items())
        yield from (((ANYWHERE, groups), demand) for groups, demand in far.items())

    def spread(self, key: Key) -> Spread:
        """Who serves whom among interchangeable holders."""
        if key not in self._spreads:
            node, groups = key
            if node == ANYWHERE:
                members = sorted(rank for group in groups for rank in self._sources.ranks[group])
                wanted = [
                    (rank, self.demands(station)[1][groups].num_bytes)
                    for station in self._far_stations[groups]
                    for rank in self.stations[station]
                ]
            else:
                members = [rank for rank in self._node(node, self.source) if self._sources.group_of[rank] in groups]
                wanted = [
                    (rank, demand.num_bytes)
                    for rank in self._node(node, self.destination)
                    for other, demand in self.demands_of(rank)
                    if other == key
                ]
            self._spreads[key] = Spread(members, wanted)
        return self._spreads[key]

    @cached_property
    def _far_stations(self) -> dict[frozenset[int], list[Station]]:
        """Holder groups -> the stations that want something from them across nodes."""
        found: dict[frozenset[int], list[Station]] = {}
        for station in self.stations:
            for groups in self.demands(station)[1]:
                found.setdefault(groups, []).append(station)
        return found

    @cached_property
    def _far_keys_of_group(self) -> dict[int, list[Key]]:
        found: dict[int, list[Key]] = {}
        for groups in self._far_stations:
            for group in groups:
                found.setdefault(group, []).append((ANYWHERE, groups))
        return found

    def _node(self, node: int, layout: Layout) -> range:
        start = node * self.ranks_per_node
        return range(start, min(start + self.ranks_per_node, layout.num_ranks))

    def _keys_of(self, rank: int) -> list[Key]:
        """The sets of holders that are asked for something and that `rank` is in."""
        group, node = self._sources.group_of[rank], rank // self.ranks_per_node
        neighbors = self._node(node, self.destination)
        near = {key: None for other in neighbors for key, _ in self.demands_of(other) if key[0] == node}
        return [*(key for key in near if group in key[1]), *self._far_keys_of_group.get(group, ())]

    def _largest(self, key: Key) -> int:
        """Bytes of the largest part that is wanted from a set of holders."""
        node, groups = key
        stations = (
            self._far_stations[groups]
            if node == ANYWHERE
            else {self.station(rank) for rank in self._node(node, self.destination)}
        )
        demands = (self.demands(station)[node == ANYWHERE].get(groups) for station in stations)
        return max(max(demand.sizes) for demand in demands if demand is not None)

    def _served_by(self, rank: int) -> set[int]:
        """Destinations that `rank` may have to send something to."""
        found = {destination for key in self._keys_of(rank) for destination in self.spread(key).served_by(rank)}
        return found | ({rank} if rank < self.destination.num_ranks else set())

    def _into(self, destination: int, only: int | None = None) -> Iterator[Transfer]:
        """Transfers into a destination (those from rank `only` where given), in the order of its shards."""
        parts = self.parts(self._destinations.group_of[destination])
        for index, source in sorted(self._senders(destination, only)):
            part = parts[index]
            held = part.holders[self._sources.group_of[source]]
            yield Transfer(part.shard.tensor, part.bounds, source, destination, held, part.shard)

    def _senders(self, destination: int, only: int | None) -> Iterator[tuple[int, int]]:
        """(index of a part, the rank that serves it): the destination itself, else one of its node, else any."""
        station = self.station(destination)
        if only is None or only == destination:
            kept = (demand.parts for groups, demand in self.wanted(station.group).items() if station.own in groups)
            yield from ((index, destination) for parts in kept for index in parts)
        for key, demand in self.demands_of(destination):
            if only is None:
                yield from zip(demand.parts, self._choose(key, destination, demand))
            elif self._sources.group_of[only] in key[1] and key[0] in (ANYWHERE, only // self.ranks_per_node):
                chosen = zip(demand.parts, self._choose(key, destination, demand))
                yield from (pair for pair in chosen if pair[1] == only)

    def _choose(self, key: Key, destination: int, demand: Demand) -> list[int]:
        only = self._only_member(key)
        if only is not None:
            return [only] * len(demand.parts)
        return self.spread(key).senders(destination, demand.middles)

    def _only_member(self, key: Key) -> int | None:
        """The rank, where there is no choice: what others want need not be known then."""
        if key[0] != ANYWHERE or len(key[1]) > 1:
            return None
        (group,) = key[1]
        ranks = self._sources.ranks[group]
        return ranks[0] if len(ranks) == 1 else None

    def _cut(self, group: int) -> Iterator[Overlap]:
        for shard in self._destinations.shards[group]:
            target, itemsize, regions = shard.bounds, self._itemsize[shard.tensor], self._regions[shard.tensor]
            for region, groups in regions:
                # A single region is the whole tensor.
                bounds = target if len(regions) == 1 or region.bounds == target else intersect(region.bounds, target)
                if bounds is not None and bounds.volume:
                    yield Overlap(bounds, region.holders, groups, shard, bounds.volume * itemsize)


def _demand(parts: Iterable[tuple[int, int]]) -> Demand:
    """From (index, bytes) of each part."""
    indices, sizes = zip(*parts)
    return Demand(array("q", indices), array("q", sizes), _middles(sizes))


def _middles(sizes: Iterable[int]) -> array[int]:
    return array("q", (2 * end - size for end, size in zip(accumulate(sizes), sizes)))


def _joined(first: Demand, second: Demand) -> Demand:
    sizes = first.sizes + second.sizes
    return Demand(first.parts + second.parts, sizes, _middles(sizes))


def _wire_itemsize(source: Layout, destination: Layout, tensor: str) -> int:
    """Bytes of an element of a tensor on the way: of the narrower of both types."""
    return min(source.tensors[tensor].dtype.itemsize, destination.tensors[tensor].dtype.itemsize)


def _only(transfers: tuple[Transfer, ...], tensors: Collection[str] | None) -> tuple[Transfer, ...]:
    return transfers if tensors is None else tuple(transfer for transfer in transfers if transfer.tensor in tensors)


def plan(source: Layout, destination: Layout, *, ranks_per_node: int = 8) -> ReshardPlan:
    """The plan that fills every shard of `destination` from `source`, each element exactly once.

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
        if sum(region.bounds.volume for region, _ in regions) != whole(destination.tensors[name].shape).volume:
            check_layout(source)  # names the hole
            raise AssertionError(f"regions of {name} do not add up to the tensor")
    return result


def _layout_digest(layout: Layout, groups: ReplicaGroups) -> bytes:
    """Hash of the tensors and of each rank's shards, whatever objects they are stored in."""
    canonical = hashlib.sha256()
    for name, spec in sorted(layout.tensors.items()):
        canonical.update(repr((name, tuple(spec.shape), str(spec.dtype))).encode())
    of_group = [hashlib.sha256(repr([tuple(shard) for shard in shards]).encode()).digest() for shards in groups.shards]
    for group in groups.group_of:
        canonical.update(of_group[group])
    return canonical.digest()
