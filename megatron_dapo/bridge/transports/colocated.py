"""Engines on the trainer's machines: every trainer rank writes its parts straight into memory the engine ranks read.

Each engine rank has an arena with two bucket slots. Bucket k lies in slot k % 2: trainer ranks write it there as soon as
bucket k - 2 is loaded, the engine loads it as soon as all have written. Counters in the arena say how far each is
(`parallel.reshard.progress`), so that nobody waits for a message between two buckets: the leader of an engine posts all
commands of a delivery in one, ahead of the bytes, and watches the counters.

    ranks    write 0 | write 1 | write 2 | ...
    engine   begin   | load 0  | load 1  | ...   -> finish (ledger and checksums)

A delivery through new memory begins with a message of its own: an engine that cannot follow says so at once. Parts whose
source lives on another machine go to a deputy there first, one message a round and pair of ranks.

On a CPU the slots are shared memory of the machine. With a CUDA `device` they are memory of the GPU that the engine
rank shares with a trainer rank, opened by all others through IPC handles; that form has not run on a GPU yet. Reports
and counters go through the arena in both. An arena is kept from one delivery to the next as long as its engine lives.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_dapo.bridge.delivery_plan import DeliveryPlan, ExpectedChecksums, PlannedBucket, write_parts
from megatron_dapo.bridge.transports.base import (
    LOAD_FORMAT,
    Call,
    CoordinationError,
    Coordinator,
    Deadline,
    Delivered,
    EngineControl,
    EngineFailure,
    Fleet,
    Order,
    check_report,
    encode_payload,
    reason_of,
)
from megatron_dapo.parallel.nodes import Nodes
from megatron_dapo.parallel.peer_group import PeerGroup, Pending
from megatron_dapo.parallel.reshard.arena import Arena, ArenaSpec, create_arena, is_running, remove_arena, remove_stale
from megatron_dapo.parallel.reshard.cuda_memory import open_shared, share
from megatron_dapo.parallel.reshard.delivery import PART_ALIGNMENT, Command, Report
from megatron_dapo.parallel.reshard.executors import Buffers
from megatron_dapo.parallel.reshard.progress import GIVEN_UP, LEFT, MAX_WRITERS, NUM_SLOTS


def default_folder() -> Path:
    """A file system in memory where there is one."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() else Path(tempfile.gettempdir())


_LOOK_AROUND_S = 1.0  # between two looks whether all trainer processes of the machine are alive
# (engine rank, source on another machine) -> where its bytes of a bucket go, and their message
_Incoming = dict[tuple[int, int], tuple[torch.Tensor, Pending]]


@dataclass
class _Answers:
    """What an engine reported on all messages of a delivery."""

    num_bytes: int = 0
    last: tuple[Report, ...] = ()


@dataclass
class _Round:
    """State of one delivery on one rank."""

    order: Order
    deadline: Deadline
    outcome: Delivered
    engines: tuple[int, ...]  # of this machine, still alive
    arenas: dict[int, Arena] = field(default_factory=dict)  # engine rank -> arena
    slots: dict[int, torch.Tensor] = field(default_factory=dict)  # engine rank -> [2, bytes] uint8
    shared: dict[int, dict[str, Any]] = field(default_factory=dict)  # engine rank -> IPC handle of its slots
    messengers: dict[int, Call[_Answers]] = field(default_factory=dict)  # of engines this rank leads
    sending: list[Pending] = field(default_factory=list)
    pids: tuple[int, ...] = ()  # of the trainer's processes on this machine


class ColocatedTransport:
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
        plan: DeliveryPlan,
        fleet: Fleet,
        rank: int,
        nodes: Nodes,
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
        self.fleet = fleet
        self.rank = rank
        self.nodes = nodes
        self.node_group = node_group
        self.peers = peers
        self.folder = folder or default_folder()
        self.message_timeout_s = message_timeout_s
        self.grace_s = grace_s
        self.device = device or torch.device("cpu")
        self._kept: dict[int, Arena] = {}  # engine rank -> its arena, unlinked and mapped by all that use it
        self._kept_for: dict[int, EngineControl] = {}  # engines this rank leads: whose processes have mapped theirs
        remove_stale(self.folder)

    def deliver(self, order: Order, sources: Buffers, deadline: Deadline) -> Delivered:
        mine = tuple(engine for engine in order.engines if self._node_of(engine) == self.nodes.node_of(self.rank))
        state = _Round(order, deadline, Delivered(ExpectedChecksums(self.plan)), mine)
        specs: dict[int, ArenaSpec] = {}
        try:
            if self._open(state, specs):
                # Behind it all ranks have mapped the arenas: once the engines have too, nothing of them can stay behind.
                self._agree(state, "the memory")
            for engine in self._led(state):
                state.messengers[engine] = Call(lambda e=engine: self._converse(state, e, specs))
            for index in range(self._num_rounds(order)):
                self._round(state, index, sources)
            self._join(state)
            self._share_reasons(state)
            for message in state.sending:
                message.wait(deadline.at)
        except BaseException:
            self._stop(state, order.engines)
            self.close()
            raise
        finally:
            for spec in specs.values():
                remove_arena(spec)
        # One that failed may still work on a message that was given up, or has mapped nothing: it gets a new arena.
        self._forget(set(mine) - set(state.engines))
        return state.outcome

    def close(self) -> None:
        """Give up the arenas that were kept for the next delivery."""
        self._kept.clear()
        self._kept_for.clear()

    def _forget(self, engines: Iterable[int]) -> None:
        for engine in engines:
            self._kept_for.pop(engine, None)
            for engine_rank in self.plan.ranks_of(engine):
                self._kept.pop(engine_rank, None)

    # Rounds

    def _round(self, state: _Round, index: int, sources: Buffers) -> None:
        """Writes this rank's share of bucket `index` of every engine rank, and what came for it from other machines."""
        incoming = self._receive(state, index)
        try:
            self._send(state, index, sources)
            for bucket in self._buckets(state.engines, index):
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

    def _write(self, state: _Round, bucket: PlannedBucket, sources: Buffers, incoming: _Incoming) -> bool:
        """Whether this rank's share of a bucket is in its slot; not where the engine has left the delivery."""
        keys = [(bucket.engine_rank, source) for source in bucket.segments]
        arrivals = [key for key in keys if key in incoming]
        if self.rank not in bucket.segments and not arrivals:
            return True
        if self._engine_of(bucket) not in state.engines or not self._has_slot(state, bucket):
            return False
        slot = state.slots[bucket.engine_rank][bucket.index % NUM_SLOTS]
        specs = self.plan.engines.local_specs(bucket.engine_rank)
        write_parts(bucket, self.rank, sources, slot, specs, state.outcome.expected)
        for key in arrivals:
            data, pending = incoming.pop(key)
            pending.wait(state.deadline.at)
            segment = bucket.segments[key[1]]
            slot[segment.start : segment.stop].copy_(data)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the engine reads without regard to our streams
        return True

    def _has_slot(self, state: _Round, bucket: PlannedBucket) -> bool:
        """Waits for the slot of a bucket. An engine that does not give it free leaves the delivery."""
        progress = state.arenas[bucket.engine_rank].progress
        try:
            if self._patiently(state, lambda s: progress.wait_for_slot(bucket.index, s), self.message_timeout_s):
                return True
            reason = f"it did not load bucket {bucket.index - NUM_SLOTS} in time"
        except ValueError as error:
            reason = str(error)
        self._leave(state, self._engine_of(bucket), reason)
        return False

    def _patiently(self, state: _Round, wait: Callable[[float], bool], seconds: float) -> bool:
        """Whether `wait(seconds)` comes true, in pieces; CoordinationError as soon as a trainer process of the machine is
        found dead."""
        end = Deadline(min(seconds, state.deadline.left_s))
        while not wait(min(_LOOK_AROUND_S, end.left_s)):
            gone = [pid for pid in state.pids if not is_running(pid)]
            if gone:
                what = f"delivery {state.order.delivery}: rank {self.node_group.rank} of {self.node_group.size}"
                raise CoordinationError(f"{what} found the trainer's process {gone[0]} gone")
            if end.is_over:
                return False
        return True

    def _announce(self, state: _Round, bucket: PlannedBucket) -> None:
        """This rank's share of a bucket is in its slot."""
        state.arenas[bucket.engine_rank].progress.count_written(self.node_group.rank, bucket.index + 1)

    def _agree(self, state: _Round, what: str) -> None:
        """Engines that failed for any rank of the machine leave the delivery."""
        if not self._engines_here(state.order):
            return
        engines = self._engines_here(state.order)
        flags = torch.tensor([engine in state.outcome.failures for engine in engines], dtype=torch.int64)
        what = f"delivery {state.order.delivery}, {what}"
        failed = self.node_group.sum(flags, what, state.deadline.left_s + self.grace_s)
        lost = {engine for engine, count in zip(engines, failed.tolist()) if count}
        state.engines = tuple(engine for engine in state.engines if engine not in lost)

    def _share_reasons(self, state: _Round) -> None:
        """Ends the delivery: an engine that left it for any rank of the machine left it for all, with the first cause."""
        if not self._engines_here(state.order):
            return
        own = {str(engine): reason for engine, reason in state.outcome.failures.items()}
        what = f"delivery {state.order.delivery}, the end"
        everyone = self.node_group.exchange(own, what, state.deadline.left_s + self.grace_s)
        for engine in self._engines_here(state.order):
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
            for engine_rank in self.plan.ranks_of(engine):
                if engine_rank in state.arenas:
                    state.arenas[engine_rank].progress.stop()

    # Messages

    def _converse(self, state: _Round, engine: int, specs: Mapping[int, ArenaSpec]) -> _Answers:
        """All messages to one engine, one after the other; runs in a thread. Raises why the engine leaves."""
        answers = _Answers()
        engine_ranks = self.plan.ranks_of(engine)
        arenas = [state.arenas[rank] for rank in engine_ranks]
        new = [specs[rank] for rank in engine_ranks if rank in specs]
        try:
            commands = [self._commands(state, rank) for rank in engine_ranks]
            for message in [[c[:1] for c in commands], [c[1:] for c in commands]] if new else [commands]:
                if any(arena.progress.is_stopped for arena in arenas):
                    raise ValueError(GIVEN_UP)
                answers.last = self._post(state, engine, message, arenas)
                answers.num_bytes += sum(report.num_bytes for report in answers.last)
                # The engine has mapped it.
                for spec in new:
                    remove_arena(spec)
        except BaseException:
            self._stop(state, (engine,))
            raise
        return answers

    def _post(
        self, state: _Round, engine: int, message: Sequence[Sequence[Command]], arenas: Sequence[Arena]
    ) -> tuple[Report, ...]:
        """Delivers one message and waits as long as the engine gets on. TimeoutError where it does not."""
        control = self.fleet.controls[engine]
        call = Call(lambda: _deliver_commands(control, message, arenas))
        loaded: list[int] = []
        patience = Deadline(self.message_timeout_s)
        while not call.wait(min(_LOOK_AROUND_S, 0.25 * self.message_timeout_s, state.deadline.left_s)):
            before, loaded = loaded, [arena.progress.num_loaded for arena in arenas]
            if loaded != before:
                patience = Deadline(self.message_timeout_s)
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
            "kind": "cuda" if engine_rank in state.shared else "arena",
            "arena": state.arenas[engine_rank].spec.to_json(),
            "number": order.number,
            "writers": self.node_group.size,
            "wait_s": min(self.message_timeout_s, state.deadline.left_s),
            "shared": state.shared.get(engine_rank),
        }
        manifest = self.plan.manifest(engine_rank, order.delivery, order.session, order.version, order.number)
        buckets = [bucket.header for bucket in self.plan.buckets(engine_rank)]
        return [
            Command(f"{own}/begin", "begin", order.delivery, manifest=manifest, channel=channel),
            *(Command(f"{own}/{b.index}", "bucket", order.delivery, bucket=b, channel=channel) for b in buckets),
            Command(f"{own}/finish", "finish", order.delivery, channel=channel),
        ]

    # Memory

    def _open(self, state: _Round, specs: dict[int, ArenaSpec]) -> bool:
        """Creates the arenas that engines led by this rank have not got yet, and maps those of all engines of the machine.
        Whether any rank of the machine had something to map, which may have failed.

        They are kept for the next delivery: pages that are there are written several times as fast as new ones.
        """
        here = self._engines_here(state.order)
        if not here:
            return False
        for engine in self._led(state):
            if self._kept_for.get(engine) is self.fleet.controls[engine]:
                for engine_rank in self.plan.ranks_of(engine):
                    self._kept[engine_rank].progress.start(state.order.number)
                continue
            try:
                for engine_rank in self.plan.ranks_of(engine):
                    specs[engine_rank] = self._create(state.order, engine_rank)
                self._kept_for[engine] = self.fleet.controls[engine]
            except ValueError as error:
                state.outcome.fail(engine, reason_of(error))
        own = self._own_slots(state) if self.device.type == "cuda" else {}
        created = {
            "pid": os.getpid(),
            "arenas": {str(rank): spec.to_json() for rank, spec in specs.items()},
            "slots": {str(rank): share(slots) for rank, slots in own.items()},
        }
        what = f"delivery {state.order.delivery}, the arenas"
        everyone = self.node_group.exchange(created, what, state.deadline.left_s + self.grace_s)
        state.pids = tuple(int(others["pid"]) for others in everyone)
        try:
            for others in everyone:
                for engine_rank, spec in others["arenas"].items():
                    self._kept[int(engine_rank)] = Arena(ArenaSpec.from_json(spec))
                for engine_rank, shared in others["slots"].items():
                    state.shared[int(engine_rank)] = shared
            ranks_here = [rank for engine in here for rank in self.plan.ranks_of(engine) if rank in self._kept]
            state.arenas.update((rank, self._kept[rank]) for rank in ranks_here)
            if self.device.type != "cuda":
                state.slots.update((rank, arena.slots) for rank, arena in state.arenas.items())
            for engine_rank, shared in state.shared.items():
                slots = own[engine_rank] if engine_rank in own else open_shared(shared)
                state.slots[engine_rank] = slots.view(NUM_SLOTS, -1)
        # The other ranks must hear of it instead of waiting for this one.
        except (OSError, RuntimeError, ValueError) as error:
            for engine in state.order.engines:
                state.outcome.fail(engine, f"trainer rank {self.rank}: {reason_of(error)}")
        for engine in here:
            ranks = self.plan.ranks_of(engine)
            if any(rank not in state.arenas or rank not in state.slots for rank in ranks):
                state.outcome.fail(engine, "it has no memory to be delivered through")
        state.engines = tuple(engine for engine in here if engine not in state.outcome.failures)
        reports = {rank: arena.report.numel() for rank, arena in state.arenas.items()}
        sizes = [reports.get(rank, 0) + slots.numel() for rank, slots in state.slots.items()]
        state.outcome.peak_bytes = max([state.outcome.peak_bytes, *sizes])
        return any(others["arenas"] or others["slots"] for others in everyone)

    def _create(self, order: Order, engine_rank: int) -> ArenaSpec:
        slot_bytes = 0 if self.device.type == "cuda" else self._slot_bytes(engine_rank)
        spec = create_arena(self.folder, f"{order.delivery}-{engine_rank}", slot_bytes)
        Arena(spec).progress.start(order.number)
        return spec

    def _slot_bytes(self, engine_rank: int) -> int:
        num_bytes = max((bucket.num_bytes for bucket in self.plan.buckets(engine_rank)), default=0)
        assert num_bytes <= self.plan.bucket_bytes, f"{num_bytes} bytes, the limit is {self.plan.bucket_bytes}"
        return -(-num_bytes // PART_ALIGNMENT) * PART_ALIGNMENT

    def _own_slots(self, state: _Round) -> dict[int, torch.Tensor]:
        """Slots on this rank's GPU of the engine ranks that share it: engine rank r is beside the machine's rank r."""
        ranks = self.nodes.ranks_of(self.nodes.node_of(self.rank))
        beside = [
            engine_rank
            for engine in state.engines
            for engine_rank in self.plan.ranks_of(engine)
            if ranks[engine_rank % len(ranks)] == self.rank
        ]
        return {r: torch.empty(NUM_SLOTS * self._slot_bytes(r), dtype=torch.uint8, device=self.device) for r in beside}

    # Other machines

    def _receive(self, state: _Round, index: int) -> _Incoming:
        """Starts to receive what other machines send through this rank in round `index`, also for engines that failed:
        their senders do not know of it."""
        incoming: _Incoming = {}
        if self.peers is None:
            return incoming
        for bucket, source in self._forwarded(self._engines_here(state.order), index):
            if self._deputy(bucket, source) == self.rank:
                segment = bucket.segments[source]
                data = torch.empty(segment.stop - segment.start, dtype=torch.uint8)
                incoming[bucket.engine_rank, source] = (data, self.peers.receive(data, source))
        return incoming

    def _send(self, state: _Round, index: int, sources: Buffers) -> None:
        """Starts to send this rank's parts for engines of other machines; those of the round before have left."""
        if self.peers is None:
            return
        for message in state.sending:
            message.wait(state.deadline.at)
        state.sending.clear()
        away = [engine for engine in state.order.engines if engine not in self._engines_here(state.order)]
        for bucket, source in self._forwarded(away, index):
            if source == self.rank:
                segment = bucket.segments[source]
                data = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
                specs = self.plan.engines.local_specs(bucket.engine_rank)
                write_parts(bucket, source, sources, data, specs, state.outcome.expected)
                message = data[segment.start : segment.stop].clone()
                state.sending.append(self.peers.send(message, self._deputy(bucket, source)))

    def _forwarded(self, engines: Sequence[int], index: int) -> list[tuple[PlannedBucket, int]]:
        """(bucket, source) pairs of round `index` whose source is not on the engine's machine, in one order for all."""
        pairs = []
        for bucket in self._buckets(engines, index):
            node = self._node_of(self._engine_of(bucket))
            pairs += [(bucket, source) for source in bucket.segments if self.nodes.node_of(source) != node]
        return pairs

    def _deputy(self, bucket: PlannedBucket, source: int) -> int:
        """The rank of the engine's machine that takes a source's bytes in; sources are spread over its ranks."""
        ranks = self.nodes.ranks_of(self._node_of(self._engine_of(bucket)))
        return ranks[(source + bucket.engine_rank) % len(ranks)]

    # Who is where

    def _buckets(self, engines: Sequence[int], index: int) -> list[PlannedBucket]:
        ranks = [rank for engine in engines for rank in self.plan.ranks_of(engine)]
        return [self.plan.buckets(rank)[index] for rank in ranks if index < len(self.plan.buckets(rank))]

    def _engine_of(self, bucket: PlannedBucket) -> int:
        return bucket.engine_rank // self.plan.engines.tensor_parallel

    def _node_of(self, engine: int) -> int:
        return self.nodes.node_of(self.fleet.leaders[engine])

    def _engines_here(self, order: Order) -> tuple[int, ...]:
        return tuple(e for e in order.engines if self._node_of(e) == self.nodes.node_of(self.rank))

    def _led(self, state: _Round) -> tuple[int, ...]:
        return self.fleet.led_by(self.rank, state.engines)

    def _num_rounds(self, order: Order) -> int:
        """Equal on all ranks, so that senders and deputies of all machines go through the same rounds."""
        return max((self.plan.num_buckets(engine) for engine in order.engines), default=0)


def _deliver_commands(
    control: EngineControl, message: Sequence[Sequence[Command]], arenas: Sequence[Arena]
) -> tuple[Report, ...]:
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
