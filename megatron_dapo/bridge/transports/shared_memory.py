"""Transport to engines on the trainer's nodes: every trainer rank writes its chunks into memory the engine ranks read.

Each engine rank has an arena with two bucket slots. Bucket k lies in slot k % 2: trainer ranks write it as soon as bucket
k - 2 is loaded, the engine loads it as soon as all have written. Counters in the arena (`protocol.progress`) replace
messages between buckets: the leader of an engine posts all commands of a sync in one message, ahead of the bytes, and
watches the counters.

    ranks    write 0 | write 1 | write 2 | ...
    engine   begin   | load 0  | load 1  | ...   -> finish (coverage and checksums)

A sync through new memory begins with a separate message, so that an engine that cannot map it says so at once.
`node_memory` keeps the memory; `forwarding` carries chunks whose source is on another node.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from megatron_dapo.bridge.protocol.arena import Arena, is_running
from megatron_dapo.bridge.protocol.deltas import areas
from megatron_dapo.bridge.protocol.messages import Bucket, Command, CommandReply
from megatron_dapo.bridge.protocol.peer_group import PeerGroup
from megatron_dapo.bridge.protocol.progress import ABANDONED, LEFT, MAX_WRITERS, NUM_SLOTS
from megatron_dapo.bridge.sync_plan import ExpectedChecksums, SyncPlan, write_chunks
from megatron_dapo.bridge.transports.base import (
    LOAD_FORMAT,
    Call,
    EngineFailure,
    EngineHandles,
    ServerControl,
    SyncDeadline,
    SyncRequest,
    TransferResult,
    check_reply,
    encode_payload,
    reason_of,
)
from megatron_dapo.bridge.transports.forwarding import EngineNodes, Forwarding, Incoming, arrivals
from megatron_dapo.bridge.transports.node_memory import NodeMemory, SyncMemory
from megatron_dapo.parallel.coordination import Coordination, CoordinationError
from megatron_dapo.parallel.nodes import NodeTopology
from megatron_dapo.reshard.execution import Buffers

_LOOK_AROUND_S = 1.0  # interval of the checks that all trainer processes of the node are alive


def default_directory() -> Path:
    """Return a file system in memory if there is one."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() else Path(tempfile.gettempdir())


@dataclass
class _Answers:
    """Replies of one engine to all messages of a sync."""

    num_bytes: int = 0
    last: tuple[CommandReply, ...] = ()


@dataclass
class _State:
    """One weight sync on one rank."""

    request: SyncRequest
    deadline: SyncDeadline
    result: TransferResult
    engines: tuple[int, ...]  # this node's engines that still take part
    memory: SyncMemory = field(default_factory=SyncMemory)
    messengers: dict[int, Call[_Answers]] = field(default_factory=dict)  # one per engine that this rank leads


class SharedMemoryTransport:
    """`Transport` through shared memory.

    Args:
        nodes: nodes of the trainer's ranks. An engine lives on the node of its leader.
        node_group: the ranks of this node, in rank order.
        peers: all trainer ranks, if there are several nodes.
        directory: of the arenas; a file system in memory.
        message_timeout_s: an engine that neither loads a bucket nor answers within it is left out; the others continue.
        grace_s: how long ranks wait for each other beyond the deadline of a sync.
        device: of this rank's slots: the CPU, or its GPU.
    """

    def __init__(
        self,
        plan: SyncPlan,
        handles: EngineHandles[ServerControl],
        rank: int,
        nodes: NodeTopology,
        node_group: Coordination,
        *,
        peers: PeerGroup | None = None,
        directory: Path | None = None,
        message_timeout_s: float = 60.0,
        grace_s: float = 5.0,
        device: torch.device | None = None,
    ) -> None:
        if nodes.num_nodes > 1 and peers is None:
            raise ValueError(f"shared memory transport: {nodes.num_nodes} nodes need the group of all ranks as `peers`")
        if node_group.size > MAX_WRITERS:
            raise ValueError(f"shared memory transport: {node_group.size} ranks on a node, at most {MAX_WRITERS}")
        self.plan = plan
        self.handles = handles
        self.rank = rank
        self.node_group = node_group
        self.message_timeout_s = message_timeout_s
        self.grace_s = grace_s
        self._nodes = EngineNodes(plan, handles, nodes, rank)
        self._forwarding = Forwarding(self._nodes, peers)
        self._memory = NodeMemory(
            self._nodes, node_group, directory or default_directory(), device or torch.device("cpu")
        )
        self._state: _State | None = None

    def begin(self, request: SyncRequest, deadline: SyncDeadline) -> None:
        """Map the memory of all engines of the node and post the commands to those this rank leads."""
        here = self._nodes.engines_here(request)
        state = self._state = _State(request, deadline, TransferResult(ExpectedChecksums(self.plan)), here)
        self._forwarding.begin(request)
        self._open(state)
        if state.memory.is_new:
            # After this all ranks have mapped the arenas; once the engines have too, no file can stay behind.
            self._agree(state, "the memory")
        for engine in self.handles.led_by(self.rank, state.engines):
            state.messengers[engine] = Call(partial(self._converse, state, engine))

    def send(self, sources: Buffers) -> None:
        """Write this rank's chunks, bucket after bucket."""
        state, delta = self._running, self._running.request.delta
        num_rounds = self._forwarding.num_rounds
        if delta is not None:
            num_rounds = max(map(delta.plan.num_buckets, self._nodes.engines_here(state.request)), default=0)
        for index in range(num_rounds):
            self._round(state, index, sources)

    def finish(self) -> TransferResult:
        """Wait for the engines' replies and agree on failures with the other ranks of the node."""
        state = self._running
        self._join(state)
        self._share_reasons(state)
        self._forwarding.wait(state.deadline)
        self._end(state)
        self._memory.forget(set(self._nodes.engines_here(state.request)) - set(state.engines))
        return state.result

    def close(self) -> None:
        """Stop a sync in progress and release the memory kept for the next one."""
        if self._state is not None:
            self._stop(self._state, self._state.request.engines)
            self._end(self._state)
        self._memory.close()

    @property
    def _running(self) -> _State:
        assert self._state is not None, "begin comes first"
        return self._state

    def _end(self, state: _State) -> None:
        state.memory.unlink(list(state.memory.linked))
        self._state = None

    def _open(self, state: _State) -> None:
        """Map the memory. Engines without memory are left out."""
        self._memory.open(state.request, state.memory, state.deadline.left_s + self.grace_s)
        for engine, reason in state.memory.failures.items():
            state.result.fail(engine, reason)
        state.engines = tuple(engine for engine in state.engines if engine not in state.result.failures)
        state.result.peak_bytes = max(state.result.peak_bytes, state.memory.peak_bytes)

    # Rounds

    def _round(self, state: _State, index: int, sources: Buffers) -> None:
        """Write this rank's share of bucket `index` of every engine rank, and what came for it from other nodes."""
        try:
            incoming: Incoming = {}
            if state.request.delta is None:
                incoming = self._forwarding.receive()
                self._forwarding.send(index, sources, state.result.expected, state.deadline)
            plan = state.request.plan(self.plan)
            for engine_ranks in self._nodes.sets_here(state.engines):
                buckets = [plan.buckets(rank)[index:][:1] for rank in engine_ranks]
                self._write(state, [bucket for found in buckets for bucket in found], sources, incoming)
            for _, pending in incoming.values():
                pending.wait(state.deadline.at)
        except CoordinationError:
            raise
        # This rank cannot do its share: no engine may serve what it received, and no other rank may wait for this one.
        except Exception as error:
            for engine in state.request.engines:
                self._leave(state, engine, f"trainer rank {self.rank}: {reason_of(error)}")

    def _write(self, state: _State, buckets: Sequence[Bucket], sources: Buffers, incoming: Incoming) -> None:
        """Write this rank's share of a bucket into the slot of every engine rank that gets it, and count it as written."""
        if not buckets:
            return
        segments = buckets[0].segments
        coming = arrivals(buckets[0], self.plan.alike(buckets[0].engine_rank)[0], incoming)
        if self.rank in segments or coming:
            buckets = [bucket for bucket in buckets if self._has_slot(state, bucket)]
            slots = [state.memory.slots[bucket.engine_rank][bucket.index % NUM_SLOTS] for bucket in buckets]
            if buckets and self.rank in segments:
                self._fill(state, buckets, slots, sources)
            for key in coming:
                data, pending = incoming.pop(key)
                pending.wait(state.deadline.at)
                start, stop = segments[key[1]]
                for slot in slots:
                    slot[start:stop].copy_(data)
            # The engine reads the slot without regard to our streams: the copies must have run before they are announced.
            for device in {self._memory.device, *(slot.device for slot in slots)}:
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
        for bucket in buckets:
            self._announce(state, bucket)

    def _fill(
        self, state: _State, buckets: Sequence[Bucket], slots: Sequence[torch.Tensor], sources: Buffers
    ) -> None:
        """Write this rank's segment into the slots of alike engine ranks, and count it."""
        bucket, delta, expected = buckets[0], state.request.delta, state.result.expected
        engine_ranks = [bucket.engine_rank for bucket in buckets]
        if delta is not None:
            segment, start = delta.segment(bucket), areas(bucket, slots[0].numel())[self.rank].start
            for slot in slots:
                slot[start : start + segment.numel()].copy_(segment)
            delta.count(bucket, engine_ranks, expected)
            return
        start, stop = bucket.segments[self.rank]
        write_chunks(self.plan, bucket, self.rank, sources, slots[0], expected, engine_ranks=engine_ranks)
        for slot in slots[1:]:
            slot[start:stop].copy_(slots[0][start:stop])

    def _has_slot(self, state: _State, bucket: Bucket) -> bool:
        """Wait for the slot of a bucket. An engine that does not free it is left out."""
        progress = state.memory.arenas[bucket.engine_rank].progress
        try:
            if self._patiently(state, lambda s: progress.wait_for_slot(bucket.index, s), self.message_timeout_s):
                return True
            reason = f"it did not load bucket {bucket.index - NUM_SLOTS} in time"
        except ValueError as error:
            reason = str(error)
        self._leave(state, self._nodes.engine_of(bucket), reason)
        return False

    def _patiently(self, state: _State, wait: Callable[[float], bool], seconds: float) -> bool:
        """Call `wait(seconds)` in short turns until it returns True; False after `seconds`.

        Raise CoordinationError as soon as a trainer process of the node is dead.
        """
        end = SyncDeadline(min(seconds, state.deadline.left_s))
        while not wait(min(_LOOK_AROUND_S, end.left_s)):
            gone = [pid for pid in state.memory.pids if not is_running(pid)]
            if gone:
                what = f"weight sync {state.request.sync_id}: rank {self.node_group.rank} of {self.node_group.size}"
                raise CoordinationError(f"{what} found the trainer's process {gone[0]} gone")
            if end.is_over:
                return False
        return True

    def _announce(self, state: _State, bucket: Bucket) -> None:
        """Count this rank's share of a bucket as written."""
        state.memory.arenas[bucket.engine_rank].progress.count_written(self.node_group.rank, bucket.index + 1)

    def _agree(self, state: _State, what: str) -> None:
        """Leave out engines that failed for any rank of the node."""
        engines = self._nodes.engines_here(state.request)
        if not engines:
            return
        flags = torch.tensor([engine in state.result.failures for engine in engines], dtype=torch.int64)
        what = f"weight sync {state.request.sync_id}, {what}"
        failed = self.node_group.sum(flags, what, state.deadline.left_s + self.grace_s)
        lost = {engine for engine, count in zip(engines, failed.tolist()) if count}
        state.engines = tuple(engine for engine in state.engines if engine not in lost)

    def _share_reasons(self, state: _State) -> None:
        """Exchange failures: an engine that failed for any rank of the node failed for all, with the first cause."""
        here = self._nodes.engines_here(state.request)
        if not here:
            return
        own = {str(engine): reason for engine, reason in state.result.failures.items()}
        what = f"weight sync {state.request.sync_id}, the end"
        everyone = self.node_group.gather(own, what, state.deadline.left_s + self.grace_s)
        for engine in here:
            reasons = [view[str(engine)] for view in everyone if str(engine) in view]
            if reasons:
                state.engines = tuple(other for other in state.engines if other != engine)
                causes = [reason for reason in reasons if not reason.endswith((LEFT, ABANDONED))]
                state.result.failures[engine] = (causes or reasons)[0]

    def _leave(self, state: _State, engine: int, reason: str) -> None:
        """Leave an engine out of the rest of the sync."""
        state.result.fail(engine, reason)
        state.engines = tuple(other for other in state.engines if other != engine)
        self._stop(state, (engine,))

    def _stop(self, state: _State, engines: Iterable[int]) -> None:
        """End all waiting for these engines, and theirs for this rank."""
        for engine in engines:
            state.memory.stop(self.plan.ranks_of(engine))

    # Messages

    def _converse(self, state: _State, engine: int) -> _Answers:
        """Send all messages to one engine, one after the other, in a thread. Raise the reason the engine fails."""
        answers = _Answers()
        engine_ranks = self.plan.ranks_of(engine)
        arenas = [state.memory.arenas[rank] for rank in engine_ranks]
        is_new = any(rank in state.memory.linked for rank in engine_ranks)
        try:
            commands = [self._commands(state, rank) for rank in engine_ranks]
            for message in [[c[:1] for c in commands], [c[1:] for c in commands]] if is_new else [commands]:
                if any(arena.progress.is_stopped for arena in arenas):
                    raise ValueError(ABANDONED)
                answers.last = self._post(state, engine, message, arenas)
                answers.num_bytes += sum(reply.num_bytes for reply in answers.last)
                state.memory.unlink(engine_ranks)  # the engine has mapped them
        except BaseException:
            self._stop(state, (engine,))
            raise
        return answers

    def _post(
        self, state: _State, engine: int, message: Sequence[Sequence[Command]], arenas: Sequence[Arena]
    ) -> tuple[CommandReply, ...]:
        """Post one message and wait as long as the engine makes progress; TimeoutError if it makes none."""
        control = self.handles.controls[engine]
        call = Call(lambda: _post_commands(control, message, arenas))
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

    def _join(self, state: _State) -> None:
        """Wait for the messengers. An engine that failed is left out, with the reason."""
        for engine, messenger in state.messengers.items():
            self._patiently(state, messenger.wait, math.inf)
            try:
                answers = messenger.result(state.deadline, f"an answer of engine {engine}")
                state.result.num_bytes[engine] = answers.num_bytes
                state.result.replies[engine] = answers.last
            # An engine can fail with any exception; that must not fail this rank.
            except Exception as error:
                # The messenger's reason says more than LEFT, which this rank saw in the arena.
                if state.result.failures.get(engine) == LEFT:
                    del state.result.failures[engine]
                self._leave(state, engine, reason_of(error))

    def _commands(self, state: _State, engine_rank: int) -> list[Command]:
        """Return all commands of a sync to an engine rank."""
        request, own = state.request, f"{state.request.sync_id}/{engine_rank}"
        channel = {
            "kind": "arena",
            "arena": state.memory.arenas[engine_rank].spec.to_json(),
            "number": request.number,
            "writers": self.node_group.size,
            "wait_s": min(self.message_timeout_s, state.deadline.left_s),
            "shared": state.memory.shared.get(engine_rank),
        }
        manifest, buckets = request.manifest(self.plan, engine_rank), request.plan(self.plan).buckets(engine_rank)
        return [
            Command(f"{own}/begin", "begin", request.sync_id, manifest=manifest, channel=channel),
            *(Command(f"{own}/{b.index}", "bucket", request.sync_id, bucket=b, channel=channel) for b in buckets),
            Command(f"{own}/finish", "finish", request.sync_id, channel=channel),
        ]


def _post_commands(
    control: ServerControl, message: Sequence[Sequence[Command]], arenas: Sequence[Arena]
) -> tuple[CommandReply, ...]:
    """Post some commands to each rank of an engine and return their replies.

    Raise EngineFailure that names the rank that failed first, not one that only stopped because of it.
    """
    for arena in arenas:
        arena.clear_reply()
    control.update_weights_from_tensor([encode_payload(*commands) for commands in message], LOAD_FORMAT)
    replies, failures = [], []
    for number, (commands, arena) in enumerate(zip(message, arenas)):
        try:
            replies.append(check_reply(arena.read_reply(), *commands))
        except ValueError as error:
            failures.append(f"rank {number} of the engine, {error}")
    if failures:
        raise EngineFailure(next((failure for failure in failures if not failure.endswith(ABANDONED)), failures[0]))
    return tuple(replies)
