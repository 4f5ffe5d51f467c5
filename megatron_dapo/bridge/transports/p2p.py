"""Transport to engines on other nodes: every trainer rank sends its chunks from its shards to the engine ranks.

One request to an engine starts a receiver in each of its ranks. Receivers and trainer ranks meet in a `PeerGroup` of the
engine, through which bytes and replies travel. All senders send at once, to all engines. Over NCCL all of them launch their
buckets in one order (`LaunchOrder`): an engine that is frozen holds back the others until the deadline, a dead one does not.

    leader    POST receive ------------------------------------------------> (answered at the end)
    senders   join | send 0 | send 1 | ...      | checksums of what was sent
    engine    join | begin  | receive 0, 1, ... | reply | finish: coverage and checksums | reply

Connections within a group are not authenticated, so nothing that arrives over them is trusted by itself: slices, sizes and the
manifest come with the request, which needs the engine's key, and the trainer compares the checksums of all parameters
with those of what it sent. A trainer rank connects to the engine ranks that it sends to, and an engine's leader to
all of them, whose replies it gets. Groups are reused by later syncs, and joined anew after a failure or a restart.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch

from megatron_dapo.bridge.deltas import Delta
from megatron_dapo.bridge.protocol.messages import Command, CommandReply
from megatron_dapo.bridge.protocol.p2p_stream import (
    READY,
    RECEIVE,
    STAGED_BUCKETS,
    LaunchOrder,
    Outgoing,
    P2PChannel,
    Position,
    Staging,
    acknowledge,
    messages_of,
    ready_key,
    receive_reply,
    send_buckets,
    send_segments,
)
from megatron_dapo.bridge.protocol.peer_group import (
    LOOPBACK,
    Address,
    PeerError,
    PeerGroup,
    RendezvousClient,
    RendezvousStore,
    join,
)
from megatron_dapo.bridge.sync_plan import ExpectedChecksums, SyncPlan
from megatron_dapo.bridge.transports.base import (
    LOAD_FORMAT,
    Call,
    EngineHandles,
    ServerControl,
    SyncDeadline,
    SyncRequest,
    TransferResult,
    encode_payload,
    reason_of,
)
from megatron_dapo.parallel.coordination import Coordination
from megatron_dapo.reshard.execution import Buffers

_NUM_REASONS = 4  # reasons of one engine that all ranks receive
_CALL_GRACE_S = 5.0  # The replies are here, but the request's answer may still be missing.


@dataclass(frozen=True)
class P2PSettings:
    """Settings of the groups.

    `host`: of this node, on which other nodes reach its rendezvous store; loopback if all run on one. `backend`: what
    carries the bytes, "gloo" or "nccl". `connect_s`: until all members of a group have met.
    """

    host: str = LOOPBACK
    backend: str = "gloo"
    connect_s: float = 60.0


@dataclass(frozen=True)
class Members:
    """Members of the group of one engine: the trainer ranks that send or lead first, then the engine's ranks."""

    trainers: tuple[int, ...]
    engine_ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.trainers) + len(self.engine_ranks)

    def of_trainer(self, rank: int) -> int:
        return self.trainers.index(rank)

    def of_engine_rank(self, engine_rank: int) -> int:
        return len(self.trainers) + self.engine_ranks.index(engine_rank)


@dataclass(frozen=True)
class _Rendezvous:
    """Name and store of the group of one engine for one sync; `fresh` if it has yet to be joined."""

    name: str
    address: Address
    fresh: bool


@dataclass
class _Share:
    """One rank's share in the sync of one engine; filled in a separate thread.

    It names its sync: a thread that misses the deadline must not take the next sync for its own.
    """

    request: SyncRequest
    deadline: SyncDeadline
    sums: ExpectedChecksums
    order: LaunchOrder
    replies: tuple[CommandReply, ...] = ()  # the leader's
    received: dict[int, int] = field(default_factory=dict)  # engine rank -> bytes by its reply; of the leader
    seconds: dict[str, float] = field(default_factory=dict)
    failure: SyncFailure | None = None


class FailureKind(IntEnum):
    """Kinds of failures of a sync. Of several, the lowest is closest to the cause."""

    CAUSE = 0
    LOST = 1  # a connection broke: what the others see of a failure
    LATE = 2  # no sign until the deadline


class SyncFailure(NamedTuple):
    """Why an engine was not served, as one rank saw it. They sort by how close they are to the cause."""

    follows: bool  # the rank does not lead the engine
    kind: FailureKind
    rank: int
    reason: str


def _kind(error: Exception) -> FailureKind:
    if isinstance(error, TimeoutError):
        return FailureKind.LATE
    return FailureKind.LOST if isinstance(error, PeerError) else FailureKind.CAUSE


class P2PTransport:
    """`Transport` by point-to-point.

    Args:
        coordination: all trainer ranks.
    """

    def __init__(
        self,
        plan: SyncPlan,
        handles: EngineHandles[ServerControl],
        coordination: Coordination,
        settings: P2PSettings | None = None,
    ) -> None:
        self.plan = plan
        self.handles = handles
        self.coordination = coordination
        self.rank = coordination.rank
        self.settings = settings or P2PSettings()
        self.seconds: dict[str, float] = {}  # duration of each phase in this rank's last sync, for its slowest engine
        self.received: dict[int, int] = {}  # bytes an engine rank reported in the last sync; of engines led here
        self._store: RendezvousStore | None = None  # the leaders' store
        self._groups: dict[int, PeerGroup] = {}
        self._joined_by: dict[int, ServerControl] = {}  # engine that this rank leads -> process that joined

    def begin(self, request: SyncRequest, deadline: SyncDeadline) -> None:
        """Agree on every engine's group."""
        self.seconds, self.received = {}, {}
        self._request, self._deadline = request, deadline
        self._shares: dict[int, _Share] = {}
        self._failed: dict[int, list[SyncFailure]] = {}  # engine -> failures, its leader's first
        self._rendezvous = self._arrange(request.engines)

    def send(self, sources: Buffers) -> None:
        """Send to all engines at once. A reused group that turns out to be dead is replaced, and its engine tried again."""
        self._attempt(self._request.engines, self._rendezvous, sources)
        reused = [engine for engine in self._request.engines if not self._rendezvous[engine].fresh]
        # The connections of a kept group may have died between two syncs, which only their use can tell.
        again = tuple(engine for engine in reused if engine in self._failed)
        if again and not self._deadline.is_over:
            self._attempt(again, self._arrange(again), sources)

    def finish(self) -> TransferResult:
        """Collect the shares of this rank, and the failures that any rank saw."""
        result = TransferResult(ExpectedChecksums(self.plan))
        for engine, share in self._shares.items():
            if share.failure is not None:
                continue
            result.expected.merge(share.sums)
            result.peak_bytes = max(result.peak_bytes, self._peak_bytes(engine))
            for phase, seconds in share.seconds.items():
                self.seconds[phase] = max(self.seconds.get(phase, 0.0), seconds)
            if share.replies:
                result.replies[engine] = share.replies
                result.num_bytes[engine] = sum(share.received.values())
                self.received.update(share.received)
        for engine, failures in self._failed.items():
            first = min(failures, key=lambda failure: failure.kind)
            result.fail(engine, f"trainer rank {first.rank}: {first.reason}" if first.follows else first.reason)
        return result

    def close(self) -> None:
        """Leave all groups."""
        for engine in list(self._groups):
            self._drop(engine)
        self._store = None

    def members(self, engine: int) -> Members:
        ranks = tuple(self.plan.ranks_of(engine))
        trainers = {self.handles.leaders[engine], *(source for rank in ranks for source in self.plan.sources(rank))}
        return Members(tuple(sorted(trainers)), ranks)

    def peers(self, engine: int) -> set[int]:
        """Members of an engine's group that this rank exchanges messages with: those it sends to; all engine ranks, if it leads."""
        members, leads = self.members(engine), self.handles.leaders[engine] == self.rank
        return {members.of_engine_rank(r) for r in members.engine_ranks if leads or self.rank in self.plan.sources(r)}

    @cached_property
    def _own_engines(self) -> frozenset[int]:
        """Engines that this rank sends to or leads: the only ones whose buckets it computes."""
        size = self.plan.engines.tensor_parallel
        sends_to = {engine_rank // size for engine_rank in self.plan.destinations(self.rank)}
        return frozenset([*sends_to, *self.handles.led_by(self.rank, range(self.plan.num_engines))])

    def _peak_bytes(self, engine: int) -> int:
        """Bytes that either end may stage."""
        buckets = (bucket for rank in self.plan.ranks_of(engine) for bucket in self.plan.buckets(rank))
        return STAGED_BUCKETS * max((bucket.num_bytes for bucket in buckets), default=0)

    # Groups

    def _attempt(self, engines: Sequence[int], rendezvous: Mapping[int, _Rendezvous], sources: Buffers) -> None:
        """Send to `engines` in one thread each; record this rank's shares and all ranks' failures."""
        mine = [engine for engine in engines if engine in self._own_engines]
        # Connections over gloo are independent; communicators share the queues of this rank's GPU.
        order = LaunchOrder(mine if self.settings.backend == "nccl" else ())
        shares = {engine: self._new_share(order) for engine in mine}
        for engine in mine:
            if rendezvous[engine].fresh:
                self._drop(engine)

        def sync(engine: int) -> PeerGroup:
            try:
                return self._sync_engine(engine, rendezvous[engine], sources, shares[engine])
            finally:
                order.leave(engine)  # If it failed, the others wait for it no longer.

        calls = {engine: Call(partial(sync, engine)) for engine in mine}
        for engine, call in calls.items():
            try:
                # Kept here and not by the thread: one that misses the deadline must not touch the groups of later syncs.
                self._groups[engine] = call.result(self._deadline, f"the weight sync of engine {engine}")
            # An engine can fail with any exception; that must not fail this rank.
            except Exception as error:
                # A new share: the thread of a call that timed out may still write into the old one.
                follows = self.handles.leaders[engine] != self.rank
                failure = SyncFailure(follows, _kind(error), self.rank, reason_of(error))
                shares[engine] = self._new_share(order, failure)
                self._drop(engine)
        for engine in self.handles.led_by(self.rank, mine):
            self._joined_by[engine] = self.handles.controls[engine]
        self._shares.update(shares)
        for engine in engines:
            self._failed.pop(engine, None)
        self._failed.update(self._failed_anywhere(shares))

    def _new_share(self, order: LaunchOrder, failure: SyncFailure | None = None) -> _Share:
        return _Share(self._request, self._deadline, ExpectedChecksums(self.plan), order, failure=failure)

    def _arrange(self, engines: Sequence[int]) -> dict[int, _Rendezvous]:
        """Agree on every engine's group, named by its leader: a new one if any member lacks the old one."""
        own: dict[int, Any] = {}  # engine -> name of the kept group, and its leader's offer of a new one
        for engine in engines:
            leads = self.handles.leaders[engine] == self.rank
            if leads and self._joined_by.get(engine) is not self.handles.controls[engine]:
                self._drop(engine)
            if engine in self._own_engines:
                kept = self._groups[engine].name if engine in self._groups else ""
                own[engine] = [kept, self._offer() if leads else None]
        what = f"weight sync {self._request.sync_id}, the groups"
        found = self.coordination.merge(own, _common_groups, what, self._deadline.left_s)
        rendezvous = {}
        for engine in engines:
            kept, (name, host, port) = found[str(engine)]
            rendezvous[engine] = _Rendezvous(kept or name, Address(host, port), fresh=not kept)
        return rendezvous

    def _offer(self) -> list[Any]:
        if self._store is None:
            self._store = RendezvousStore(self.settings.host)
        return [RendezvousStore.new_name(), self._store.address.host, self._store.address.port]

    def _failed_anywhere(self, shares: Mapping[int, _Share]) -> dict[int, list[SyncFailure]]:
        """Return engine -> the failures of some ranks, its leader's first."""
        known = {engine: [share.failure] for engine, share in shares.items() if share.failure is not None}
        # Ranks whose wait for an engine has just ended at the deadline still have to say so.
        seconds = self._deadline.left_s + _CALL_GRACE_S
        found = self.coordination.merge(
            known, _few_failures, f"weight sync {self._request.sync_id}, the outcome", seconds
        )
        return {int(engine): [SyncFailure(*each) for each in failures] for engine, failures in found.items()}

    # One engine

    def _sync_engine(self, engine: int, rendezvous: _Rendezvous, sources: Buffers, share: _Share) -> PeerGroup:
        """Sync one engine, in a thread; return the group for the next sync. A failure closes the group."""
        start, deadline = time.perf_counter(), share.deadline
        members = self.members(engine)
        posted = self._post(engine, rendezvous, share) if self.handles.leaders[engine] == self.rank else None
        group = self._join(engine, rendezvous, deadline) if rendezvous.fresh else self._groups[engine]
        share.seconds["join"] = time.perf_counter() - start
        try:
            # Watched from the start: a failure of an engine rank must end the sending.
            received = self._watch(engine, group, RECEIVE, share) if posted else []
            self._send(engine, group, sources, received, share)
            for engine_rank, reply in zip(members.engine_ranks, _collect(received, deadline)):
                share.received[engine_rank] = reply.num_bytes
            share.seconds["transfer"] = time.perf_counter() - start
            finished = self._watch(engine, group, "finish", share) if posted else []
            share.replies = _collect(finished, deadline)
            if posted is not None:
                posted.result(deadline, f"an answer of engine {engine}")
            share.seconds["all"] = time.perf_counter() - start
        except BaseException:
            # Members that wait for this rank fail at once.
            group.close()
            raise
        return group

    def _send(
        self, engine: int, group: PeerGroup, sources: Buffers, received: Sequence[Call[CommandReply]], share: _Share
    ) -> None:
        device = next(iter(sources.values())).device if sources else group.device
        staging = Staging(device, self._peak_bytes(engine))
        try:
            with torch.no_grad():
                if share.request.delta is not None:
                    segments = self._segments(engine, share.request.delta, share.sums)
                    send_segments(group, segments, share.order, share.deadline.at)
                else:
                    outgoing = _counted(self._outgoing(engine, self.members(engine), sources), share.sums)
                    send_buckets(group, outgoing, staging, share.order, share.deadline.at)
                share.order.leave(engine)
        except PeerError:
            # An engine rank that failed has said why: raise that instead.
            _collect(received, SyncDeadline(_CALL_GRACE_S))
            raise

    def _join(self, engine: int, rendezvous: _Rendezvous, deadline: SyncDeadline) -> PeerGroup:
        """Join a new group, once the engine's ranks have said that they come."""
        members, seconds = self.members(engine), min(self.settings.connect_s, deadline.left_s)
        end = time.monotonic() + seconds
        store = RendezvousClient(rendezvous.address, seconds)
        for engine_rank in members.engine_ranks:
            said = store.get(ready_key(rendezvous.name, members.of_engine_rank(engine_rank)), end - time.monotonic())
            if said != READY:
                raise PeerError(said)
        return join(
            rendezvous.address,
            rendezvous.name,
            members.of_trainer(self.rank),
            members.size,
            timeout_s=end - time.monotonic(),
            backend=self.settings.backend,
            peers=self.peers(engine),
        )

    def _drop(self, engine: int) -> None:
        group = self._groups.pop(engine, None)
        if group is not None:
            group.close()

    def _outgoing(self, engine: int, members: Members, sources: Buffers) -> Iterator[Outgoing]:
        """Yield what this rank sends, bucket after bucket over the engine's ranks."""
        for index in range(self.plan.num_buckets(engine)):
            for engine_rank in members.engine_ranks:
                buckets = self.plan.buckets(engine_rank)
                writes = self.plan.writes(buckets[index], self.rank) if index < len(buckets) else ()
                if not writes:
                    continue
                specs = self.plan.engines.local_specs(engine_rank)
                dtypes = {write.chunk.name: specs[write.chunk.name].dtype for write in writes}
                sizes = {name: dtype.itemsize for name, dtype in dtypes.items()}
                to = members.of_engine_rank(engine_rank)
                values = {write.chunk: write.view(sources) for write in writes}
                yield Outgoing(
                    (index, engine, engine_rank),
                    messages_of(to, [write.chunk for write in writes], sizes),
                    values,
                    dtypes,
                )

    def _segments(
        self, engine: int, delta: Delta, sums: ExpectedChecksums
    ) -> Iterator[tuple[Position, int, torch.Tensor]]:
        """Yield what this rank sends of a delta, bucket after bucket over the engine's ranks, and count it."""
        members = self.members(engine)
        for index in range(delta.plan.num_buckets(engine)):
            for engine_rank in members.engine_ranks:
                for bucket in delta.plan.buckets(engine_rank)[index:][:1]:
                    if self.rank in bucket.segments:
                        position = (index, engine, engine_rank)
                        yield position, members.of_engine_rank(engine_rank), delta.segment(bucket)
                        delta.count(bucket, (engine_rank,), sums)

    # The leader

    def _post(self, engine: int, rendezvous: _Rendezvous, share: _Share) -> Call[None]:
        """Start the request. If it fails, members that wait for the engine's ranks hear of it at once."""
        members, control = self.members(engine), self.handles.controls[engine]
        payloads = [encode_payload(self._command(rank, members, rendezvous, share)) for rank in members.engine_ranks]

        def post() -> None:
            try:
                control.update_weights_from_tensor(payloads, LOAD_FORMAT)
            except Exception as error:
                # They wait for the engine ranks to join; in a kept group they see the broken connection.
                if rendezvous.fresh:
                    store = RendezvousClient(rendezvous.address, self.settings.connect_s)
                    for engine_rank in members.engine_ranks:
                        key = ready_key(rendezvous.name, members.of_engine_rank(engine_rank))
                        store.put(key, f"engine {engine}: {reason_of(error)}")
                raise

        return Call(post)

    def _command(self, engine_rank: int, members: Members, rendezvous: _Rendezvous, share: _Share) -> Command:
        request = share.request
        leader = self.handles.leaders[engine_rank // self.plan.engines.tensor_parallel]
        channel = P2PChannel(
            address=rendezvous.address,
            group=rendezvous.name,
            fresh=rendezvous.fresh,
            trainers=members.trainers,
            member=members.of_engine_rank(engine_rank),
            size=members.size,
            leader=members.of_trainer(leader),
            backend=self.settings.backend,
            connect_s=self.settings.connect_s,
            seconds=share.deadline.left_s,
            buckets=request.plan(self.plan).buckets(engine_rank),
        )
        manifest = request.manifest(self.plan, engine_rank)
        return Command(
            f"{request.sync_id}/{engine_rank}", RECEIVE, request.sync_id, manifest, channel=channel.to_json()
        )

    def _watch(self, engine: int, group: PeerGroup, op: str, share: _Share) -> list[Call[CommandReply]]:
        """Wait in threads for each engine rank's reply to one step.

        A rank that failed, or whose connection is lost, closes the group: the other engine ranks would wait for senders.
        """
        members, deadline, sync_id = self.members(engine), share.deadline, share.request.sync_id

        def hear(number: int, engine_rank: int) -> CommandReply:
            member = members.of_engine_rank(engine_rank)
            reply = receive_reply(group, member, deadline.at)
            if not reply.ok or op == "finish":
                acknowledge(group, member, deadline.at)
            if not reply.ok:
                error = PeerError if reply.is_lost else ValueError
                raise error(f"rank {number} of the engine, {reply.op}: {reply.message or 'failed'}")
            if (reply.id, reply.op) != (f"{sync_id}/{engine_rank}", op):
                raise ValueError(f"rank {number} of the engine replies to {reply.op} {reply.id!r}, expected {op}")
            return reply

        def watch(number: int, engine_rank: int) -> CommandReply:
            try:
                return hear(number, engine_rank)
            except BaseException:
                group.close()
                raise

        return [Call(partial(watch, n, r)) for n, r in enumerate(members.engine_ranks)]


def _counted(buckets: Iterable[Outgoing], sums: ExpectedChecksums) -> Iterator[Outgoing]:
    """Yield the buckets and count each once its messages are under way: the next one is asked for then."""
    for outgoing in buckets:
        yield outgoing
        # The sums are of the shards, not of what is staged: an error on the way must differ from the engine's own checksum.
        values = {chunk: each.to(outgoing.dtypes[chunk.name]) for chunk, each in outgoing.values.items()}
        sums.add(outgoing.position[2:], values)


def _common_groups(views: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Combine engine -> (name of the kept group, offer of a new one) of some ranks; no name if any of them lacks it.

    A member that left after a failure, or an engine that was restarted, makes all of them join anew.
    """
    found: dict[str, Any] = {}
    for view in views:
        for engine, (kept, offer) in view.items():
            other, first = found.get(engine, (kept, offer))
            found[engine] = [kept if kept == other else "", first or offer]
    return found


def _few_failures(views: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Combine engine -> failures of some ranks."""
    failures: dict[str, list] = {}
    for view in views:
        for engine, more in view.items():
            failures.setdefault(engine, []).extend(more)
    return {engine: sorted(entries, key=tuple)[:_NUM_REASONS] for engine, entries in failures.items()}


def _collect(calls: Sequence[Call[CommandReply]], deadline: SyncDeadline) -> tuple[CommandReply, ...]:
    """Return the replies in rank order. Raise the error that is closest to the cause."""
    replies: list[CommandReply] = []
    errors: list[Exception] = []
    for call in calls:
        try:
            replies.append(call.result(deadline, "a reply of the engine"))
        # Sorted below, once all have ended.
        except Exception as error:
            errors.append(error)
    if errors:
        raise min(errors, key=_kind)
    return tuple(replies)
