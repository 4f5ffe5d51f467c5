"""What a process of a run is started with, and what all of its parts work with."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_dapo.config.schema import Config
from megatron_dapo.files.durable import Files
from megatron_dapo.trainer.recorder import Phases
from megatron_dapo.trainer.topology import RunTopology
from megatron_dapo.watch.heartbeat import Heartbeat
from megatron_dapo.watch.signals import StopRequest

if TYPE_CHECKING:
    from megatron_dapo.engines.sglang.supervisor import Supervision


@dataclass(frozen=True)
class RunProcess:
    """One process of a run, as its launcher starts it."""

    rank: int
    world_size: int
    rendezvous_host: str  # rank 0's node; each node finds its own address by its route there
    num_nodes: int = 1
    heartbeat: Heartbeat | None = None
    end_time: float | None = None  # deadline of the launcher, seconds since 1970; None if unknown
    supervision: Supervision | None = None  # servers that outlive a failure; None if nothing restarts the processes


@dataclass(frozen=True)
class RunContext:
    """What the parts of one process have in common."""

    config: Config
    topology: RunTopology
    phases: Phases
    files: Files
    stop: StopRequest
    stack: ExitStack  # closes the parts at the end, the newest first
