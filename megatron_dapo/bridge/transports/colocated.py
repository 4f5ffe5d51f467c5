"""Engines on the trainer's machines: every trainer rank writes its parts straight into memory the engine ranks read.

Each engine rank has an arena with two bucket slots. In round k all trainer ranks of the machine write their parts of
bucket k into slot k % 2, while the engine still loads bucket k - 1 from the other slot; one sum of failure flags over
the machine's ranks ends the round, and the leader posts bucket k.

    ranks    write 0 | write 1        | write 2        | ...
    engine   begin   | load 0         | load 1         | ...   -> finish (ledger and checksums)

Parts whose source lives on another machine go to a deputy there first, one message a round and pair of ranks.

On a CPU the slots are shared memory of the machine. With a CUDA `device` they are memory of the GPU that the engine
rank shares with a trainer rank, opened by all others through IPC handles; that form has not run on a GPU yet. Reports
come back through the arena in both.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
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
from megatron_dapo.parallel.reshard.arena import Arena, ArenaSpec, create_arena, remove_arena, remove_stale
from megatron_dapo.parallel.reshard.cuda_memory import open_shared, share
from megatron_dapo.parallel.reshard.delivery import PART_ALIGNMENT, Bucket, Command, Report
from megatron_dapo.parallel.reshard.executors import Buffers


def default_folder() -> Path:
    """A file system in memory where there is one."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() else Path(tempfile.gettempdir())


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
    # engine this rank leads -> its last message, and until when it may take
    posted: dict[int, tuple[Call[tuple[Report, ...]], Deadline]] = field(default_factory=dict)
    sending: list[Pending] = field(default_factory=list)


class ColocatedTransport:
    """`Transport` through shared memory.

    Args:
        nodes: which ranks share a machine. An engine lives on the machine of its leader.
        node_group: the ranks of this machine, in rank order.
        peers: all trainer ranks, where there are several machines.
        folder: where arenas lie; a file system in memory.
        message_timeout_s: an engine that does not answer one message within it leaves the delivery; the others go on.
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
        remove_stale(self.folder)

    def deliver(self, order: Order, sources: Buffers, deadline: Deadline) -> Delivered:
        mine = tuple(engine for engine in order.engines if self._node_of(engine) == self.nodes.node_of(self.rank))
        state = _Round(order, deadline, Delivered(ExpectedChecksums(self.plan)), mine)
        specs: dict[int, ArenaSpec] = {}
        try:
            self._open(state, specs)
            self._post(state, [self._begin(state, engine) for engine in self._led(state)])
            for index in range(self._num_rounds(order)):
                self._round(state, index, sources, specs)
            self._join(state)
            self._agree(state, "the last bucket")
            self._finish(state)
            for message in state.sending:
                message.wait(deadline.at)
        finally:
            for spec in specs.values():
                remove_arena(spec)
        return state.outcome

    def close(self) -> None:
        """Nothing is kept between deliveries."""

    # Rounds

    def _round(self, state: _Round, index: int, sources: Buffers, arenas: Mapping[int, ArenaSpec]) -> None:
        """Writes bucket `index` of every engine rank, waits for the load of the one before, and posts it."""
        incoming = self._receive(state, index)
        try:
            self._send(state, index, sources)
            for bucket in self._buckets(state.engines, index):
                slot = state.slots[bucket.engine_rank][index % 2]
                specs = self.plan.engines.local_specs(bucket.engine_rank)
                write_parts(bucket, self.rank, sources, slot, specs, state.outcome.expected)
            for bucket, source, data in self._arrived(incoming, state.deadline):
                if bucket.engine_rank in state.slots:
                    segment = bucket.segments[source]
                    state.slots[bucket.engine_rank][index % 2][segment.start : segment.stop].copy_(data)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # the engine reads without regard to our streams
        except CoordinationError:
            raise
        # This rank cannot do its share: no engine may serve what it got, and the other ranks must not wait for it.
        except Exception as error:
            self._fail_all(state, f"trainer rank {self.rank}: {reason_of(error)}")
        self._join(state)
        self._agree(state, f"bucket {index}")
        if index == 0:
            # All have mapped the arenas: from here on nothing of them can stay behind.
            for arena in arenas.values():
                remove_arena(arena)
        self._post(state, [self._bucket(state, engine, index) for engine in self._led(state)])

    def _agree(self, state: _Round, what: str) -> None:
        """Ends a round: engines that failed for any rank of the machine leave it."""
        if not self._engines_here(state.order):
            return
        engines = self._engines_here(state.order)
        flags = torch.tensor([engine in state.outcome.failures for engine in engines], dtype=torch.int64)
        what = f"delivery {state.order.delivery}, {what}"
        failed = self.node_group.sum(flags, what, state.deadline.left_s + self.grace_s)
        lost = {engine for engine, count in zip(engines, failed.tolist()) if count}
        state.engines = tuple(engine for engine in state.engines if engine not in lost)

    def _fail_all(self, state: _Round, reason: str) -> None:
        for engine in state.order.engines:
            state.outcome.fail(engine, reason)

    def _finish(self, state: _Round) -> None:
        """Has the engines of this rank verify; their reports are the outcome."""
        engines = self._led(state)
        self._post(state, [(engine, self._commands(state, engine, "finish")) for engine in engines])
        for engine, reports in self._join(state).items():
            state.outcome.reports[engine] = reports

    # Messages

    def _post(self, state: _Round, messages: Sequence[tuple[int, list[Command]]]) -> None:
        """Starts a call for each engine of this rank."""
        for engine, commands in messages:
            arenas = [state.arenas[rank] for rank in self.plan.ranks_of(engine)]
            control = self.fleet.controls[engine]
            # Bound now: the loop goes on before the call starts.
            call = Call(lambda c=control, m=commands, a=arenas: _deliver_commands(c, m, a))
            state.posted[engine] = (call, Deadline(min(self.message_timeout_s, state.deadline.left_s)))

    def _join(self, state: _Round) -> dict[int, tuple[Report, ...]]:
        """Waits for the calls under way. An engine that fails leaves the delivery, with the reason."""
        reports = {}
        for engine, (call, deadline) in state.posted.items():
            try:
                reports[engine] = call.result(deadline, f"an answer of engine {engine}")
                state.outcome.num_bytes[engine] = state.outcome.num_bytes.get(engine, 0) + sum(
                    report.num_bytes for report in reports[engine]
                )
            # Whatever an engine's death looks like, it is the engine's failure and not this rank's.
            except Exception as error:
                state.outcome.fail(engine, reason_of(error))
        state.posted.clear()
        state.engines = tuple(engine for engine in state.engines if engine not in state.outcome.failures)
        return reports

    def _begin(self, state: _Round, engine: int) -> tuple[int, list[Command]]:
        return engine, self._commands(state, engine, "begin")

    def _bucket(self, state: _Round, engine: int, index: int) -> tuple[int, list[Command]]:
        return engine, self._commands(state, engine, "bucket", index)

    def _commands(self, state: _Round, engine: int, op: str, index: int = -1) -> list[Command]:
        """The message to each rank of an engine; "nothing" to one that has no bucket `index` any more."""
        order, commands = state.order, []
        for engine_rank in self.plan.ranks_of(engine):
            header = self._header(engine_rank, index) if op == "bucket" else None
            manifest = self.plan.manifest(engine_rank, order.delivery, order.session, order.version)
            commands.append(
                Command(
                    id=f"{order.delivery}/{engine_rank}/{op}/{index}",
                    op="nothing" if op == "bucket" and header is None else op,
                    delivery=order.delivery,
                    manifest=manifest if op == "begin" else None,
                    bucket=header,
                    channel={
                        "kind": "cuda" if engine_rank in state.shared else "arena",
                        "arena": state.arenas[engine_rank].spec.to_json(),
                        "slot": index % 2,
                        "shared": state.shared.get(engine_rank),
                    },
                )
            )
        return commands

    def _header(self, engine_rank: int, index: int) -> Bucket | None:
        buckets = self.plan.buckets(engine_rank)
        return buckets[index].header if index < len(buckets) else None

    # Memory

    def _open(self, state: _Round, specs: dict[int, ArenaSpec]) -> None:
        """Creates the arenas of the engines this rank leads, and maps those of all engines of the machine."""
        here = self._engines_here(state.order)
        if not here:
            return
        for engine in self._led(state):
            try:
                for engine_rank in self.plan.ranks_of(engine):
                    specs[engine_rank] = self._create(state.order, engine_rank)
            except ValueError as error:
                state.outcome.fail(engine, reason_of(error))
        own = self._own_slots(state) if self.device.type == "cuda" else {}
        created = {
            "arenas": {str(rank): spec.to_json() for rank, spec in specs.items()},
            "slots": {str(rank): share(slots) for rank, slots in own.items()},
        }
        what = f"delivery {state.order.delivery}, the arenas"
        everyone = self.node_group.exchange(created, what, state.deadline.left_s + self.grace_s)
        try:
            for others in everyone:
                for engine_rank, spec in others["arenas"].items():
                    arena = state.arenas[int(engine_rank)] = Arena(ArenaSpec.from_json(spec))
                    if self.device.type != "cuda":
                        state.slots[int(engine_rank)] = arena.slots
                for engine_rank, shared in others["slots"].items():
                    state.shared[int(engine_rank)] = shared
            for engine_rank, shared in state.shared.items():
                slots = own[engine_rank] if engine_rank in own else open_shared(shared)
                state.slots[engine_rank] = slots.view(2, -1)
        # The other ranks must hear of it instead of waiting for this one.
        except (OSError, RuntimeError, ValueError) as error:
            self._fail_all(state, f"trainer rank {self.rank}: {reason_of(error)}")
        for engine in here:
            ranks = self.plan.ranks_of(engine)
            if any(rank not in state.arenas or rank not in state.slots for rank in ranks):
                state.outcome.fail(engine, "it has no memory to be delivered through")
        state.engines = tuple(engine for engine in here if engine not in state.outcome.failures)
        reports = {rank: arena.report.numel() for rank, arena in state.arenas.items()}
        sizes = [reports.get(rank, 0) + slots.numel() for rank, slots in state.slots.items()]
        state.outcome.peak_bytes = max([state.outcome.peak_bytes, *sizes])

    def _create(self, order: Order, engine_rank: int) -> ArenaSpec:
        slot_bytes = 0 if self.device.type == "cuda" else self._slot_bytes(engine_rank)
        return create_arena(self.folder, f"{order.delivery}-{engine_rank}", slot_bytes)

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
        return {r: torch.empty(2 * self._slot_bytes(r), dtype=torch.uint8, device=self.device) for r in beside}

    # Other machines

    def _receive(self, state: _Round, index: int) -> list[tuple[PlannedBucket, int, torch.Tensor, Pending]]:
        """Starts to receive what other machines send through this rank in round `index`, also for engines that failed:
        their senders do not know of it."""
        if self.peers is None:
            return []
        pending = []
        for bucket, source in self._forwarded(self._engines_here(state.order), index):
            if self._deputy(bucket, source) == self.rank:
                segment = bucket.segments[source]
                data = torch.empty(segment.stop - segment.start, dtype=torch.uint8)
                pending.append((bucket, source, data, self.peers.receive(data, source)))
        return pending

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

    def _arrived(self, incoming, deadline: Deadline):
        """Segments as they come in."""
        for bucket, source, data, pending in incoming:
            pending.wait(deadline.at)
            yield bucket, source, data

    def _forwarded(self, engines: Sequence[int], index: int) -> list[tuple[PlannedBucket, int]]:
        """(bucket, source) pairs of round `index` whose source is not on the engine's machine, in one order for all."""
        pairs = []
        for bucket in self._buckets(engines, index):
            node = self._node_of(bucket.engine_rank // self.plan.engines.tensor_parallel)
            pairs += [(bucket, source) for source in bucket.segments if self.nodes.node_of(source) != node]
        return pairs

    def _deputy(self, bucket: PlannedBucket, source: int) -> int:
        """The rank of the engine's machine that takes a source's bytes in; sources are spread over its ranks."""
        ranks = self.nodes.ranks_of(self._node_of(bucket.engine_rank // self.plan.engines.tensor_parallel))
        return ranks[(source + bucket.engine_rank) % len(ranks)]

    # Who is where

    def _buckets(self, engines: Sequence[int], index: int) -> list[PlannedBucket]:
        ranks = [rank for engine in engines for rank in self.plan.ranks_of(engine)]
        return [self.plan.buckets(rank)[index] for rank in ranks if index < len(self.plan.buckets(rank))]

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
    control: EngineControl, commands: Sequence[Command], arenas: Sequence[Arena]
) -> tuple[Report, ...]:
    """Posts one command to each rank of an engine and reads their reports. EngineFailure names the rank."""
    for arena in arenas:
        arena.clear_report()
    control.update_weights_from_tensor([encode_payload(command) for command in commands], LOAD_FORMAT)
    reports = []
    for number, (command, arena) in enumerate(zip(commands, arenas)):
        try:
            reports.append(check_report(arena.read_report(), command))
        except ValueError as error:
            raise EngineFailure(f"rank {number} of the engine, {command.op}: {error}") from error
    return tuple(reports)
