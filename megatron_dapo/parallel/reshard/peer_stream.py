"""A delivery as a stream of messages between the members of a `PeerGroup`: senders' shards to one engine rank.

    senders: send_buckets(group, outgoing)  ->  engine rank: receive_buckets(group, routed)

Both ends cut a bucket into the same messages: a large part is a message of its own, smaller neighbours of one sender
travel together. A large part that is contiguous at an end needs no staging there: it leaves straight from the shard and
arrives straight in the parameter. All senders of a bucket send at once; the next bucket is on its way while the last
one is copied into its parameters.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from megatron_dapo.parallel.peer_group import Address, PeerGroup, Pending
from megatron_dapo.parallel.reshard.delivery import Bucket, Part, Report

DIRECT_BYTES = 256 << 10  # parts of at least this many bytes are messages of their own
NUM_SLOTS = 2  # buckets under way at either end
MAX_REPORT_BYTES = 64 << 20
RECEIVE = "receive"  # the operation of a command that stands for a whole delivery


class Message(NamedTuple):
    """Bytes [start, stop) of a bucket, sent by one member; one part where it is large."""

    member: int
    start: int
    stop: int
    parts: tuple[Part, ...]


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
                raise ValueError(f"delivery: member {member} sends bytes [{start}, {stop}), {position} was to come next")
            position = stop
        if position != bucket.num_bytes:
            raise ValueError(f"delivery: members send {position} of {bucket.num_bytes} bytes of bucket {bucket.index}")
        return RoutedBucket(bucket, segments)


@dataclass(frozen=True)
class PeerChannel:
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
    def from_json(value: Mapping[str, Any]) -> PeerChannel:
        """ValueError where a bucket's segments do not fit it."""
        fields = {name: value[name] for name in PeerChannel.__dataclass_fields__}
        buckets = tuple(RoutedBucket.from_json(bucket) for bucket in value["buckets"])
        return PeerChannel(**{**fields, "address": Address(*value["address"]), "buckets": buckets})


def messages(routed: RoutedBucket, itemsizes: Mapping[str, int]) -> list[Message]:
    """The messages of a bucket by sender, then in the order of its bytes; element sizes are the engine's."""
    parts = sorted(routed.bucket.parts, key=lambda part: part.byte_offset)
    result: list[Message] = []
    position = 0
    for member, (_, stop) in routed.segments.items():
        first = position
        while position < len(parts) and parts[position].byte_offset < stop:
            position += 1
        result += messages_of(member, parts[first:position], itemsizes)
    if position != len(parts):
        raise ValueError(f"delivery: the part {parts[position]} of bucket {routed.bucket.index} has no sender")
    return result


def messages_of(member: int, parts: Iterable[Part], itemsizes: Mapping[str, int]) -> list[Message]:
    """The messages of one sender; `parts` in the order of their bytes."""
    return [Message(member, *run) for run in _runs(parts, itemsizes)]


def _runs(parts: Iterable[Part], itemsizes: Mapping[str, int]) -> Iterator[tuple[int, int, tuple[Part, ...]]]:
    small: list[Part] = []
    for part in parts:
        if _num_bytes(part, itemsizes) < DIRECT_BYTES:
            small.append(part)
            continue
        yield from _together(small, itemsizes)
        small = []
        yield part.byte_offset, part.byte_offset + _num_bytes(part, itemsizes), (part,)
    yield from _together(small, itemsizes)


def _together(parts: Sequence[Part], itemsizes: Mapping[str, int]) -> Iterator[tuple[int, int, tuple[Part, ...]]]:
    if parts:
        yield parts[0].byte_offset, parts[-1].byte_offset + _num_bytes(parts[-1], itemsizes), tuple(parts)


def _num_bytes(part: Part, itemsizes: Mapping[str, int]) -> int:
    return part.box.volume * itemsizes[part.name]


class Staging:
    """Memory for what cannot leave from or arrive in its own place: `NUM_SLOTS` buckets, taken as far as needed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slots = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(NUM_SLOTS)]

    @property
    def num_bytes(self) -> int:
        """Taken so far."""
        return sum(slot.numel() for slot in self._slots)

    def slot(self, number: int, num_bytes: int) -> torch.Tensor:
        """uint8 of at least `num_bytes`; what the slot held is lost."""
        index = number % NUM_SLOTS
        if self._slots[index].numel() < num_bytes:
            self._slots[index] = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return self._slots[index]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as flat bytes, without a copy."""
    return tensor.detach().view(-1).view(torch.uint8)


@dataclass(frozen=True)
class Outgoing:
    """What one sender contributes to a bucket of one engine rank."""

    to: int  # member
    messages: Sequence[Message]
    values: Callable[[Part], torch.Tensor]  # the part as the sender holds it: strided, of its own type
    dtypes: Mapping[str, torch.dtype]  # of the engine's parameters


def send_buckets(group: PeerGroup, buckets: Iterable[Outgoing], staging: Staging, deadline: float) -> int:
    """Sends every bucket, `NUM_SLOTS` under way at a time; returns the bytes that left.

    All senders of a group must list buckets in one order (by index, then by engine rank). PeerError where a receiver is
    gone or late.
    """
    num_bytes = 0
    under_way: deque[list[Pending]] = deque()
    for number, outgoing in enumerate(buckets):
        if len(under_way) == NUM_SLOTS:
            wait_all(under_way.popleft(), deadline)
        views = _departures(outgoing, lambda size, n=number: staging.slot(n, size))
        under_way.append([group.send(view, outgoing.to) for view in views])
        num_bytes += sum(view.numel() for view in views)
    for pending in under_way:
        wait_all(pending, deadline)
    return num_bytes


def wait_all(pending: Iterable[Pending], deadline: float) -> None:
    for message in pending:
        message.wait(deadline)


def _departures(outgoing: Outgoing, staging: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
    """The bytes of each message: the shard itself where it has the engine's type and is contiguous, else packed."""
    base = outgoing.messages[0].start
    slot: torch.Tensor | None = None
    views = []
    for message in outgoing.messages:
        part = message.parts[0]
        values = outgoing.values(part)
        if len(message.parts) == 1 and values.dtype == outgoing.dtypes[part.name] and values.is_contiguous():
            views.append(as_bytes(values))
            continue
        slot = staging(outgoing.messages[-1].stop - base) if slot is None else slot
        views.append(_pack(outgoing, message, slot[message.start - base : message.stop - base]))
    return views


def _pack(outgoing: Outgoing, message: Message, out: torch.Tensor) -> torch.Tensor:
    for part in message.parts:
        values, dtype = outgoing.values(part), outgoing.dtypes[part.name]
        start = part.byte_offset - message.start
        out[start : start + values.numel() * dtype.itemsize].view(dtype).view(values.shape).copy_(values)
    return out


@dataclass(frozen=True)
class Landing:
    """Where one message arrives: in its parameter, or in staging, from which `unpack` takes it."""

    message: Message
    target: torch.Tensor  # uint8
    unpack: Callable[[], None] | None


def landings(
    routed: RoutedBucket, places: Mapping[Part, torch.Tensor], staging: Callable[[int], torch.Tensor]
) -> list[Landing]:
    """`places`: part -> its box of the parameter. `staging(num_bytes)` is asked once, where something needs it."""
    itemsizes = {part.name: place.dtype.itemsize for part, place in places.items()}
    slot: torch.Tensor | None = None
    result = []
    for message in messages(routed, itemsizes):
        first = places[message.parts[0]]
        if len(message.parts) == 1 and first.is_contiguous():
            result.append(Landing(message, as_bytes(first), None))
            continue
        slot = staging(routed.bucket.num_bytes) if slot is None else slot
        result.append(Landing(message, slot[message.start : message.stop], _unpacker(message, places, slot)))
    return result


def _unpacker(message: Message, places: Mapping[Part, torch.Tensor], slot: torch.Tensor) -> Callable[[], None]:
    def unpack() -> None:
        for part in message.parts:
            place = places[part]
            stop = part.byte_offset + place.numel() * place.dtype.itemsize
            place.copy_(slot[part.byte_offset : stop].view(place.dtype).view(place.shape))

    return unpack


def receive_buckets(
    group: PeerGroup,
    routed: Sequence[RoutedBucket],
    places: Callable[[Bucket], Mapping[Part, torch.Tensor]],
    filled: Callable[[Bucket], None],
    staging: Staging,
    deadline: float,
) -> int:
    """Receives all buckets, in order, `NUM_SLOTS` under way at a time; returns the bytes that arrived.

    `places(bucket)` checks a bucket and says where its parts belong; `filled(bucket)` hears when they are there.
    PeerError where a sender is gone or late.
    """
    num_bytes = 0
    under_way: deque[tuple[RoutedBucket, list[Landing], list[Pending]]] = deque()

    def land() -> int:
        bucket, targets, pending = under_way.popleft()
        wait_all(pending, deadline)
        for landing in targets:
            if landing.unpack is not None:
                landing.unpack()
        filled(bucket.bucket)
        return sum(landing.target.numel() for landing in targets)

    for number, bucket in enumerate(routed):
        if len(under_way) == NUM_SLOTS:
            num_bytes += land()
        targets = landings(bucket, places(bucket.bucket), lambda size, n=number: staging.slot(n, size))
        under_way.append((bucket, targets, [group.receive(t.target, t.message.member) for t in targets]))
    while under_way:
        num_bytes += land()
    return num_bytes


# Reports through the group

READY = "ready"
_ACKNOWLEDGE_S = 5.0


def notice_key(group: str, member: int) -> str:
    """Under which an engine rank says that it is about to join, or its leader that it will not."""
    return f"{group}/notice/{member}"


def send_report(group: PeerGroup, leader: int, report: Report, deadline: float) -> None:
    payload = torch.frombuffer(bytearray(report.encode().encode()), dtype=torch.uint8).to(group.device)
    group.send(torch.tensor([payload.numel()], device=group.device), leader).wait(deadline)
    group.send(payload, leader).wait(deadline)


def receive_report(group: PeerGroup, member: int, deadline: float) -> Report:
    """ValueError where what arrives is no report, PeerError where nothing does."""
    size = torch.zeros(1, dtype=torch.int64, device=group.device)
    group.receive(size, member).wait(deadline)
    if not 0 < int(size) <= MAX_REPORT_BYTES:
        raise ValueError(f"member {member} announces a report of {int(size)} bytes")
    payload = torch.zeros(int(size), dtype=torch.uint8, device=group.device)
    group.receive(payload, member).wait(deadline)
    return Report.decode(bytes(payload.tolist()).decode())


def acknowledge(group: PeerGroup, member: int, deadline: float) -> None:
    """Tells an engine rank that its last report has arrived."""
    group.send(torch.zeros(1, dtype=torch.uint8, device=group.device), member).wait(deadline)


def receive_acknowledgement(group: PeerGroup, leader: int, deadline: float) -> None:
    """Waits shortly: connections that are closed too early can lose a report on its way."""
    group.receive(torch.zeros(1, dtype=torch.uint8, device=group.device), leader).wait(min(deadline, time.monotonic() + _ACKNOWLEDGE_S))
