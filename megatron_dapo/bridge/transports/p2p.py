"""Engines on machines of their own: every trainer rank sends its chunks straight from its shards to the engine ranks.

One request to an engine and delivery starts a loader in each of its ranks; loader and trainer ranks meet in a
`PeerGroup` of the engine, through which bytes and reports travel. All senders send at once, two buckets under way.

    leader    POST receive ------------------------------------------------> (answered at the end)
    senders   join | send 0 | send 1 | ...      | checksums of what was sent
    engine    join | begin  | receive 0, 1, ... | report | finish: ledger and checksums | report

What arrives over the group's own connections, which know no key, is worth nothing by itself: places, sizes and the
manifest come with the request, which needs the engine's key, and the trainer compares the checksums of all parameters
with those of what it sent. Groups are used again by later deliveries, and joined anew after a failure or a restart.

Runs with gloo on CPUs. The "nccl" form for CUDA is written and has not run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_dapo.bridge.protocol.p2p_stream import (
    READY,
    RECEIVE,
    STAGED_BUCKETS,
    Outgoing,
    P2PChannel,
    RoutedBucket,
    Staging,
    acknowledge,
    messages_of,
    ready_key,
    receive_report,
    send_buckets,
)
from megatron_dapo.bridge.protocol.peer_group import (
    BACKENDS,
    LOOPBACK,
    Address,
    PeerError,
    PeerGroup,
    RendezvousClient,
    RendezvousStore,
    join,
)
from megatron_dapo.bridge.protocol.receiver import Command, Reply
from megatron_dapo.bridge.sync_plan import ExpectedChecksums, PlannedBucket, SyncPlan
from megatron_dapo.bridge.transports.base import (
    LOAD_FORMAT,
    Call,
    Coordinator,
    EngineControl,
    EngineHandles,
    SyncDeadline,
    SyncRequest,
    TransferResult,
    encode_payload,
    reason_of,
)
from megatron_dapo.reshard.execution import Buffers
from megatron_dapo.reshard.layout import shard_view

_TOO_LONG = "took longer than"  # says `Call.result` at its deadline
_CALL_GRACE_S = 5.0  # for the answer to a request once the reports are here


@dataclass(frozen=True)
class P2PSettings:
    """`host`: of this machine, where other machines reach its meeting place; loopback where all run on one.
    `backend`: "gloo" or "nccl". `connect_s`: until all members of a group have met."""

    host: str = LOOPBACK
    backend: str = "gloo"
    connect_s: float = 60.0

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(f"peer transport: backend {self.backend!r} is not one of {', '.join(BACKENDS)}")


@dataclass(frozen=True)
class Members:
    """Who is who in the group of one engine: the trainer ranks that send or lead first, then the engine's ranks."""

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
class _Meeting:
    """How the group of one engine is to be had for one delivery."""

    name: str
    address: Address
    fresh: bool


@dataclass
class _Share:
    """What one rank did for one engine; filled in a thread of its own."""

    sums: ExpectedChecksums
    reports: tuple[Reply, ...] = ()  # of the leader
    received: dict[int, int] = field(default_factory=dict)  # engine rank -> bytes by its report; of the leader
    seconds: dict[str, float] = field(default_factory=dict)
    failure: str = ""


class P2PTransport:
    """`Transport` by point-to-point.

    Args:
        coordinator: all trainer ranks.
    """

    def __init__(
        self, plan: SyncPlan, handles: EngineHandles, coordinator: Coordinator, settings: P2PSettings | None = None
    ) -> None:
        self.plan = plan
        self.handles = handles
        self.coordinator = coordinator
        self.rank = coordinator.rank
        self.settings = settings or P2PSettings()
        self.seconds: dict[str, float] = {}  # of the last delivery on this rank, by phase; the slowest engine's
        self.received: dict[int, int] = {}  # bytes an engine rank reports of the last delivery; of engines led here
        self._place: RendezvousStore | None = None  # of leaders
        self._groups: dict[int, PeerGroup] = {}
        self._joined_by: dict[int, EngineControl] = {}  # engines this rank leads: whose group it is

    def deliver(self, order: SyncRequest, sources: Buffers, deadline: SyncDeadline) -> TransferResult:
        """A group of an earlier delivery that turns out to be dead is replaced, and its engine tried again, once."""
        self.seconds, self.received = {}, {}
        shares, reused = self._attempt(order, order.engines, sources, deadline)
        failed = self._failed_anywhere(order, shares, deadline)
        again = tuple(engine for engine in reused if engine in failed)
        if again and not deadline.is_over:
            shares.update(self._attempt(order, again, sources, deadline)[0])
            second = self._failed_anywhere(
                order, {engine: shares[engine] for engine in again if engine in shares}, deadline
            )
            failed = {e: reasons for e, reasons in failed.items() if e not in again}
            failed.update(second)
        outcome = self._outcome(shares)
        outcome.failures.update((engine, _first_cause(reasons)) for engine, reasons in failed.items())
        return outcome

    def close(self) -> None:
        for engine in list(self._groups):
            self._drop(engine)
        self._place = None

    def members(self, engine: int) -> Members:
        ranks = tuple(self.plan.ranks_of(engine))
        trainers = {self.handles.leaders[engine], *(source for rank in ranks for source in self.plan.sources(rank))}
        return Members(tuple(sorted(trainers)), ranks)

    def _peak_bytes(self, engine: int) -> int:
        """What either end may take for staging: less, where parts are contiguous."""
        buckets = (bucket for rank in self.plan.ranks_of(engine) for bucket in self.plan.buckets(rank))
        return STAGED_BUCKETS * max((bucket.num_bytes for bucket in buckets), default=0)

    # Who meets whom

    def _attempt(
        self, order: SyncRequest, engines: Sequence[int], sources: Buffers, deadline: SyncDeadline
    ) -> tuple[dict[int, _Share], tuple[int, ...]]:
        """Delivers to `engines`; returns this rank's shares, and the engines for which a group was used again."""
        meetings = self._arrange(order, engines, deadline)
        mine = [engine for engine in engines if self.rank in self.members(engine).trainers]
        shares = {engine: _Share(ExpectedChecksums(self.plan)) for engine in mine}
        for engine in mine:
            if meetings[engine].fresh:
                self._drop(engine)
        calls = {
            e: Call(lambda e=e: self._deliver_one(order, e, meetings[e], sources, deadline, shares[e])) for e in mine
        }
        for engine, call in calls.items():
            try:
                # Kept here and not by the call: one that is given up must not touch the groups of later deliveries.
                self._groups[engine] = call.result(deadline, f"the delivery to engine {engine}")
            # Whatever an engine's death looks like, it is the engine's failure and not this rank's.
            except Exception as error:
                # A new one: the thread of a call that was given up may still write into the old one.
                shares[engine] = _Share(ExpectedChecksums(self.plan), failure=reason_of(error))
                self._drop(engine)
        for engine in self.handles.led_by(self.rank, mine):
            self._joined_by[engine] = self.handles.controls[engine]
        return shares, tuple(engine for engine in engines if not meetings[engine].fresh)

    def _outcome(self, shares: Mapping[int, _Share]) -> TransferResult:
        outcome = TransferResult(ExpectedChecksums(self.plan))
        for engine, share in shares.items():
            if share.failure:
                outcome.fail(engine, share.failure)
                continue
            outcome.expected.merge(share.sums)
            outcome.peak_bytes = max(outcome.peak_bytes, self._peak_bytes(engine))
            for phase, seconds in share.seconds.items():
                self.seconds[phase] = max(self.seconds.get(phase, 0.0), seconds)
            if share.reports:
                outcome.reports[engine] = share.reports
                outcome.num_bytes[engine] = sum(share.received.values())
                self.received.update(share.received)
        return outcome

    def _arrange(self, order: SyncRequest, engines: Sequence[int], deadline: SyncDeadline) -> dict[int, _Meeting]:
        """Every engine's group, named by its leader: a new one where any member lacks the old one."""
        own: dict[str, Any] = {"groups": {}, "offers": {}}
        for engine in engines:
            led = self.handles.leaders[engine] == self.rank
            if led and self._joined_by.get(engine) is not self.handles.controls[engine]:
                self._drop(engine)
            if self.rank in self.members(engine).trainers:
                own["groups"][str(engine)] = self._groups[engine].name if engine in self._groups else ""
            if led:
                own["offers"][str(engine)] = self._offer()
        everyone = self.coordinator.exchange(own, f"delivery {order.delivery}, the groups", deadline.left_s)
        meetings = {}
        for engine in engines:
            names = {view["groups"][str(engine)] for view in everyone if str(engine) in view["groups"]}
            name, host, port = everyone[self.handles.leaders[engine]]["offers"][str(engine)]
            fresh = len(names) > 1 or "" in names
            meetings[engine] = _Meeting(name if fresh else names.pop(), Address(host, port), fresh)
        return meetings

    def _offer(self) -> list[Any]:
        if self._place is None:
            self._place = RendezvousStore(self.settings.host)
        return [RendezvousStore.new_name(), self._place.address.host, self._place.address.port]

    def _failed_anywhere(
        self, order: SyncRequest, shares: Mapping[int, _Share], deadline: SyncDeadline
    ) -> dict[int, list[str]]:
        """engine -> what each rank for which it failed says of it, its leader first."""
        known = {str(engine): share.failure for engine, share in shares.items() if share.failure}
        # Ranks whose wait for an engine has just ended at the deadline still have to say so.
        seconds = deadline.left_s + _CALL_GRACE_S
        everyone = self.coordinator.exchange(known, f"delivery {order.delivery}, the outcome", seconds)
        reasons: dict[int, list[str]] = {}
        for rank, view in enumerate(everyone):
            for engine, reason in ((int(engine), reason) for engine, reason in view.items()):
                if rank == self.handles.leaders[engine]:
                    reasons.setdefault(engine, []).insert(0, reason)
                else:
                    reasons.setdefault(engine, []).append(f"trainer rank {rank}: {reason}")
        return reasons

    # One engine

    def _deliver_one(
        self,
        order: SyncRequest,
        engine: int,
        meeting: _Meeting,
        sources: Buffers,
        deadline: SyncDeadline,
        share: _Share,
    ) -> PeerGroup:
        """This rank's part in the delivery to one engine; returns the group, which the next one can use. Raises what went
        wrong, and the group is closed."""
        start = time.perf_counter()
        members = self.members(engine)
        posted = self._post(order, engine, meeting, deadline) if self.handles.leaders[engine] == self.rank else None
        group = self._join(members, meeting, deadline) if meeting.fresh else self._groups[engine]
        share.seconds["join"] = time.perf_counter() - start
        try:
            # From the start: a failure of an engine rank must end the sending.
            received = self._watch(order, engine, group, RECEIVE, deadline) if posted else []
            self._send(engine, group, sources, deadline, received)
            for engine_rank, report in zip(members.engine_ranks, _collect(received, deadline)):
                share.received[engine_rank] = report.num_bytes
            share.seconds["transfer"] = time.perf_counter() - start
            finished = self._watch(order, engine, group, "finish", deadline) if posted else []
            for engine_rank in members.engine_ranks:
                share.sums.add_plan(engine_rank, self.rank, sources)
            share.reports = _collect(finished, deadline)
            if posted is not None:
                posted.result(deadline, f"an answer of engine {engine}")
            share.seconds["all"] = time.perf_counter() - start
        except BaseException:
            # Nobody is to wait for this rank.
            group.close()
            raise
        return group

    def _send(
        self, engine: int, group: PeerGroup, sources: Buffers, deadline: SyncDeadline, received: Sequence[Call[Reply]]
    ) -> None:
        device = next(iter(sources.values())).device if sources else group.device
        staging = Staging(device, self._peak_bytes(engine))
        try:
            with torch.no_grad():
                send_buckets(group, self._outgoing(engine, self.members(engine), sources), staging, deadline.at)
        except PeerError:
            # An engine rank that failed has said why.
            _collect(received, SyncDeadline(_CALL_GRACE_S))
            raise

    def _join(self, members: Members, meeting: _Meeting, deadline: SyncDeadline) -> PeerGroup:
        """A new group, once the engine's ranks have said that they come."""
        seconds = min(self.settings.connect_s, deadline.left_s)
        end = time.monotonic() + seconds
        store = RendezvousClient(meeting.address, seconds)
        for engine_rank in members.engine_ranks:
            said = store.get(ready_key(meeting.name, members.of_engine_rank(engine_rank)), end - time.monotonic())
            if said != READY:
                raise PeerError(said)
        return join(
            meeting.address,
            meeting.name,
            members.of_trainer(self.rank),
            members.size,
            timeout_s=end - time.monotonic(),
            backend=self.settings.backend,
        )

    def _drop(self, engine: int) -> None:
        group = self._groups.pop(engine, None)
        if group is not None:
            group.close()

    def _outgoing(self, engine: int, members: Members, sources: Buffers) -> Iterator[Outgoing]:
        """What this rank sends, round after round over the engine's ranks."""
        for index in range(self.plan.num_buckets(engine)):
            for engine_rank in members.engine_ranks:
                buckets = self.plan.buckets(engine_rank)
                writes = buckets[index].writes_of(self.rank) if index < len(buckets) else ()
                if not writes:
                    continue
                specs = self.plan.engines.local_specs(engine_rank)
                dtypes = {write.chunk.name: specs[write.chunk.name].dtype for write in writes}
                views = {w.chunk: shard_view(sources[w.shard.local], w.shard, w.bounds) for w in writes}
                sizes = {name: dtype.itemsize for name, dtype in dtypes.items()}
                to = members.of_engine_rank(engine_rank)
                yield Outgoing(to, messages_of(to, [w.chunk for w in writes], sizes), views.__getitem__, dtypes)

    # The leader

    def _post(self, order: SyncRequest, engine: int, meeting: _Meeting, deadline: SyncDeadline) -> Call[None]:
        """Starts the request. Where it fails, members that wait for the engine's ranks hear of it at once."""
        members, control = self.members(engine), self.handles.controls[engine]
        payloads = [
            encode_payload(self._command(order, rank, members, meeting, deadline)) for rank in members.engine_ranks
        ]

        def post() -> None:
            try:
                control.update_weights_from_tensor(payloads, LOAD_FORMAT)
            except Exception as error:
                if meeting.fresh:
                    store = RendezvousClient(meeting.address, self.settings.connect_s)
                    for engine_rank in members.engine_ranks:
                        key = ready_key(meeting.name, members.of_engine_rank(engine_rank))
                        store.put(key, f"engine {engine}: {reason_of(error)}")
                raise

        return Call(post)

    def _command(
        self, order: SyncRequest, engine_rank: int, members: Members, meeting: _Meeting, deadline: SyncDeadline
    ) -> Command:
        leader = self.handles.leaders[engine_rank // self.plan.engines.tensor_parallel]
        channel = P2PChannel(
            address=meeting.address,
            group=meeting.name,
            fresh=meeting.fresh,
            member=members.of_engine_rank(engine_rank),
            size=members.size,
            leader=members.of_trainer(leader),
            backend=self.settings.backend,
            connect_s=self.settings.connect_s,
            seconds=deadline.left_s,
            buckets=tuple(_routed(bucket, members) for bucket in self.plan.buckets(engine_rank)),
        )
        return Command(
            id=f"{order.delivery}/{engine_rank}",
            op=RECEIVE,
            delivery=order.delivery,
            manifest=self.plan.manifest(engine_rank, order.delivery, order.session, order.version, order.number),
            channel=channel.to_json(),
        )

    def _watch(
        self, order: SyncRequest, engine: int, group: PeerGroup, op: str, deadline: SyncDeadline
    ) -> list[Call[Reply]]:
        """Waits in threads for each engine rank's report on one step. One that failed, or whose connection is lost, closes the
        group, so that nobody goes on: the other engine ranks would wait for senders who do."""
        members = self.members(engine)

        def hear(number: int, engine_rank: int) -> Reply:
            member = members.of_engine_rank(engine_rank)
            report = receive_report(group, member, deadline.at)
            if not report.ok or op == "finish":
                acknowledge(group, member, deadline.at)
            if not report.ok:
                raise ValueError(f"rank {number} of the engine, {report.op}: {report.message or 'failed'}")
            if (report.id, report.op) != (f"{order.delivery}/{engine_rank}", op):
                raise ValueError(f"rank {number} of the engine reports on {report.op} {report.id!r}, expected {op}")
            return report

        def watch(number: int, engine_rank: int) -> Reply:
            try:
                return hear(number, engine_rank)
            except BaseException:
                group.close()
                raise

        return [Call(lambda n=n, r=r: watch(n, r)) for n, r in enumerate(members.engine_ranks)]


def _first_cause(reasons: Sequence[str]) -> str:
    """Whoever fails closes its connections, which others see as a PeerError, or wait in vain: the cause is neither."""
    return min(reasons, key=lambda reason: (_TOO_LONG in reason, PeerError.__name__ in reason))


def _collect(calls: Sequence[Call[Reply]], deadline: SyncDeadline) -> tuple[Reply, ...]:
    """The reports in rank order. Raises the reason an engine rank gave, where one did; else the first error."""
    reports: list[Reply] = []
    errors: list[Exception] = []
    for call in calls:
        try:
            reports.append(call.result(deadline, "a report of the engine"))
        # Sorted out below.
        except Exception as error:
            errors.append(error)
    if errors:
        raise next((error for error in errors if isinstance(error, ValueError)), errors[0])
    return tuple(reports)


def _routed(bucket: PlannedBucket, members: Members) -> RoutedBucket:
    segments = {
        members.of_trainer(source): (segment.start, segment.stop) for source, segment in bucket.segments.items()
    }
    return RoutedBucket(bucket.header, segments)


__all__ = ["Members", "P2PSettings", "P2PTransport"]
