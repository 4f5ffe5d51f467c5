"""Disk space that the checkpoints of a run will need, against the free space of their file system.

    needed = (checkpoints at a time, including the one in flight) x (unique bytes of policy and critic) - (bytes there)

Unique bytes count every parameter once: weight, fp32 main param if the weight is 16-bit, two fp32 moments. Not counted
is what has no fixed size: the replay buffer with unfinished responses, and the exported models.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from megatron_dapo.checkpoints.retention import KeepPolicy, most_checkpoints
from megatron_dapo.config.rules import ConfigError, Violation
from megatron_dapo.config.schema import Config
from megatron_dapo.models.architecture import ModelArchitecture
from megatron_dapo.plan.memory import ITEM_SIZES, num_parameters, policy_parameters, run_checkpoint_bytes

_CHECKPOINT = re.compile(r"step_\d{6,}.*")


@dataclass(frozen=True)
class CheckpointSpace:
    directory: Path
    needed: int  # bytes beyond those already on disk
    free: int
    formula: str  # computation of `needed`, with its numbers

    def require(self) -> None:
        """Raise ConfigError with both numbers if the free space is too small."""
        if self.free >= self.needed:
            return
        values = {"needed": size(self.needed), "free": size(self.free), "directory": str(self.directory)}
        fix = "free space, set checkpoint.output_dir to a larger disk, or lower checkpoint.keep"
        raise ConfigError(
            [Violation("checkpoint.keep", f"space for the checkpoints: needed = {self.formula} <= free", fix, values)]
        )


def keep_policy(config: Config) -> KeepPolicy:
    section = config.checkpoint
    return KeepPolicy(section.keep, section.keep_every, section.keep_best, section.keep_best_is)


def checkpoint_space(config: Config, architecture: ModelArchitecture, free: int | None = None) -> CheckpointSpace:
    """Compute the space of a run's checkpoints. `free`: free bytes of their file system; None: measure them here."""
    directory, dtype = config.checkpoint_dir, config.model.dtype
    models = {"policy": False, **({"critic": True} if config.has_critic else {})}
    num_bytes = run_checkpoint_bytes(config, architecture)
    number = most_checkpoints(keep_policy(config), config.checkpoint.interval, config.run.total_steps)
    present = bytes_of_checkpoints(directory)
    item = ITEM_SIZES[dtype]
    parts = f"{item} weight + {0 if dtype == 'float32' else 4} main param + 8 moments"
    numbers = {
        name: num_parameters(architecture, True) if has_head else policy_parameters(config, architecture)
        for name, has_head in models.items()
    }
    counts = " + ".join(f"{count:.4g} parameters of the {name}" for name, count in numbers.items())
    if snapshots := len(config.distillation.snapshots):
        parts += f" + {snapshots} x {item} weight of teachers"
    formula = f"{number} checkpoints, one in flight, of {size(num_bytes)} = ({counts}) x ({parts}) bytes"
    return CheckpointSpace(
        directory,
        needed=max(0, number * num_bytes - present),
        free=free_bytes(directory) if free is None else free,
        formula=formula + (f", less {size(present)} there" if present else ""),
    )


def existing_parent(path: Path) -> Path:
    """Return the path, or the nearest directory above it that exists."""
    path = path.absolute()
    return next(parent for parent in (path, *path.parents) if parent.exists())


def free_bytes(path: Path) -> int:
    """Return the free bytes of the file system that `path` is on, or will be."""
    return shutil.disk_usage(existing_parent(path)).free


def bytes_of_checkpoints(directory: Path) -> int:
    """Return the bytes of all checkpoints in a directory, unfinished ones included; 0 if it does not exist."""
    entries = directory.iterdir() if directory.is_dir() else ()
    found = (entry for entry in entries if _CHECKPOINT.fullmatch(entry.name))
    return sum(_file_bytes(file) for entry in found for file in entry.rglob("*"))


def _file_bytes(file: Path) -> int:
    try:
        return file.lstat().st_size if file.is_file() else 0
    except FileNotFoundError:  # a run that writes there may delete old checkpoints meanwhile
        return 0


def size(num_bytes: float) -> str:
    """Format bytes with a unit."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.3g} {unit}"
    return f"{num_bytes:.0f} B"
