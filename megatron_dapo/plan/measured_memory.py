"""What every rank's GPU really holds after the first step, against the plan's components, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_dapo.plan.memory import RunMemory
from megatron_dapo.rounding import GIB

MEASURED_MEMORY = "plan_memory.json"
# Components of the plan that a server's rank holds.
_SERVER = ("engine_weights", "kv_tokens", "states", "graphs_and_prefill", "engine_context")


@dataclass(frozen=True)
class RankMemory:
    """Measured bytes of one rank; None if unavailable, as on a CPU or in a container that hides processes."""

    rank: int
    host: int  # resident memory of the process
    total: int | None = None  # memory of its GPU
    free: int | None = None
    reserved: int | None = None  # torch's allocator, now
    peak_reserved: int | None = None
    process: int | None = None  # taken by this process on its GPU, as the driver reports it
    servers: int | None = None  # taken by the other processes on its GPU


@dataclass(frozen=True)
class Exceeded:
    """A component of the plan that is larger than planned."""

    component: str
    rank: int
    planned: int
    measured: int

    def __str__(self) -> str:
        return (
            f"{self.component}: {self.measured / GIB:.1f} GiB on rank {self.rank}, planned {self.planned / GIB:.1f}; "
            "lower sglang.mem_fraction_static or parallel sizes before the GPU is full (docs/plan.md)"
        )


def exceeded(memory: RunMemory, ranks: Sequence[RankMemory]) -> Iterator[Exceeded]:
    """Yield each component whose plan some rank exceeds, with the rank that exceeds it most."""
    parts = {phase.phase: phase.parts for phase in memory.phases}
    train, generate = parts["train"], parts.get("generate", {})
    outside = ("context", "communication", "engine_asleep")
    limits = {
        "context and communication": train["context"] + train["communication"],
        "tensors and slack": max(
            sum(size for name, size in parts[phase].items() if name not in outside)
            for phase in ("train", "train_critic", "log_probs")
            if phase in parts
        ),
    }
    if "trainer" in generate:  # servers on the trainer's GPUs
        limits["servers"] = sum(generate.get(name, 0) for name in _SERVER)
    for component, limit in limits.items():
        found = [(size, one.rank) for one in ranks if (size := _measured(component, one)) is not None]
        if found and max(found)[0] > limit:
            size, rank = max(found)
            yield Exceeded(component, rank, limit, size)


def _measured(component: str, rank: RankMemory) -> int | None:
    if component == "servers":
        return rank.servers
    if component == "tensors and slack":
        return rank.peak_reserved
    if rank.process is None or rank.reserved is None:
        return None
    return rank.process - rank.reserved


def memory_document(train_step: int, memory: RunMemory | None, ranks: Sequence[RankMemory]) -> dict[str, Any]:
    """Return the stored record: planned components by phase and measured bytes by rank. `memory`: None for an unknown
    device."""
    planned: Mapping[str, Any] = {phase.phase: dict(phase.parts) for phase in memory.phases} if memory else {}
    found = [str(one) for one in exceeded(memory, ranks)] if memory else []
    return {"train_step": train_step, "planned": planned, "ranks": [asdict(one) for one in ranks], "exceeded": found}
