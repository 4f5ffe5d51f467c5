"""The one place that reads the process environment a launcher sets (torchrun or srun)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class ProcessEnvironment:
    """Who this process is among those of the run."""

    rank: int
    world_size: int
    local_rank: int


_NAMES = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "srun": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
}


def process_environment(environment: Mapping[str, str] | None = None) -> ProcessEnvironment:
    """Reads rank, world size and local rank as torchrun sets them, else as srun does; without either a world of one.

    Raises ValueError where a launcher set some of its variables but not all.
    """
    environment = os.environ if environment is None else environment
    for launcher, names in _NAMES.items():
        found = [name for name in names if name in environment]
        if len(found) == len(names):
            return ProcessEnvironment(*(int(environment[name]) for name in names))
        if found and launcher == "torchrun":
            missing = sorted(set(names) - set(found))
            raise ValueError(
                f"{', '.join(found)} are set but {', '.join(missing)} are not; start the workers with torchrun or srun"
            )
    return ProcessEnvironment(rank=0, world_size=1, local_rank=0)


def prepare_rendezvous(process: ProcessEnvironment, address: str = "127.0.0.1", port: int = 29500) -> None:
    """Writes what torch.distributed reads at start-up where the launcher did not (srun, or a plain single process)."""
    os.environ.setdefault("MASTER_ADDR", address)
    os.environ.setdefault("MASTER_PORT", str(port))
    os.environ.setdefault("RANK", str(process.rank))
    os.environ.setdefault("WORLD_SIZE", str(process.world_size))
    os.environ.setdefault("LOCAL_RANK", str(process.local_rank))


def rendezvous_host() -> str:
    """The machine of rank 0, as the launcher names it."""
    return os.environ.get("MASTER_ADDR", "127.0.0.1")
