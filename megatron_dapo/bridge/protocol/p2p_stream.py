"""The point-to-point stream of a weight sync: from the shards of several trainer ranks to one engine rank.

    trainer ranks: send_buckets(group, outgoing)  ->  engine rank: receive_buckets(group, incoming)

Both ends cut a bucket into the same messages: a large chunk is a separate message, smaller neighbors of one sender
travel together. A large chunk that is contiguous at an end needs no staging there: it leaves from the shard and arrives
in the parameter. All senders of a bucket send at once, and the next buckets are in flight while one is copied into its
parameters.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from megatron_dapo.bridge.protocol.messages import Bucket, Chunk, CommandReply
from megatron_dapo.bridge.protocol.peer_group import (
    ACKNOWLEDGE_TAG,
    REPLY_TAG,
    SIZE_TAG,
    Address,
    PeerError,
    PeerGroup,
    Pending,
)
from megatron_dapo.bridge.protocol.receiver import Receiver

DIRECT_BYTES = 256 << 10  # chunks of at least this many bytes are separate messages; for smaller ones a copy is cheaper
STAGED_BUCKETS = 2  # limit of the bytes staged at either end
WINDOW = 16  # buckets in flight at either end; those that need no staging take no memory
MAX_REPLY_BYTES = 64 << 20  # a length that came over an unauthenticated connection must not allocate more
MAX_SURPLUS_BYTES = 1 << 20  # limit of a delta's bytes beyond all elements, for the same reason
RECEIVE = "receive"  # the operation of a command that stands for a whole weight sync
READY = "ready"
_ACKNOWLEDGE_S = 5.0


@dataclass(frozen=True)
class P2PChannel:
    """The leader's instructions to an engine rank: the group, and all buckets in order."""

    address: Address
    group: str  # name
    fresh: bool  # join the group; else use the one of an earlier sync
    trainers: tuple[int, ...]  # trainer ranks, members 0, 1, ...
    member: int  # this engine rank
    size: int
    leader: int  # member
    backend: str
    connect_s: float
    seconds: float  # limit of the whole transfer
    buckets: tuple[Bucket, ...]

    @property
    def peers(self) -> set[int]:
        """Members that the engine rank exchanges messages with: those that send to it, and the leader."""
        return {self.leader, *(self.trainers.index(rank) for bucket in self.buckets for rank in bucket.segments)}

    def to_json(self) -> dict[str, Any]:
        value = {**self.__dict__, "kind": "p2p", "address": [self.address.host, self.address.port]}
        return {**value, "buckets": [bucket.to_json() for bucket in self.buckets]}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> P2PChannel:
        """Raise ValueError if the segments of a bucket do not cover it."""
        fields = {name: value[name] for name in P2PChannel.__dataclass_fields__}
        buckets = tuple(Bucket.from_json(bucket) for bucket in value["buckets"])
        address, trainers = Address(*value["address"]), tuple(value["trainers"])
        return P2PChannel(**{**fields, "address": address, "trainers": trainers, "buckets": buckets})


class Message(NamedTuple):
    """Bytes [start, stop) of a bucket, exchanged with one member; one large chunk, or several small ones."""

    member: int
    start: int
    stop: int
    chunks: tuple[Chunk, ...]


def messages(bucket: Bucket, trainers: Sequence[int], itemsizes: Mapping[str, int]) -> list[Message]:
    """Return the messages of a bucket by sender, then in the order of its bytes; element sizes are the engine's."""
    result: list[Message] = []
    position, chunks = 0, bucket.chunks
    for rank, (_, stop) in bucket.segments.items():
        first = position
        while position < len(chunks) and chunks[position].byte_offset < stop:
            position += 1
        result += messages_of(trainers.index(rank), chunks[first:position], itemsizes)
    if position != len(chunks):
        raise ValueError(f"weight sync: the chunk {chunks[position]} of bucket {bucket.index} has no sender")
    return result


def messages_of(member: int, chunks: Iterable[Chunk], itemsizes: Mapping[str, int]) -> list[Message]:
    """Return the messages of one sender; `chunks` in the order of their bytes."""
    runs: list[list[Chunk]] = []
    joins = False  # the next small chunk may travel with the last run
    for chunk in chunks:
        is_small = chunk.bounds.volume * itemsizes[chunk.name] < DIRECT_BYTES
        if is_small and joins:
            runs[-1].append(chunk)
        else:
            runs.append([chunk])
        joins = is_small
    ends = [run[-1].byte_offset + run[-1].bounds.volume * itemsizes[run[-1].name] for run in runs]
    return [Message(member, run[0].byte_offset, end, tuple(run)) for run, end in zip(runs, ends)]


class Staging:
    """Memory for messages that cannot leave from or arrive in place: at most `budget` bytes at a time, reused."""

    def __init__(self, device: torch.device, budget: int, *, pinned: bool = False) -> None:
        self.budget = budget
        self._device = device
        self._pinned = pinned
        self._free: list[torch.Tensor] = []
        self._taken = 0

    def has(self, num_bytes: int) -> bool:
        """Return True if so many bytes may be taken now; if nothing is taken, any number may."""
        return not self._taken or self._taken + num_bytes <= self.budget

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return uint8 of at least `num_bytes`, contents unknown."""
        fitting = [n for n, block in enumerate(self._free) if num_bytes <= block.numel() <= 2 * num_bytes]
        if fitting:
            block = self._free.pop(min(fitting, key=lambda n: self._free[n].numel()))
            self._taken += block.numel()
            return block
        self._taken += num_bytes
        self._trim()
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device, pin_memory=self._pinned)

    def give_back(self, block: torch.Tensor) -> None:
        self._taken -= block.numel()
        self._free.append(block)
        self._trim()

    def _trim(self) -> None:
        # Taken blocks may exceed the budget: one message may be larger, and a reused block larger than its message.
        while self._free and sum(free.numel() for free in self._free) + self._taken > self.budget:
            self._free.pop(0)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as flat bytes, without a copy."""
    return tensor.detach().view(-1).view(torch.uint8)


class _Flight:
    """Buckets in flight at one end: at most WINDOW, and as many as staging has room for."""

    def __init__(self, group: PeerGroup, staging: Staging, deadline: float) -> None:
        self.group = group
        self.staging = staging
        self._deadline = deadline
        self._buckets: deque[tuple[list[Pending], Any]] = deque()

    def make_room(self, num_bytes: int) -> Iterator[Any]:
        """Wait for the oldest buckets until `num_bytes` can be staged; yield what was attached to each."""
        while self._buckets and (len(self._buckets) == WINDOW or not self.staging.has(num_bytes)):
            yield self._oldest()

    def drain(self) -> Iterator[Any]:
        while self._buckets:
            yield self._oldest()

    def add(self, pending: list[Pending], attached: Any) -> None:
        self._buckets.append((pending, attached))

    def _oldest(self) -> Any:
        pending, attached = self._buckets.popleft()
        self.group.wait(pending, self._deadline)
        return attached


Position = tuple[int, int, int]  # index of a bucket, engine, engine rank


class LaunchOrder:
    """Makes the threads of one rank, one an engine, launch their buckets in the order of their positions.

    That order is the same on all senders. The kernels of all engines share the hardware queues of the sender's GPU, one with
    CUDA_DEVICE_MAX_CONNECTIONS=1, and a kernel that waits for the bucket before it holds back all that were launched later. Two
    senders with different orders would wait for each other: in one order the first bucket that is not complete never waits.

    Indices come first, so that all engines receive all the time. No thread launches before all have joined their groups: a
    communicator that is made while kernels wait could wait for them.
    """

    def __init__(self, engines: Iterable[int]) -> None:
        self._next: dict[int, tuple[int, ...]] = dict.fromkeys(engines, ())  # engine -> position it launches next
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def turn(self, position: Position, deadline: float) -> Iterator[None]:
        """Launch inside. An engine that has left, or was never in the order, need not wait. PeerError at the deadline."""
        engine = position[1]
        with self._changed:
            if engine in self._next:
                self._next[engine] = position
                self._changed.notify_all()
                if not self._changed.wait_for(lambda: self._is_first(engine), max(0.0, deadline - time.monotonic())):
                    raise PeerError(
                        f"bucket {position[0]} still waits for those of engine {min(self._others(engine))[1]}"
                    )
        yield

    def leave(self, engine: int) -> None:
        """Let the others launch without this engine, which has launched everything or failed."""
        with self._changed:
            self._next.pop(engine, None)
            self._changed.notify_all()

    def _is_first(self, engine: int) -> bool:
        return engine not in self._next or all(self._next[engine] < other for other, _ in self._others(engine))

    def _others(self, engine: int) -> list[tuple[tuple[int, ...], int]]:
        return [(position, other) for other, position in self._next.items() if other != engine]


@dataclass(frozen=True)
class Outgoing:
    """One sender's contribution to a bucket of one engine rank."""

    position: Position
    messages: Sequence[Message]  # sent to the engine rank's member
    values: Mapping[Chunk, torch.Tensor]  # the sender's own views: strided, in its type
    dtypes: Mapping[str, torch.dtype]  # types of the engine's parameters

    def leaves_directly(self, message: Message) -> bool:
        """Return True if the shard holds the message as it travels: one chunk, contiguous, in the engine's type."""
        values = self.values[message.chunks[0]]
        same = values.dtype == self.dtypes[message.chunks[0].name]
        return len(message.chunks) == 1 and same and values.is_contiguous()

    def pack(self, message: Message, out: torch.Tensor) -> torch.Tensor:
        """Write the chunks of a message into `out`, cast to the engine's types."""
        for chunk in message.chunks:
            values, dtype = self.values[chunk], self.dtypes[chunk.name]
            start = chunk.byte_offset - message.start
            out[start : start + values.numel() * dtype.itemsize].view(dtype).view(values.shape).copy_(values)
        return out


def send_buckets(
    group: PeerGroup, buckets: Iterable[Outgoing], staging: Staging, order: LaunchOrder, deadline: float
) -> int:
    """Send every bucket, by position; return the bytes that left. Raise PeerError if a receiver is gone or late."""
    num_bytes, flight = 0, _Flight(group, staging, deadline)

    def free(blocks: list[torch.Tensor]) -> None:
        for block in blocks:
            staging.give_back(block)

    for outgoing in buckets:
        staged = [message for message in outgoing.messages if not outgoing.leaves_directly(message)]
        for blocks in flight.make_room(sum(message.stop - message.start for message in staged)):
            free(blocks)
        views, blocks = [], []
        for message in outgoing.messages:
            if message in staged:
                blocks.append(staging.take(message.stop - message.start))
                views.append(outgoing.pack(message, blocks[-1][: message.stop - message.start]))
            else:
                views.append(as_bytes(outgoing.values[message.chunks[0]]))
        with order.turn(outgoing.position, deadline), group.batch():
            pending = [group.send(view, message.member) for view, message in zip(views, outgoing.messages)]
        num_bytes += sum(view.numel() for view in views)
        flight.add(pending, blocks)
    for blocks in flight.drain():
        free(blocks)
    return num_bytes


class _Landing(NamedTuple):
    """Destination of one message: its parameter, or a block of staging from which its chunks are copied."""

    message: Message
    data: torch.Tensor  # uint8
    block: torch.Tensor | None


class _Incoming(NamedTuple):
    bucket: Bucket
    targets: Mapping[Chunk, torch.Tensor]
    landings: list[_Landing]


def receive_buckets(
    group: PeerGroup, channel: P2PChannel, receiver: Receiver, sync_id: str, staging: Staging, deadline: float
) -> int:
    """Receive all buckets in order into the receiver's parameters; return the bytes.

    Raise PeerError if a sender is gone or late, ValueError for a bucket that does not fit.
    """
    num_bytes, flight = 0, _Flight(group, staging, deadline)

    def land(arrived: _Incoming) -> int:
        for landing in arrived.landings:
            if landing.block is not None:
                _unpack(landing, arrived.targets)
                staging.give_back(landing.block)
        receiver.filled(sync_id, arrived.bucket)
        return sum(landing.data.numel() for landing in arrived.landings)

    for bucket in channel.buckets:
        targets = receiver.targets(bucket)
        itemsizes = {chunk.name: target.dtype.itemsize for chunk, target in targets.items()}
        coming = messages(bucket, channel.trainers, itemsizes)
        need = sum(m.stop - m.start for m in coming if not _lands_directly(m, targets))
        for arrived in flight.make_room(need):
            num_bytes += land(arrived)
        landings = [_landing(message, targets, staging) for message in coming]
        with group.batch():
            pending = [group.receive(landing.data, landing.message.member) for landing in landings]
        flight.add(pending, _Incoming(bucket, targets, landings))
    for arrived in flight.drain():
        num_bytes += land(arrived)
    return num_bytes


def _lands_directly(message: Message, targets: Mapping[Chunk, torch.Tensor]) -> bool:
    return len(message.chunks) == 1 and targets[message.chunks[0]].is_contiguous()


def _landing(message: Message, targets: Mapping[Chunk, torch.Tensor], staging: Staging) -> _Landing:
    if _lands_directly(message, targets):
        return _Landing(message, as_bytes(targets[message.chunks[0]]), None)
    block = staging.take(message.stop - message.start)
    return _Landing(message, block[: message.stop - message.start], block)


def _unpack(landing: _Landing, targets: Mapping[Chunk, torch.Tensor]) -> None:
    for chunk in landing.message.chunks:
        target = targets[chunk]
        start = chunk.byte_offset - landing.message.start
        values = landing.data[start : start + target.numel() * target.dtype.itemsize]
        target.copy_(values.view(target.dtype).view(target.shape))


# Deltas: a segment's size depends on what changed, so it travels ahead of the bytes


def send_segments(
    group: PeerGroup, segments: Iterable[tuple[Position, int, torch.Tensor]], order: LaunchOrder, deadline: float
) -> int:
    """Send (position, member, segment) one after the other; return the bytes that left."""
    pending: deque[Pending] = deque()
    num_bytes = 0
    for position, member, segment in segments:
        while len(pending) >= 2 * STAGED_BUCKETS:
            pending.popleft().wait(deadline)
        pending.append(group.send(torch.tensor([segment.numel()]), member, SIZE_TAG))
        with order.turn(position, deadline), group.batch():
            pending.append(group.send(segment, member))
        num_bytes += segment.numel()
    for message in pending:
        message.wait(deadline)
    return num_bytes


def receive_segments(
    group: PeerGroup, channel: P2PChannel, receiver: Receiver, sync_id: str, deadline: float
) -> int:
    """Receive all buckets of a delta in order and apply them; return the bytes.

    Raise PeerError if a sender is gone or late, ValueError for a segment that does not fit.
    """
    num_bytes = 0
    for bucket in channel.buckets:
        members = {rank: channel.trainers.index(rank) for rank in bucket.segments}
        sizes = {rank: torch.zeros(1, dtype=torch.int64) for rank in members}
        for message in [group.receive(sizes[rank], member, SIZE_TAG) for rank, member in members.items()]:
            message.wait(deadline)
        segments = {}
        for rank, (start, stop) in bucket.segments.items():
            size = int(sizes[rank])
            if not 0 <= size <= stop - start + MAX_SURPLUS_BYTES:
                raise ValueError(f"weight sync: trainer rank {rank} announces {size} bytes of changes of {stop - start}")
            segments[rank] = torch.empty(size, dtype=torch.uint8, device=group.device)
        with group.batch():
            pending = [group.receive(segments[rank], member) for rank, member in members.items()]
        group.wait(pending, deadline)
        num_bytes += receiver.change(sync_id, bucket, segments)
    return num_bytes


# Replies through the group's control connections


def ready_key(group: str, member: int) -> str:
    """Return the key under which an engine rank says that it is about to join, or its leader that it will not."""
    return f"{group}/ready/{member}"


def send_reply(group: PeerGroup, leader: int, reply: CommandReply, deadline: float) -> None:
    """Send a reply to the leader: its length, then its text."""
    payload = torch.frombuffer(bytearray(reply.encode().encode()), dtype=torch.uint8)
    group.send(torch.tensor([payload.numel()]), leader, REPLY_TAG).wait(deadline)
    group.send(payload, leader, REPLY_TAG).wait(deadline)


def receive_reply(group: PeerGroup, member: int, deadline: float) -> CommandReply:
    """Wait for an engine rank's reply. Raise ValueError if it cannot be read, PeerError if none arrives."""
    size = torch.zeros(1, dtype=torch.int64)
    group.receive(size, member, REPLY_TAG).wait(deadline)
    if not 0 < int(size) <= MAX_REPLY_BYTES:
        raise ValueError(f"member {member} announces a reply of {int(size)} bytes")
    payload = torch.zeros(int(size), dtype=torch.uint8)
    group.receive(payload, member, REPLY_TAG).wait(deadline)
    return CommandReply.decode(bytes(payload.tolist()).decode())


def acknowledge(group: PeerGroup, member: int, deadline: float) -> None:
    """Tell an engine rank that its last reply has arrived."""
    group.send(torch.zeros(1, dtype=torch.uint8), member, ACKNOWLEDGE_TAG).wait(deadline)


def receive_acknowledgement(group: PeerGroup, leader: int, deadline: float) -> None:
    """Wait briefly for the leader: connections that are closed too early can lose a reply on its way."""
    received = group.receive(torch.zeros(1, dtype=torch.uint8), leader, ACKNOWLEDGE_TAG)
    received.wait(min(deadline, time.monotonic() + _ACKNOWLEDGE_S))
