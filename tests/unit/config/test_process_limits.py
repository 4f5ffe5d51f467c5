"""Cores and memory that are left to this process, from made-up control groups of both versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_dapo.config.process_limits import process_limits


def group(root: Path, membership: str, files: dict[str, str]) -> Path:
    """A made-up root with control groups."""
    for name, text in {"proc/self/cgroup": membership, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    return root


def test_limits_of_a_job_by_control_groups_of_version_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_dapo.config.process_limits.cpus_at_start", lambda: set(range(8)))
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    job = "sys/fs/cgroup/slurm/job_42"
    root = group(
        tmp_path,
        "0::/slurm/job_42/step_0",
        {f"{job}/step_0/memory.max": "max", f"{job}/memory.max": str(4 << 30), f"{job}/cpu.max": "150000 100000"},
    )
    limits = process_limits(root)
    assert (limits.cores, limits.memory, limits.job) == (2, 4 << 30, "Slurm job 42")
    assert limits.usable_memory == min(4 << 30, limits.machine_memory)


def test_limits_of_a_container_by_control_groups_of_version_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_dapo.config.process_limits.cpus_at_start", lambda: set(range(8)))
    memory, cpu = "sys/fs/cgroup/memory", "sys/fs/cgroup/cpu,cpuacct"
    root = group(
        tmp_path,
        "4:memory:/docker/f00\n3:cpu,cpuacct:/docker/f00",
        {
            f"{memory}/memory.limit_in_bytes": str(8 << 30),  # the container's: its path on the host is not here
            f"{cpu}/cpu.cfs_quota_us": "100000",
            f"{cpu}/cpu.cfs_period_us": "100000",
        },
    )
    limits = process_limits(root)
    assert (limits.cores, limits.memory) == (1, 8 << 30)


def test_one_core_by_affinity_without_control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_dapo.config.process_limits.cpus_at_start", lambda: {3})
    limits = process_limits(tmp_path)
    assert (limits.cores, limits.memory) == (1, None) and limits.machine_memory > 1 << 28
    unlimited = group(
        tmp_path,
        "4:memory:/",
        {
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            "sys/fs/cgroup/memory/cpu.cfs_quota_us": "-1",
        },
    )
    assert process_limits(unlimited).memory is None
    assert process_limits(unlimited).usable_memory == limits.machine_memory
