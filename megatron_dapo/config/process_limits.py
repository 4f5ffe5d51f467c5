"""Cores and host memory that this process may use under its affinity and control groups."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_dapo.affinity import cpus_at_start


@dataclass(frozen=True)
class ProcessLimits:
    """Cores and host memory that this process may use, and those of the machine. `job`: the scheduler's job, "" for
    none."""

    cores: int
    machine_cores: int
    memory: int | None  # bytes; None: no limit
    machine_memory: int
    job: str = ""

    @property
    def usable_memory(self) -> int:
        """Bytes of host memory that this process may use."""
        return min(self.memory or self.machine_memory, self.machine_memory)


def process_limits(root: Path = Path("/")) -> ProcessLimits:
    """Return cores and memory left to this process by its affinity and its control groups, version 1 or 2."""
    limits = [value for file in _cgroup_files(root) if (value := _limit(file)) is not None]
    memory = min((value for kind, value in limits if kind == "memory"), default=None)
    quota = min((value for kind, value in limits if kind == "cpu"), default=math.inf)
    job = os.environ.get("SLURM_JOB_ID", "")
    return ProcessLimits(
        cores=min(len(cpus_at_start()), max(1, math.ceil(quota)) if quota < math.inf else sys.maxsize),
        machine_cores=os.cpu_count() or 1,
        memory=None if memory is None else int(memory),
        machine_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        job=f"Slurm job {job}" if job else "",
    )


def multiplies_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return True if this machine's cores have instructions for products of bfloat16."""
    try:
        return any(flag in cpuinfo.read_text(encoding="utf-8") for flag in ("avx512_bf16", "amx_bf16", " bf16"))
    except OSError:
        return False


def _cgroup_files(root: Path) -> Iterator[Path]:
    """Yield the limits of this process's control groups and of their parents; the lowest one applies."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        top = root / "sys/fs/cgroup" / controllers
        # Inside a container, the path may be the host's, which is not mounted; the mount itself is then the group.
        for group in (top / path.lstrip("/"), *(top / path.lstrip("/")).parents):
            yield from (group / name for name in ("memory.max", "memory.limit_in_bytes", "cpu.max", "cpu.cfs_quota_us"))
            if group == top:
                break


def _limit(file: Path) -> tuple[str, float] | None:
    """Return ("memory", bytes) or ("cpu", cores) from a control group's file; None if it is missing or sets no
    limit."""
    try:
        words = file.read_text(encoding="utf-8").split()
        if file.name == "cpu.cfs_quota_us":
            words.append((file.parent / "cpu.cfs_period_us").read_text(encoding="utf-8").strip())
    except OSError:
        return None
    # "max" and -1 mean no limit; version 1 writes an absent memory limit as a number near 2^63.
    if words[0] in ("max", "-1") or float(words[0]) > 2**60:
        return None
    return ("memory", float(words[0])) if len(words) == 1 else ("cpu", float(words[0]) / float(words[1]))
