"""Engines on the trainer's machines: every trainer rank writes its chunks straight into memory the engine ranks read.

Each engine rank has an arena with two bucket slots. Bucket k lies in slot k % 2: trainer ranks write it there as soon as
bucket k - 2 is loaded, the engine loads it as soon as all have written. Counters in the arena say how far each is
(`bridge.protocol.progress`), so that nobody waits for a message between two buckets: the leader of an engine posts all
commands of a delivery in one, ahead of the bytes, and watches the counters.

    ranks    write 0 | write 1 | write 2 | ...
    engine   begin   | load 0  | load 1  | ...   -> finish (ledger and checksums)

A delivery through new memory begins with a message of its own: an engine that cannot follow says so at once. What the
memory is, and how long it is kept: `machine_memory`. Parts whose source lives on another machine: `forwarding`.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from megatron_dapo.bridge.protocol.arena import Arena, is_running
from megatron_dapo.bridge.protocol.peer_group import PeerGroup
from megatron_dapo.bridge.protocol.progress import GIVEN_UP, LEFT, MAX_WRITERS, NUM_SLOTS
from megatron_dapo.bridge.protocol.receiver import Command, Reply
from megatron_dapo.bridge.sync_plan import ExpectedChecksums, PlannedBucket, SyncPlan, write_chunks
from megatron_dapo.bridge.transports.base import (
    LOAD_FORMAT,
    Call,
    CoordinationError,
    Coordinator,
    EngineControl,
    EngineFailure,
    EngineHandles,
    SyncDeadline,
    SyncRequest,
    TransferResult,
    check_report,
    encode_payload,
    reason_of,
)
from megatron_dapo.bridge.transports.engine_nodes import EngineNodes
from megatron_dapo.bridge.transports.forwarding import Forwarding, Incoming, arrivals
from megatron_dapo.bridge.transports.node_memory import Memory, NodeMemory
from megatron_dapo.parallel.nodes import NodeTopology
from megatron_dapo.reshard.execution import Buffers


def default_folder() -> Path:
    """A file system in memory where there is one."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() else Path(tempfile.gettempdir())


_LOOK_AROUND_S = 1.0  # between two looks whether all trainer processes of the machine are alive


@dataclass
class _Answers:
    """What an engine reported on all messages of a delivery."""

    num_bytes: int = 0
    last: tuple[Reply, ...] = ()


@dataclass
class _Round:
    """State of one delivery on one rank."""

    order: SyncRequest
    deadline: SyncDeadline
    outcome: TransferResult
    engines: tuple[int, ...]  # of this machine, still alive
    memory: Memory = field(default_factory=Memory)
    messengers: dict[int, Call[_Answers]] = field(default_factory=dict)  # of engines this rank leads


class SharedMemoryTransport:
    """`Transport` through shared memory.

    Args:
        nodes: which ranks share a machine. An engine lives on the machine of its leader.
        node_group: the ranks of this machine, in rank order.
        peers: all trainer ranks, where there are several machines.
        folder: where arenas lie; a file system in memory.
        message_timeout_s: an engine that neither loads a bucket nor answers within it leaves the delivery; the others
            go on.
        grace_s: how long ranks wait for each other beyond the deadline of a delivery.
        device: where this rank's slots lie: the CPU, or its GPU.
    """

    def __init__(
        self,
        plan: SyncPlan,
        handles: EngineHandles,
        rank: int,
        nodes: NodeTopology,
        node_group: Coordinator,
        *,
        peers: PeerGroup | None = None,
        folder: Path | None = None,
        message_timeout_s: float = 60.0,
        grace_s: float = 5.0,
        device: torch.device | None = None,
    ) -> None:
        if nodes.num_nodes > 1 and peers is None:
            raise ValueError(f"colocated transport: {nodes.num_nodes} machines need the group of all ranks as `peers`")
        if node_group.size > MAX_WRITERS:
            raise ValueError(f"colocated transport: {node_group.size} ranks on a machine, at most {MAX_WRITERS}")
        self.plan = plan
        self.handles = handles
        self.rank = rank
        self.node_group = node_group
        self.message_timeout_s = message_timeout_s
        self.grace_s = grace_s
        self._places = EngineNodes(plan, handles, nodes, rank)
        self._forwarding = Forwarding(self._places, peers)
        self._memory = NodeMemory(self._places, node_group, folder or default_folder(), device or torch.device("cpu"))

    def deliver(self, order: SyncRequest, sources: Buffers, deadline: SyncDeadline) -> TransferResult:
        mine = self._places.engines_here(order)
        state = _Round(order, deadline, TransferResult(ExpectedChecksums(self.plan)), mine)
        self._forwarding.begin()
        try:
            self._open(state)
            if state.memory.is_new:
                # Behind it all ranks have mapped the arenas: once the engines have too, nothing of them can stay behind.
                self._agree(state, "the memory")
            for engine in self._led(state):
                state.messengers[engine] = Call(lambda e=engine: self._converse(state, e))
            for index in range(self._num_rounds(order)):
                self._round(state, index, sources)
            self._join(state)
            self._share_reasons(state)
            self._forwarding.wait(deadline)
        except BaseException:
            self._stop(state, order.engines)
            self.close()
            raise
        finally:
            state.memory.unlink(list(state.memory.linked))
        self._memory.forget(set(mine) - set(state.engines))
        return state.outcome

    def close(self) -> None:
        """Give up the memory that was kept for the next delivery."""
        self._memory.close()

    def _open(self, state: _Round) -> None:
        """Engines without memory take no chunk."""
        self._memory.open(state.order, state.memory, state.deadline.left_s + self.grace_s)
        for engine, reason in state.memory.failures.items():
            state.outcome.fail(engine, reason)
        state.engines = tuple(engine for engine in state.engines if engine not in state.outcome.failures)
        state.outcome.peak_bytes = max(state.outcome.peak_bytes, state.memory.peak_bytes)

    # Rounds

    def _round(self, state: _Round, index: int, sources: Buffers) -> None:
        """Writes this rank's share of bucket `index` of every engine rank, and what came for it from other machines."""
        incoming = self._forwarding.receive(state.order, index)
        try:
            self._forwarding.send(state.order, index, sources, state.outcome.expected, state.deadline)
            for bucket in self._places.buckets(state.engines, index):
                if self._write(state, bucket, sources, incoming):
                    self._announce(state, bucket)
            for _, pending in incoming.values():
                pending.wait(state.deadline.at)
        except CoordinationError:
            raise
        # This rank cannot do its share: no engine may serve what it got, and nobody must wait for this rank.
        except Exception as error:
            for engine in state.order.engines:
                self._leave(state, engine, f"trainer rank {self.rank}: {reason_of(error)}")

    def _write(self, state: _Round, bucket: PlannedBucket, sources: Buffers, incoming: Incoming) -> bool:
        """Whether this rank's share of a bucket is in its slot; not where the engine has left the delivery."""
        coming = arrivals(bucket, incoming)
        if self.rank not in bucket.segments and not coming:
            return True
        if self._places.engine_of(bucket) not in state.engines or not self._has_slot(state, bucket):
            return False
        slot = state.memory.slots[bucket.engine_rank][bucket.index % NUM_SLOTS]
        specs = self.plan.engines.local_specs(bucket.engine_rank)
        write_chunks(bucket, self.rank, sources, slot, specs, state.outcome.expected)
        for key in coming:
            data, pending = incoming.pop(key)
            pending.wait(state.deadline.at)
            segment = bucket.segments[key[1]]
            slot[segment.start : segment.stop].copy_(data)
        for device in {self._memory.device, slot.device}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # the engine reads without regard to our streams
        return True

    def _has_slot(self, state: _Round, bucket: PlannedBucket) -> bool:
        """Waits for the slot of a bucket. An engine that does not give it free leaves the delivery."""
        progress = state.memory.arenas[bucket.engine_rank].progress
        try:
            if self._patiently(state, lambda s: progress.wait_for_slot(bucket.index, s), self.message_timeout_s):
                return True
            reason = f"it did not load bucket {bucket.index - NUM_SLOTS} in time"
        except ValueError as error:
            reason = str(error)
        self._leave(state, self._places.engine_of(bucket), reason)
        return False

    def _patiently(self, state: _Round, wait: Callable[[float], bool], seconds: float) -> bool:
        """Whether `wait(seconds)` comes true, in shards; CoordinationError as soon as a trainer process of the machine is
        found dead."""
        end = SyncDeadline(min(seconds, state.deadline.left_s))
        while not wait(min(_LOOK_AROUND_S, end.left_s)):
            gone = [pid for pid in state.memory.pids if not is_running(pid)]
            if gone:
                what = f"delivery {state.order.delivery}: rank {self.node_group.rank} of {self.node_group.size}"
                raise CoordinationError(f"{what} found the trainer's process {gone[0]} gone")
            if end.is_over:
                return False
        return True

    def _announce(self, state: _Round, bucket: PlannedBucket) -> None:
        """This rank's share of a bucket is in its slot."""
        state.memory.arenas[bucket.engine_rank].progress.count_written(self.node_group.rank, bucket.index + 1)

    def _agree(self, state: _Round, what: str) -> None:
        """Engines that failed for any rank of the machine leave the delivery."""
        engines = self._places.engines_here(state.order)
        if not engines:
            return
        flags = torch.tensor([engine in state.outcome.failures for engine in engines], dtype=torch.int64)
        what = f"delivery {state.order.delivery}, {what}"
        failed = self.node_group.sum(flags, what, state.deadline.left_s + self.grace_s)
        lost = {engine for engine, count in zip(engines, failed.tolist()) if count}
        state.engines = tuple(engine for engine in state.engines if engine not in lost)

    def _share_reasons(self, state: _Round) -> None:
        """Ends the delivery: an engine that left it for any rank of the machine left it for all, with the first cause."""
        if not self._places.engines_here(state.order):
            return
        own = {str(engine): reason for engine, reason in state.outcome.failures.items()}
        what = f"delivery {state.order.delivery}, the end"
        everyone = self.node_group.exchange(own, what, state.deadline.left_s + self.grace_s)
        for engine in self._places.engines_here(state.order):
            reasons = [view[str(engine)] for view in everyone if str(engine) in view]
            if reasons:
                state.engines = tuple(other for other in state.engines if other != engine)
                causes = [reason for reason in reasons if not reason.endswith((LEFT, GIVEN_UP))]
                state.outcome.failures[engine] = (causes or reasons)[0]

    def _leave(self, state: _Round, engine: int, reason: str) -> None:
        """The engine takes no further part."""
        state.outcome.fail(engine, reason)
        state.engines = tuple(other for other in state.engines if other != engine)
        self._stop(state, (engine,))

    def _stop(self, state: _Round, engines: Iterable[int]) -> None:
        """Nobody waits any longer for these engines, nor they for us."""
        for engine in engines:
            state.memory.stop(self.plan.ranks_of(engine))

    # Messages

    def _converse(self, state: _Round, engine: int) -> _Answers:
        """All messages to one engine, one after the other; runs in a thread. Raises why the engine leaves."""
        answers = _Answers()
        engine_ranks = self.plan.ranks_of(engine)
        arenas = [state.memory.arenas[rank] for rank in engine_ranks]
        is_new = any(rank in state.memory.linked for rank in engine_ranks)
        try:
            commands = [self._commands(state, rank) for rank in engine_ranks]
            for message in [[c[:1] for c in commands], [c[1:] for c in commands]] if is_new else [commands]:
                if any(arena.progress.is_stopped for arena in arenas):
                    raise ValueError(GIVEN_UP)
                answers.last = self._post(state, engine, message, arenas)
                answers.num_bytes += sum(report.num_bytes for report in answers.last)
                state.memory.unlink(engine_ranks)  # the engine has mapped them
        except BaseException:
            self._stop(state, (engine,))
            raise
        return answers

    def _post(
        self, state: _Round, engine: int, message: Sequence[Sequence[Command]], arenas: Sequence[Arena]
    ) -> tuple[Reply, ...]:
        """Delivers one message and waits as long as the engine gets on. TimeoutError where it does not."""
        control = self.handles.controls[engine]
        call = Call(lambda: _deliver_commands(control, message, arenas))
        loaded: list[int] = []
        patience = SyncDeadline(self.message_timeout_s)
        while not call.wait(min(_LOOK_AROUND_S, 0.25 * self.message_timeout_s, state.deadline.left_s)):
            before, loaded = loaded, [arena.progress.num_loaded for arena in arenas]
            if loaded != before:
                patience = SyncDeadline(self.message_timeout_s)
            if patience.is_over:
                raise TimeoutError(f"engine {engine} neither loaded a bucket nor answered for {patience.seconds:.1f} s")
            if state.deadline.is_over:
                break
        return call.result(state.deadline, f"an answer of engine {engine}")

    def _join(self, state: _Round) -> None:
        """Waits for the messengers. An engine that failed leaves the delivery, with the reason."""
        for engine, messenger in state.messengers.items():
            self._patiently(state, messenger.wait, math.inf)
            try:
                answers = messenger.result(state.deadline, f"an answer of engine {engine}")
                state.outcome.num_bytes[engine] = answers.num_bytes
                state.outcome.reports[engine] = answers.last
            # Whatever an engine's death looks like, it is the engine's failure and not this rank's.
            except Exception as error:
                # What the messenger heard says more than what this rank saw of it.
                if state.outcome.failures.get(engine) == LEFT:
                    del state.outcome.failures[engine]
                self._leave(state, engine, reason_of(error))

    def _commands(self, state: _Round, engine_rank: int) -> list[Command]:
        """Everything an engine rank is told in a delivery."""
        order, own = state.order, f"{state.order.delivery}/{engine_rank}"
        channel = {
            "kind": "cuda" if engine_rank in state.memory.shared else "arena",
            "arena": state.memory.arenas[engine_rank].spec.to_json(),
            "number": order.number,
            "writers": self.node_group.size,
            "wait_s": min(self.message_timeout_s, state.deadline.left_s),
            "shared": state.memory.shared.get(engine_rank),
        }
        manifest = self.plan.manifest(engine_rank, order.delivery, order.session, order.version, order.number)
        buckets = [bucket.header for bucket in self.plan.buckets(engine_rank)]
        return [
            Command(f"{own}/begin", "begin", order.delivery, manifest=manifest, channel=channel),
            *(Command(f"{own}/{b.index}", "bucket", order.delivery, bucket=b, channel=channel) for b in buckets),
            Command(f"{own}/finish", "finish", order.delivery, channel=channel),
        ]

    def _led(self, state: _Round) -> tuple[int, ...]:
        return self.handles.led_by(self.rank, state.engines)

    def _num_rounds(self, order: SyncRequest) -> int:
        """Equal on all ranks, so that senders and deputies of all machines go through the same rounds."""
        return max((self.plan.num_buckets(engine) for engine in order.engines), default=0)


def _deliver_commands(
    control: EngineControl, message: Sequence[Sequence[Command]], arenas: Sequence[Arena]
) -> tuple[Reply, ...]:
    """Posts some commands to each rank of an engine and reads their reports. EngineFailure names the rank that failed;
    one that only heard of another's failure is not named."""
    for arena in arenas:
        arena.clear_report()
    control.update_weights_from_tensor([encode_payload(*commands) for commands in message], LOAD_FORMAT)
    reports, failures = [], []
    for number, (commands, arena) in enumerate(zip(message, arenas)):
        try:
            reports.append(check_report(arena.read_report(), *commands))
        except ValueError as error:
            failures.append(f"rank {number} of the engine, {error}")
    if failures:
        raise EngineFailure(next((failure for failure in failures if not failure.endswith(GIVEN_UP)), failures[0]))
    return tuple(reports)
