"""The plan between two layouts: which rank sends which slice to which. Pure, deterministic, without communication.

The source is first cut into regions: disjoint slices, each with the set of ranks that hold it. Each overlap of a
destination shard with a region comes from exactly one holder: preferably the destination itself, then a rank of the
same node, then any. Everything that destinations want from one set of interchangeable holders is laid end to end and
split evenly among them (`LoadBalancer`), which bounds what a rank sends. Ranks with equal contents are planned once, so
a plan for 16,384 ranks costs little more than one for a replica.
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

PLANNER_VERSION = 2  # part of the digest, so that processes with different planners never exchange tensors


ANYWHERE = -1  # used instead of a node's number


class Transfer(NamedTuple):
    """Global slice `bounds` of `tensor` goes from rank `source` to rank `destination`; it lies inside both shards."""

    tensor: str
    bounds: Slice
    source: int
    destination: int
    source_shard: Shard
    destination_shard: Shard


class Traffic(NamedTuple):
    """Bytes of one rank in one execution, counted in the narrower element type, which is the one sent."""

    sent: int
    received: int
    local: int


class Overlap(NamedTuple):
    """The overlap of one region of the source with one shard of the destination."""

    bounds: Slice
    holders: Mapping[int, Shard]  # replica group -> the group's shard that contains the slice
    groups: frozenset[int]  # the keys of `holders`
    shard: Shard  # the destination's
    num_bytes: int


class SliceRequest(NamedTuple):
    """All overlaps that a destination rank requests from one set of holders, laid end to end; arrays of one length."""

    overlaps: array[int]  # indices into the overlaps of its replica group
    sizes: array[int]  # bytes of each
    middles: array[int]  # twice the byte where the middle of each lies

    @property
    def num_bytes(self) -> int:
        return (self.middles[-1] + self.sizes[-1]) // 2


Requests = Mapping[frozenset[int], SliceRequest]  # replica groups that can serve the slice -> request


class ReceiverClass(NamedTuple):
    """Destination ranks with the same plan: equal requests, equal own shards, equal shards on their node."""

    group: int  # replica group of the destination
    own: int  # the rank's replica group in the source, -1 if it is not in the source
    near: frozenset[int]  # replica groups of the source on its node


class LoadBalancer:
    """One set of interchangeable holders, and the bytes that destinations want from it, in order of their ranks.

    The bytes are split evenly: holder k of n serves the overlaps whose middle lies in [k, k + 1) / n of them. So it
    sends at most its even share plus half of the largest overlap at either end, and few holders serve each destination.
    """

    def __init__(self, members: Sequence[int], requested: Iterable[tuple[int, int]]) -> None:
        """`requested`: (destination rank, bytes)."""
        self.members = members
        ordered = sorted(requested)
        self.ranks = [rank for rank, _ in ordered]
        self.starts = [0, *accumulate(num_bytes for _, num_bytes in ordered)]

    @property
    def num_bytes(self) -> int:
        return self.starts[-1]

    def start(self, rank: int) -> int:
        """Return the first byte of what destination `rank` wants."""
        return self.starts[bisect_left(self.ranks, rank)]

    def senders(self, rank: int, middles: Sequence[int]) -> list[int]:
        """Return the holder that serves each overlap, given twice the byte of its middle within what `rank` wants."""
        count, start, total = len(self.members), 2 * self.start(rank), 2 * self.num_bytes
        return [self.members[(start + middle) * count // total] for middle in middles]

    def served_by(self, member: int) -> list[int]:
        """Return the destinations whose bytes reach into one holder's share."""
        # Round outward: an extra destination receives nothing, but a missing one would lose its overlaps.
        index, count, total = bisect_left(self.members, member), len(self.members), self.num_bytes
        first = bisect_right(self.starts, index * total // count) - 1
        last = bisect_left(self.starts, -(-(index + 1) * total // count))
        return self.ranks[first:last]


Key = tuple[int, frozenset[int]]  # node (-1: any), replica groups: interchangeable holders


class ReshardPlan:
    """Sends and receives of every rank; made by `plan`.

    Source and destination ranks are numbered in one world: rank r of both layouts is the same process.
    """

    def __init__(self, source: Layout, destination: Layout, ranks_per_node: int, prefer_own: bool) -> None:
        self.source = source
        self.destination = destination
        self.ranks_per_node = ranks_per_node
        self.prefer_own = prefer_own
        self._sources = ReplicaGroups(source)
        self._destinations = ReplicaGroups(destination)
        # Bytes of an element in transit, in the narrower of both types; see `execution.wire_dtype`.
        self._itemsize = {
            name: min(source.tensors[name].dtype.itemsize, spec.dtype.itemsize)
            for name, spec in destination.tensors.items()
        }
        self._regions = regions_of(source, self._sources, destination.tensors)
        self._overlaps: dict[int, tuple[Overlap, ...]] = {}
        self._requested: dict[int, Requests] = {}
        self._requests: dict[ReceiverClass, tuple[Requests, Requests]] = {}
        self._near: dict[int, frozenset[int]] = {}
        self._balancers: dict[Key, LoadBalancer] = {}
        self._received: dict[int, tuple[Transfer, ...]] = {}
        self._sent: dict[int, tuple[Transfer, ...]] = {}

    @property
    def num_ranks(self) -> int:
        return max(self.source.num_ranks, self.destination.num_ranks)

    @cached_property
    def digest(self) -> bytes:
        """Return 32 bytes, equal if and only if both layouts and the planner are; ranks compare them before an
        exchange."""
        rules = f"node {self.ranks_per_node} own {self.prefer_own}"
        canonical = hashlib.sha256(f"reshard plan {PLANNER_VERSION} {rules}".encode())
        canonical.update(_layout_digest(self.source, self._sources))
        canonical.update(_layout_digest(self.destination, self._destinations))
        return canonical.digest()

    def receives(self, rank: int, tensors: Collection[str] | None = None) -> tuple[Transfer, ...]:
        """Return transfers into `rank`, including from itself, in the order of its shards; only of `tensors` if
        given."""
        if rank not in self._received:
            self._received[rank] = tuple(self._into(rank)) if rank < self.destination.num_ranks else ()
        return _only(self._received[rank], tensors)

    def sends(self, rank: int, tensors: Collection[str] | None = None) -> tuple[Transfer, ...]:
        """Return transfers out of `rank`, including to itself, by destination rank, then in the order of its shards."""
        if rank not in self._sent:
            destinations = sorted(self._served_by(rank)) if rank < self.source.num_ranks else ()
            self._sent[rank] = tuple(t for destination in destinations for t in self._into(destination, rank))
        return _only(self._sent[rank], tensors)

    def traffic(self, rank: int) -> Traffic:
        """Return the bytes that `rank` sends, receives, and copies within itself."""
        sends, receives = self.sends(rank), self.receives(rank)
        return Traffic(
            sent=sum(self.num_bytes(t) for t in sends if t.destination != rank),
            received=sum(self.num_bytes(t) for t in receives if t.source != rank),
            local=sum(self.num_bytes(t) for t in receives if t.source == rank),
        )

    def num_bytes(self, transfer: Transfer) -> int:
        return transfer.bounds.volume * self._itemsize[transfer.tensor]

    def overlaps(self, group: int) -> tuple[Overlap, ...]:
        """Return the shards of a destination's replica group, cut at the borders of the source's regions."""
        if group not in self._overlaps:
            self._overlaps[group] = tuple(self._cut(group))
        return self._overlaps[group]

    def requested(self, group: int) -> Requests:
        """Return all overlaps of a destination's replica group, by the source's replica groups that have them."""
        if group not in self._requested:
            found: dict[frozenset[int], list[tuple[int, int]]] = {}
            # Overlaps cut here are not kept: a table of all ranks' traffic only needs their sizes.
            for index, overlap in enumerate(self._overlaps.get(group) or self._cut(group)):
                found.setdefault(overlap.groups, []).append((index, overlap.num_bytes))
            self._requested[group] = {groups: _request(overlaps) for groups, overlaps in found.items()}
        return self._requested[group]

    def receiver(self, destination: int) -> ReceiverClass:
        node, held = destination // self.ranks_per_node, self._sources.group_of
        if node not in self._near:
            self._near[node] = frozenset(held[node * self.ranks_per_node : (node + 1) * self.ranks_per_node])
        own = held[destination] if self.prefer_own and destination < len(held) else -1
        return ReceiverClass(self._destinations.group_of[destination], own, self._near[node])

    @cached_property
    def receiver_classes(self) -> dict[ReceiverClass, list[int]]:
        """Every receiver with its destination ranks, in order."""
        found: dict[ReceiverClass, list[int]] = {}
        for rank in range(self.destination.num_ranks):
            found.setdefault(self.receiver(rank), []).append(rank)
        return found

    def node_content(self, node: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Replica groups of a node's ranks in the source and the destination; nodes with equal content have the same
        plan."""
        ranks = slice(node * self.ranks_per_node, (node + 1) * self.ranks_per_node)
        return tuple(self._sources.group_of[ranks]), tuple(self._destinations.group_of[ranks])

    def requests(self, receiver: ReceiverClass) -> tuple[Requests, Requests]:
        """Return the requests of a receiver class to holders on its node, and to holders anywhere."""
        if receiver not in self._requests:
            near: dict[frozenset[int], SliceRequest] = {}
            far: dict[frozenset[int], SliceRequest] = {}
            for groups, request in self.requested(receiver.group).items():
                if receiver.own in groups:
                    continue  # the rank holds them itself
                neighbors = groups & receiver.near
                if neighbors:
                    # Several sets can have the same neighbors; the balancer treats their requests as one.
                    near[neighbors] = _joined(near[neighbors], request) if neighbors in near else request
                else:
                    far[groups] = request
            self._requests[receiver] = (near, far)
        return self._requests[receiver]

    def requests_of(self, destination: int) -> Iterator[tuple[Key, SliceRequest]]:
        near, far = self.requests(self.receiver(destination))
        node = destination // self.ranks_per_node
        yield from (((node, groups), request) for groups, request in near.items())
        yield from (((ANYWHERE, groups), request) for groups, request in far.items())

    def balancer(self, key: Key) -> LoadBalancer:
        """Return the balancer of one set of interchangeable holders."""
        if key not in self._balancers:
            node, groups = key
            if node == ANYWHERE:
                members = sorted(rank for group in groups for rank in self._sources.ranks[group])
                requested = [
                    (rank, self.requests(receiver)[1][groups].num_bytes)
                    for receiver in self._far_receivers[groups]
                    for rank in self.receiver_classes[receiver]
                ]
            else:
                members = [rank for rank in self._node(node, self.source) if self._sources.group_of[rank] in groups]
                requested = [
                    (rank, request.num_bytes)
                    for rank in self._node(node, self.destination)
                    for other, request in self.requests_of(rank)
                    if other == key
                ]
            self._balancers[key] = LoadBalancer(members, requested)
        return self._balancers[key]

    @cached_property
    def _far_receivers(self) -> dict[frozenset[int], list[ReceiverClass]]:
        """Replica groups -> the receiver_classes that want something from them across nodes."""
        found: dict[frozenset[int], list[ReceiverClass]] = {}
        for receiver in self.receiver_classes:
            for groups in self.requests(receiver)[1]:
                found.setdefault(groups, []).append(receiver)
        return found

    @cached_property
    def _far_keys_of_group(self) -> dict[int, list[Key]]:
        found: dict[int, list[Key]] = {}
        for groups in self._far_receivers:
            for group in groups:
                found.setdefault(group, []).append((ANYWHERE, groups))
        return found

    def _node(self, node: int, layout: Layout) -> range:
        start = node * self.ranks_per_node
        return range(start, min(start + self.ranks_per_node, layout.num_ranks))

    def _keys_of(self, rank: int) -> list[Key]:
        """Return the sets of holders with requests that include `rank`."""
        group, node = self._sources.group_of[rank], rank // self.ranks_per_node
        neighbors = self._node(node, self.destination)
        near = {key: None for other in neighbors for key, _ in self.requests_of(other) if key[0] == node}
        return [*(key for key in near if group in key[1]), *self._far_keys_of_group.get(group, ())]

    def _served_by(self, rank: int) -> set[int]:
        """Return the destinations that `rank` may have to send to."""
        found = {destination for key in self._keys_of(rank) for destination in self.balancer(key).served_by(rank)}
        return found | ({rank} if rank < self.destination.num_ranks else set())

    def _into(self, destination: int, only: int | None = None) -> Iterator[Transfer]:
        """Yield transfers into a destination (from rank `only` if given), in the order of its shards."""
        overlaps = self.overlaps(self._destinations.group_of[destination])
        # Sort by index, so that sender and receiver cut equal lists into equal buckets.
        for index, source in sorted(self._senders(destination, only)):
            overlap = overlaps[index]
            held = overlap.holders[self._sources.group_of[source]]
            yield Transfer(overlap.shard.tensor, overlap.bounds, source, destination, held, overlap.shard)

    def _senders(self, destination: int, only: int | None) -> Iterator[tuple[int, int]]:
        """Yield (overlap index, serving rank): the destination itself, or one on its node, or any."""
        receiver = self.receiver(destination)
        if only is None or only == destination:
            kept = (
                request.overlaps for groups, request in self.requested(receiver.group).items() if receiver.own in groups
            )
            yield from ((index, destination) for overlaps in kept for index in overlaps)
        for key, request in self.requests_of(destination):
            if only is None:
                yield from zip(request.overlaps, self._choose(key, destination, request))
            elif self._sources.group_of[only] in key[1] and key[0] in (ANYWHERE, only // self.ranks_per_node):
                chosen = zip(request.overlaps, self._choose(key, destination, request))
                yield from (pair for pair in chosen if pair[1] == only)

    def _choose(self, key: Key, destination: int, request: SliceRequest) -> list[int]:
        only = self._only_member(key)
        if only is not None:
            return [only] * len(request.overlaps)
        return self.balancer(key).senders(destination, request.middles)

    def _only_member(self, key: Key) -> int | None:
        """Return the rank if there is no choice, in which case other destinations' requests do not matter."""
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


def _request(overlaps: Iterable[tuple[int, int]]) -> SliceRequest:
    """Build a request from (index, bytes) of each overlap."""
    indices, sizes = zip(*overlaps)
    return SliceRequest(array("q", indices), array("q", sizes), _middles(sizes))


def _middles(sizes: Iterable[int]) -> array[int]:
    return array("q", (2 * end - size for end, size in zip(accumulate(sizes), sizes)))


def _joined(first: SliceRequest, second: SliceRequest) -> SliceRequest:
    sizes = first.sizes + second.sizes
    return SliceRequest(first.overlaps + second.overlaps, sizes, _middles(sizes))


def _only(transfers: tuple[Transfer, ...], tensors: Collection[str] | None) -> tuple[Transfer, ...]:
    return transfers if tensors is None else tuple(transfer for transfer in transfers if transfer.tensor in tensors)


def plan(source: Layout, destination: Layout, *, ranks_per_node: int = 8, prefer_own: bool = True) -> ReshardPlan:
    """Return the plan that fills every shard of `destination` from `source`, each element exactly once.

    `prefer_own`: a rank serves itself if it can; use False if another rank of its node serves it equally well, so that
    all of them share the work. `destination` may hold fewer tensors than `source`. Raise ValueError if it holds a
    tensor that the source lacks, has in another shape, or does not hold completely.
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
    result = ReshardPlan(source, destination, ranks_per_node, prefer_own)
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
    # Hash once per group: thousands of ranks have few distinct tuples of shards.
    of_group = [hashlib.sha256(repr([tuple(shard) for shard in shards]).encode()).digest() for shards in groups.shards]
    for group in groups.group_of:
        canonical.update(of_group[group])
    return canonical.digest()
