"""A delivery as a stream of messages between the members of a `PeerGroup`: senders' shards to one engine rank.

    senders: send_buckets(group, outgoing)  ->  engine rank: receive_buckets(group, routed)

Both ends cut a bucket into the same messages: a large chunk is a message of its own, smaller neighbors of one sender
travel together. A large chunk that is contiguous at an end needs no staging there: it leaves straight from the shard and
arrives straight in the parameter. All senders of a bucket send at once; the next buckets are on their way while the last
one is copied into its parameters.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from megatron_dapo.bridge.protocol.peer_group import ANSWER_TAG, Address, PeerGroup, Pending
from megatron_dapo.bridge.protocol.receiver import Bucket, Chunk, Reply

DIRECT_BYTES = 256 << 10  # parts of at least this many bytes are messages of their own
STAGED_BUCKETS = 2  # as many bytes may be staged at either end
WINDOW = 16  # buckets under way at either end; those that need no staging take no memory
MAX_REPORT_BYTES = 64 << 20
RECEIVE = "receive"  # the operation of a command that stands for a whole delivery


class Message(NamedTuple):
    """Bytes [start, stop) of a bucket, sent by one member; one chunk where it is large."""

    member: int
    start: int
    stop: int
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class RoutedBucket:
    """A bucket and which member of the group sends which bytes of it."""

    bucket: Bucket
    segments: Mapping[int, tuple[int, int]]  # member -> [start, stop), in the order of the bytes

    def to_json(self) -> dict[str, Any]:
        return {"bucket": self.bucket.to_json(), "segments": [[m, *segment] for m, segment in self.segments.items()]}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> RoutedBucket:
        """ValueError where the segments are not the whole bucket, one behind the other."""
        bucket = Bucket.from_json(value["bucket"])
        segments = {int(member): (int(start), int(stop)) for member, start, stop in value["segments"]}
        position = 0
        for member, (start, stop) in segments.items():
            if start != position or stop < start:
                raise ValueError(
                    f"delivery: member {member} sends bytes [{start}, {stop}), {position} was to come next"
                )
            position = stop
        if position != bucket.num_bytes:
            raise ValueError(f"delivery: members send {position} of {bucket.num_bytes} bytes of bucket {bucket.index}")
        return RoutedBucket(bucket, segments)


@dataclass(frozen=True)
class P2PChannel:
    """What the leader tells an engine rank about the way of a delivery."""

    address: Address
    group: str  # name
    fresh: bool  # the group is to be joined; else it is the one of an earlier delivery
    member: int
    size: int
    leader: int  # member
    backend: str
    connect_s: float
    seconds: float  # in which everything must have ended
    buckets: tuple[RoutedBucket, ...]

    def to_json(self) -> dict[str, Any]:
        value = {**self.__dict__, "kind": "peer", "address": [self.address.host, self.address.port]}
        return {**value, "buckets": [bucket.to_json() for bucket in self.buckets]}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> P2PChannel:
        """ValueError where a bucket's segments do not fit it."""
        fields = {name: value[name] for name in P2PChannel.__dataclass_fields__}
        buckets = tuple(RoutedBucket.from_json(bucket) for bucket in value["buckets"])
        return P2PChannel(**{**fields, "address": Address(*value["address"]), "buckets": buckets})


def messages(routed: RoutedBucket, itemsizes: Mapping[str, int]) -> list[Message]:
    """The messages of a bucket by sender, then in the order of its bytes; element sizes are the engine's."""
    chunks = sorted(routed.bucket.chunks, key=lambda chunk: chunk.byte_offset)
    result: list[Message] = []
    position = 0
    for member, (_, stop) in routed.segments.items():
        first = position
        while position < len(chunks) and chunks[position].byte_offset < stop:
            position += 1
        result += messages_of(member, chunks[first:position], itemsizes)
    if position != len(chunks):
        raise ValueError(f"delivery: the chunk {chunks[position]} of bucket {routed.bucket.index} has no sender")
    return result


def messages_of(member: int, chunks: Iterable[Chunk], itemsizes: Mapping[str, int]) -> list[Message]:
    """The messages of one sender; `parts` in the order of their bytes."""
    return [Message(member, *run) for run in _runs(chunks, itemsizes)]


def _runs(chunks: Iterable[Chunk], itemsizes: Mapping[str, int]) -> Iterator[tuple[int, int, tuple[Chunk, ...]]]:
    small: list[Chunk] = []
    for chunk in chunks:
        if _num_bytes(chunk, itemsizes) < DIRECT_BYTES:
            small.append(chunk)
            continue
        yield from _together(small, itemsizes)
        small = []
        yield chunk.byte_offset, chunk.byte_offset + _num_bytes(chunk, itemsizes), (chunk,)
    yield from _together(small, itemsizes)


def _together(chunks: Sequence[Chunk], itemsizes: Mapping[str, int]) -> Iterator[tuple[int, int, tuple[Chunk, ...]]]:
    if chunks:
        yield chunks[0].byte_offset, chunks[-1].byte_offset + _num_bytes(chunks[-1], itemsizes), tuple(chunks)


def _num_bytes(chunk: Chunk, itemsizes: Mapping[str, int]) -> int:
    return chunk.bounds.volume * itemsizes[chunk.name]


class Staging:
    """Memory for what cannot leave from or arrive in its own place: at most `budget` bytes at a time, used again."""

    def __init__(self, device: torch.device, budget: int) -> None:
        self._device = device
        self._budget = budget
        self._free: list[torch.Tensor] = []
        self._taken = 0

    def has(self, num_bytes: int) -> bool:
        """Whether so much may be taken now; where nothing is taken, anything may."""
        return not self._taken or self._taken + num_bytes <= self._budget

    def take(self, num_bytes: int) -> torch.Tensor:
        """uint8 of at least `num_bytes`, contents unknown."""
        fitting = [n for n, block in enumerate(self._free) if num_bytes <= block.numel() <= 2 * num_bytes]
        if fitting:
            block = self._free.pop(min(fitting, key=lambda n: self._free[n].numel()))
            self._taken += block.numel()
            return block
        self._taken += num_bytes
        self._trim()
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def give_back(self, block: torch.Tensor) -> None:
        self._taken -= block.numel()
        self._free.append(block)
        self._trim()

    def _trim(self) -> None:
        """Give up free blocks beyond the budget. What is taken may exceed it: one message may be larger, and a block that
        is used again may be larger than its message."""
        while self._free and sum(free.numel() for free in self._free) + self._taken > self._budget:
            self._free.pop(0)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as flat bytes, without a copy."""
    return tensor.detach().view(-1).view(torch.uint8)


@dataclass(frozen=True)
class Outgoing:
    """What one sender contributes to a bucket of one engine rank."""

    to: int  # member
    messages: Sequence[Message]
    values: Callable[[Chunk], torch.Tensor]  # the chunk as the sender holds it: strided, of its own type
    dtypes: Mapping[str, torch.dtype]  # of the engine's parameters


def send_buckets(group: PeerGroup, buckets: Iterable[Outgoing], staging: Staging, deadline: float) -> int:
    """Sends every bucket, at most `WINDOW` under way and as many as `staging` has room for; returns the bytes that left.

    All senders of a group must list buckets in one order (by index, then by engine rank). PeerError where a receiver is
    gone or late.
    """
    num_bytes = 0
    under_way: deque[tuple[list[Pending], list[torch.Tensor]]] = deque()

    def leave() -> None:
        pending, blocks = under_way.popleft()
        group.wait(pending, deadline)
        for block in blocks:
            staging.give_back(block)

    for outgoing in buckets:
        staged = [message for message in outgoing.messages if not _leaves_directly(outgoing, message)]
        need = sum(message.stop - message.start for message in staged)
        while under_way and (len(under_way) == WINDOW or not staging.has(need)):
            leave()
        pending, blocks = [], []
        for message in outgoing.messages:
            if message in staged:
                blocks.append(staging.take(message.stop - message.start))
                view = _pack(outgoing, message, blocks[-1][: message.stop - message.start])
            else:
                view = as_bytes(outgoing.values(message.chunks[0]))
            pending.append(group.send(view, outgoing.to))
            num_bytes += view.numel()
        under_way.append((pending, blocks))
    while under_way:
        leave()
    return num_bytes


def _leaves_directly(outgoing: Outgoing, message: Message) -> bool:
    """Whether the shard holds the message as it travels: one chunk, contiguous, in the engine's type."""
    chunk = message.chunks[0]
    if len(message.chunks) > 1:
        return False
    values = outgoing.values(chunk)
    return values.dtype == outgoing.dtypes[chunk.name] and values.is_contiguous()


def _pack(outgoing: Outgoing, message: Message, out: torch.Tensor) -> torch.Tensor:
    for chunk in message.chunks:
        values, dtype = outgoing.values(chunk), outgoing.dtypes[chunk.name]
        start = chunk.byte_offset - message.start
        out[start : start + values.numel() * dtype.itemsize].view(dtype).view(values.shape).copy_(values)
    return out


@dataclass(frozen=True)
class Landing:
    """Where one message arrives: in its parameter, or in a block of staging, from which its chunks are copied."""

    message: Message
    target: torch.Tensor  # uint8
    block: torch.Tensor | None


def _lands_directly(message: Message, places: Mapping[Chunk, torch.Tensor]) -> bool:
    return len(message.chunks) == 1 and places[message.chunks[0]].is_contiguous()


def _landing(message: Message, places: Mapping[Chunk, torch.Tensor], staging: Staging) -> Landing:
    if _lands_directly(message, places):
        return Landing(message, as_bytes(places[message.chunks[0]]), None)
    block = staging.take(message.stop - message.start)
    return Landing(message, block[: message.stop - message.start], block)


def _unpack(landing: Landing, places: Mapping[Chunk, torch.Tensor]) -> None:
    for chunk in landing.message.chunks:
        place = places[chunk]
        start = chunk.byte_offset - landing.message.start
        values = landing.target[start : start + place.numel() * place.dtype.itemsize]
        place.copy_(values.view(place.dtype).view(place.shape))


def receive_buckets(
    group: PeerGroup,
    routed: Sequence[RoutedBucket],
    places: Callable[[Bucket], Mapping[Chunk, torch.Tensor]],
    filled: Callable[[Bucket], None],
    staging: Staging,
    deadline: float,
) -> int:
    """Receives all buckets in order, at most `WINDOW` under way and as many as `staging` has room for; returns bytes.

    `places(bucket)` checks a bucket and says where its chunks belong; `filled(bucket)` hears when they are there.
    PeerError where a sender is gone or late.
    """
    num_bytes = 0
    under_way: deque[tuple[Bucket, Mapping[Chunk, torch.Tensor], list[Landing], list[Pending]]] = deque()

    def land() -> int:
        bucket, where, landings, pending = under_way.popleft()
        group.wait(pending, deadline)
        for landing in landings:
            if landing.block is not None:
                _unpack(landing, where)
                staging.give_back(landing.block)
        filled(bucket)
        return sum(landing.target.numel() for landing in landings)

    for bucket in routed:
        where = places(bucket.bucket)
        coming = messages(bucket, {chunk.name: place.dtype.itemsize for chunk, place in where.items()})
        need = sum(m.stop - m.start for m in coming if not _lands_directly(m, where))
        while under_way and (len(under_way) == WINDOW or not staging.has(need)):
            num_bytes += land()
        landings = [_landing(message, where, staging) for message in coming]
        pending = [group.receive(landing.target, landing.message.member) for landing in landings]
        under_way.append((bucket.bucket, where, landings, pending))
    while under_way:
        num_bytes += land()
    return num_bytes


# Reports through the group

READY = "ready"
_ACKNOWLEDGE_S = 5.0


def ready_key(group: str, member: int) -> str:
    """Under which an engine rank says that it is about to join, or its leader that it will not."""
    return f"{group}/ready/{member}"


def send_report(group: PeerGroup, leader: int, report: Reply, deadline: float) -> None:
    payload = torch.frombuffer(bytearray(report.encode().encode()), dtype=torch.uint8).to(group.device)
    group.send(torch.tensor([payload.numel()], device=group.device), leader).wait(deadline)
    group.send(payload, leader).wait(deadline)


def receive_report(group: PeerGroup, member: int, deadline: float) -> Reply:
    """ValueError where what arrives is no report, PeerError where nothing does."""
    size = torch.zeros(1, dtype=torch.int64, device=group.device)
    group.receive(size, member).wait(deadline)
    if not 0 < int(size) <= MAX_REPORT_BYTES:
        raise ValueError(f"member {member} announces a report of {int(size)} bytes")
    payload = torch.zeros(int(size), dtype=torch.uint8, device=group.device)
    group.receive(payload, member).wait(deadline)
    return Reply.decode(bytes(payload.tolist()).decode())


def acknowledge(group: PeerGroup, member: int, deadline: float) -> None:
    """Tells an engine rank that its last report has arrived. Where that failed, bytes of buckets may still be on their way
    to it: what is waited for then must not be mistaken for them."""
    group.send(torch.zeros(1, dtype=torch.uint8, device=group.device), member, ANSWER_TAG).wait(deadline)


def receive_acknowledgement(group: PeerGroup, leader: int, deadline: float) -> None:
    """Waits shortly: connections that are closed too early can lose a report on its way."""
    received = group.receive(torch.zeros(1, dtype=torch.uint8, device=group.device), leader, ANSWER_TAG)
    received.wait(min(deadline, time.monotonic() + _ACKNOWLEDGE_S))
