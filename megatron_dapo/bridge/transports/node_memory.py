"""Memory through which the engine ranks of one node get their weights: an arena each, with bucket slots.

On a CPU the slots are part of the arena. With a CUDA `device` they are memory of the GPU that the engine rank shares with
a trainer rank, opened by all other ranks through IPC handles; on the CPU of a run with GPUs they are pinned.

Arenas are kept between weight syncs as long as their engine lives: existing pages are written several times as fast as
new ones. Slots on a GPU are kept until `close`: memory must not be freed while another process has it open, and the
trainer cannot know when an engine that hangs or was killed has closed it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_dapo.bridge.protocol.arena import Arena, ArenaSpec, create_arena, remove_arena, remove_stale
from megatron_dapo.bridge.protocol.cuda_memory import open_shared, share
from megatron_dapo.bridge.protocol.progress import NUM_SLOTS
from megatron_dapo.bridge.sync_plan import slot_bytes
from megatron_dapo.bridge.transports.base import ServerControl, SyncRequest, reason_of
from megatron_dapo.bridge.transports.forwarding import EngineNodes
from megatron_dapo.parallel.coordination import Coordination


@dataclass
class SyncMemory:
    """Memory of one rank for one weight sync, by engine rank."""

    arenas: dict[int, Arena] = field(default_factory=dict)
    slots: dict[int, torch.Tensor] = field(default_factory=dict)  # [2, bytes] uint8
    shared: dict[int, Mapping[str, Any]] = field(default_factory=dict)  # IPC handle of the slots on a GPU
    linked: dict[int, ArenaSpec] = field(default_factory=dict)  # made here, and not mapped by their engine yet
    failures: dict[int, str] = field(default_factory=dict)  # engine -> reason it has no memory
    pids: tuple[int, ...] = ()  # the trainer's processes on this node
    is_new: bool = False  # Some rank of the node had to map memory, which may have failed.

    @property
    def peak_bytes(self) -> int:
        """Bytes of the largest engine rank."""
        replies = {rank: arena.reply.numel() for rank, arena in self.arenas.items()}
        return max((replies.get(rank, 0) + slots.numel() for rank, slots in self.slots.items()), default=0)

    def stop(self, engine_ranks: Iterable[int]) -> None:
        """End all waiting for these engine ranks, and theirs for this rank."""
        for engine_rank in engine_ranks:
            if engine_rank in self.arenas:
                self.arenas[engine_rank].progress.stop()

    def unlink(self, engine_ranks: Iterable[int]) -> None:
        """Unlink arenas once every process that uses them has mapped them, or never will."""
        for engine_rank in engine_ranks:
            if engine_rank in self.linked:
                remove_arena(self.linked[engine_rank])


class NodeMemory:
    """Creates, opens and keeps the memory. `directory`: of the arenas; `device`: of this rank's slots."""

    def __init__(self, nodes: EngineNodes, node_group: Coordination, directory: Path, device: torch.device) -> None:
        self.device = device
        self._nodes = nodes
        self._node_group = node_group
        self._directory = directory
        self._kept: dict[int, Arena] = {}  # engine rank -> its arena, unlinked and mapped by all that use it
        self._kept_for: dict[int, ServerControl] = {}  # engines this rank leads: whose processes have mapped theirs
        self._own_slots: dict[int, tuple[Mapping[str, Any], torch.Tensor]] = {}  # engine rank -> (handle, slots)
        self._opened: dict[int, tuple[Mapping[str, Any], torch.Tensor]] = {}
        remove_stale(directory)  # left by runs that were killed

    def open(self, request: SyncRequest, memory: SyncMemory, timeout_s: float) -> None:
        """Fill `memory`: create arenas that engines led by this rank lack, and map those of all engines of the node.

        Collective among the node's ranks.
        """
        here = self._nodes.engines_here(request)
        if not here:
            return
        self._create(request, memory)
        announced = {
            "pid": os.getpid(),
            "arenas": {str(rank): spec.to_json() for rank, spec in memory.linked.items()},
            "slots": {str(rank): handle for rank, (handle, _) in self._make_slots(here).items()},
        }
        what = f"weight sync {request.sync_id}, the arenas"
        everyone = self._node_group.gather(announced, what, timeout_s)
        memory.pids = tuple(int(others["pid"]) for others in everyone)
        memory.is_new = any(others["arenas"] or others["slots"] for others in everyone)
        try:
            self._map(here, memory, everyone)
        # The other ranks must hear of it instead of waiting for this one.
        except (OSError, RuntimeError, ValueError) as error:
            for engine in request.engines:
                memory.failures.setdefault(engine, f"trainer rank {self._nodes.rank}: {reason_of(error)}")
        for engine in here:
            ranks = self._nodes.plan.ranks_of(engine)
            if any(rank not in memory.arenas or rank not in memory.slots for rank in ranks):
                memory.failures.setdefault(engine, "it has no shared memory on this node")

    def forget(self, engines: Iterable[int]) -> None:
        """Give these engines new arenas next time: one that failed may still work on an old message, or has mapped nothing."""
        for engine in engines:
            self._kept_for.pop(engine, None)
            for engine_rank in self._nodes.plan.ranks_of(engine):
                self._kept.pop(engine_rank, None)

    def close(self) -> None:
        """Release everything kept for the next weight sync."""
        for kept in (self._kept, self._kept_for, self._own_slots, self._opened):
            kept.clear()

    def _create(self, request: SyncRequest, memory: SyncMemory) -> None:
        """Reset the kept arenas of the engines this rank leads and create the others."""
        nodes = self._nodes
        for engine in nodes.handles.led_by(nodes.rank, nodes.engines_here(request)):
            control, ranks = nodes.handles.controls[engine], nodes.plan.ranks_of(engine)
            if self._kept_for.get(engine) is control:
                for engine_rank in ranks:
                    self._kept[engine_rank].progress.start(request.number)
                continue
            try:
                for engine_rank in ranks:
                    # On a GPU the arena holds only the reply and the counters.
                    num_bytes = 0 if self.device.type == "cuda" else slot_bytes(nodes.plan, engine_rank)
                    spec = create_arena(self._directory, f"{request.sync_id}-{engine_rank}", num_bytes)
                    memory.linked[engine_rank] = spec
                    Arena(spec).progress.start(request.number)
                self._kept_for[engine] = control
            except (OSError, RuntimeError, ValueError) as error:
                memory.failures[engine] = reason_of(error)

    def _map(self, here: Sequence[int], memory: SyncMemory, everyone: Sequence[Mapping[str, Any]]) -> None:
        for others in everyone:
            for engine_rank, spec in others["arenas"].items():
                # The first collective of a run with GPUs has initialized CUDA; without, there is nothing to pin for.
                pinned = torch.cuda.is_initialized()
                self._kept[int(engine_rank)] = Arena(ArenaSpec.from_json(spec), pinned=pinned)
            memory.shared.update((int(engine_rank), handle) for engine_rank, handle in others["slots"].items())
        ranks_here = [rank for engine in here for rank in self._nodes.plan.ranks_of(engine)]
        memory.arenas.update((rank, self._kept[rank]) for rank in ranks_here if rank in self._kept)
        if self.device.type != "cuda":
            memory.slots.update((rank, arena.slots) for rank, arena in memory.arenas.items())
        for engine_rank, handle in memory.shared.items():
            memory.slots[engine_rank] = self._slots_of(engine_rank, handle).view(NUM_SLOTS, -1)

    # Slots on a GPU

    def _make_slots(self, here: Sequence[int]) -> Mapping[int, tuple[Mapping[str, Any], torch.Tensor]]:
        """Return handles and slots on this rank's GPU, of the engine ranks that share it."""
        nodes = self._nodes
        ranks = [rank for engine in here for rank in nodes.plan.ranks_of(engine)] if self.device.type == "cuda" else []
        beside = [rank for rank in ranks if nodes.beside(rank) == nodes.rank]
        for rank in beside:
            if rank not in self._own_slots:
                slots = torch.empty(NUM_SLOTS * slot_bytes(nodes.plan, rank), dtype=torch.uint8, device=self.device)
                self._own_slots[rank] = (share(slots), slots)
        return {rank: self._own_slots[rank] for rank in beside}

    def _slots_of(self, engine_rank: int, handle: Mapping[str, Any]) -> torch.Tensor:
        """Return the slots of a handle. A process may not open its own CUDA handle, and another's only once."""
        if engine_rank in self._own_slots:
            return self._own_slots[engine_rank][1]
        known = self._opened.get(engine_rank)
        if known is None or known[0] != handle:
            self._opened.pop(engine_rank, None)
            self._opened[engine_rank] = (handle, open_shared(handle, self.device))
        return self._opened[engine_rank][1]
