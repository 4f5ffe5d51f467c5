"""Faults, the phases that they hit, and what a run must do about each."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable
from dataclasses import dataclass

# Phases of the matrix -> phases as the ranks' heartbeats name them.
PHASES = {
    "generate": ("generate",),
    "score": ("score",),  # rank 0 is in `generate` and waits for verifiers
    "train": ("train", "logprobs"),
    "weight_sync": ("weight_sync",),
    "checkpoint": ("checkpoint",),
    "evaluate": ("evaluate",),
}

# What a run must do.
CRASH = "crash"  # name the culprit, end with exit code 75 and continue in another attempt; noticed at once
SILENCE = "silence"  # the same; noticed only by a deadline
SURVIVED = "survived"  # continue in the same attempt, without declaring a failure
STOP = "stop"  # save, end in order
SLURM = "slurm"  # only Slurm can see it: continue in another attempt


@dataclass(frozen=True)
class Fault:
    """One kind of fault."""

    name: str
    kind: str  # CRASH, ...
    meaning: str
    causes: tuple[str, ...] = ()  # causes in failure.json that name it
    scope: str = "rank"  # "rank"; "node" (rank -1); "pair": the node and another one (rank -1); "shared": whichever rank met it first
    configuration: str = "embedded"  # "embedded" engine, or "servers"


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("sigkill", CRASH, "SIGKILL of a rank", ("signal",)),
        Fault("sigkill-start", CRASH, "SIGKILL of a rank, and of the same one of the next attempt as soon as it is there", ("signal",)),
        Fault("sigstop", SILENCE, "SIGSTOP of a rank", ("stopped",)),
        Fault("oom", CRASH, "the node's memory limit is met and the kernel kills the rank", ("out of memory",)),
        Fault("unplug", SILENCE, "the node's link is down both ways", ("link lost",), "node"),
        Fault("mute", SILENCE, "the node's link is down one way: it hears and is not heard", ("link lost", "node lost"), "node"),
        Fault("deafen", SILENCE, "the node's link is down one way: it is heard and does not hear", ("link lost", "node lost"), "node"),
        Fault("path-lost", SILENCE, "what the node sends to another one goes nowhere; both reach all others", ("path lost",), "pair"),
        Fault("throttle", SURVIVED, "the node sends at 1 Mbit/s for a while"),
        Fault("lossy", SURVIVED, "the node's frames are delayed by 20 ms both ways, and 2 % are lost, for a while"),
        Fault("disk-full", CRASH, "the file system of the run directory is full", ("disk full",), "shared"),
        Fault("fs-hung", SILENCE, "writes to the file system of the run directory hang", ("file system hung",), "shared"),
        Fault("unmount", SILENCE, "the file system of the run directory is unmounted on the node (lazily)", ("file system lost",)),
        Fault("slurmd", SLURM, "SIGKILL of the node's slurmd"),
        Fault("power-off", SILENCE, "the node is powered off, and booted again", ("node lost", "link lost"), "node"),
        Fault("scancel", STOP, "scancel of the job, which is then submitted again"),
        Fault("time-limit", STOP, "the job's time limit comes near"),
        Fault("verifiers", SURVIVED, "SIGKILL of all verifier processes"),
        Fault("server", SURVIVED, "SIGKILL of a node's SGLang server", configuration="servers"),
    )
}  # fmt: skip

_NO_WRITE = "no rank writes in this phase: it is noticed at the next checkpoint, which is a separate cell"
_NO_TRAFFIC = "nodes exchange only heartbeats in this phase: the same as a healthy run"
MEANINGLESS = {
    **{
        (fault, phase): _NO_WRITE
        for fault in ("disk-full", "fs-hung")
        for phase in ("generate", "score", "weight_sync")
    },
    **{(fault, "score"): _NO_TRAFFIC for fault in ("throttle", "lossy")},
    ("server", "score"): "servers score nothing, and responses are scored during generation: the same as generate",
}

Cell = tuple[str, str]  # names of fault and phase
CELLS: tuple[Cell, ...] = tuple(
    (fault, phase) for fault in FAULTS for phase in PHASES if (fault, phase) not in MEANINGLESS
)
# One of each kind that a minute each suffices for: for a check of every change.
TINY: tuple[Cell, ...] = (
    ("sigkill", "train"),
    ("sigstop", "generate"),
    ("verifiers", "score"),
    ("oom", "evaluate"),
    ("unplug", "generate"),
    ("disk-full", "checkpoint"),
    ("verifiers", "evaluate"),
    ("sigkill", "checkpoint"),
)


def chosen_cells(patterns: Iterable[str]) -> list[Cell]:
    """Return the cells that any of `fault:phase` names, `*` for all. Raises ValueError for a name that names none."""
    found: list[Cell] = []
    for pattern in patterns:
        fault, _, phase = pattern.partition(":")
        some = [cell for cell in CELLS if fault in (cell[0], "*") and (phase or "*") in (cell[1], "*")]
        if not some:
            reason = MEANINGLESS.get((fault, phase), f"faults are {', '.join(FAULTS)}; phases are {', '.join(PHASES)}")
            raise ValueError(f"no cell {pattern!r}: {reason}")
        found += [cell for cell in some if cell not in found]
    return found


def next_cells(cells: Collection[Cell], counts: dict[Cell, int], num: int, draw: random.Random) -> list[Cell]:
    """Return `num` cells, those with the fewest results first, in random order among equals."""
    taken, plan = dict(counts), []
    for _ in range(num):
        fewest = min(taken.get(cell, 0) for cell in cells)
        cell = draw.choice([cell for cell in cells if taken.get(cell, 0) == fewest])
        taken[cell] = taken.get(cell, 0) + 1
        plan.append(cell)
    return plan


def table() -> str:
    """Return the matrix as text: what each fault does, and why cells mean nothing."""
    lines = ["phases: " + ", ".join(PHASES), ""]
    for fault in FAULTS.values():
        lines.append(
            f"{fault.name:<13} {fault.kind:<9} {fault.meaning}{f' -> {chr(34)}' + f'{chr(34)} or {chr(34)}'.join(fault.causes) + chr(34) if fault.causes else ''}"
        )
    lines += ["", f"{len(CELLS)} cells; these mean nothing:"]
    lines += [f"{fault} x {phase}: {reason}" for (fault, phase), reason in MEANINGLESS.items()]
    return "\n".join(lines)
