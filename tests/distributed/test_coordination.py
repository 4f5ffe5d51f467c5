"""Ranks wait for each other through host memory, never in the default group, and progress on rank 0 postpones deadlines."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch.distributed as dist
from launcher import run_distributed, target_in

from megatron_dapo.parallel import rank0_commands
from megatron_dapo.parallel.coordination import coordinate
from megatron_dapo.parallel.rank0_commands import Rank0Commands
from megatron_dapo.parallel.rank_set import partition_ranks
from megatron_dapo.recovery.heartbeat import Heartbeat

COLLECTIVES = ("broadcast", "all_gather", "all_reduce", "barrier", "monitored_barrier")


class CudaDefaultGroup:
    """Stands in for a default group on GPUs: its backend is NCCL, and each of its collectives is counted."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._originals = {name: getattr(dist, name) for name in (*COLLECTIVES, "get_backend")}

    def __enter__(self) -> CudaDefaultGroup:
        for name in COLLECTIVES:
            setattr(dist, name, self._counted(name))
        dist.get_backend = self._backend
        return self

    def __exit__(self, *error: object) -> None:
        for name, original in self._originals.items():
            setattr(dist, name, original)

    def _backend(self, group: Any = None) -> str:
        return "nccl" if group in (None, dist.group.WORLD) else self._originals["get_backend"](group)

    def _counted(self, name: str) -> Any:
        def call(*arguments: Any, group: Any = None, **options: Any) -> Any:
            groups = [group, *(value for value in arguments if isinstance(value, dist.ProcessGroup))]
            if all(value in (None, dist.group.WORLD) for value in groups):
                self.calls.append(name)
            options |= {"group": group} if group is not None else {}
            return self._originals[name](*arguments, **options)

        return call


def commands_and_waits(_: Any) -> dict[str, Any]:
    rank, seen = dist.get_rank(), []
    with CudaDefaultGroup() as default:
        everyone = coordinate(range(3), timeout_s=30)
        policy, critic = partition_ranks(1, timeout_s=30, progress=everyone.progress)
        default.calls.clear()  # creating groups uses collectives of its own
        commands = Rank0Commands(everyone)
        if policy.is_member:  # the critic's rank has no engine and ignores the command
            commands.handlers["poll"] = lambda command: seen.append(policy.coordination.gather([rank, command["n"]]))

        def body() -> str:
            commands.command("poll", n=1)
            commands.command("poll", n=2)
            return "batch"

        result = commands.run_on_rank0(body)
        assert everyone.broadcast({"from": 2} if rank == 2 else None, source=2) == {"from": 2}
        assert everyone.all_true(True) and not everyone.all_true(rank != 1)
        everyone.barrier("everybody")
        assert (result == "batch") == (rank == 0)
        assert seen == ([] if critic.is_member else [[[0, n], [1, n]] for n in (1, 2)])
        calls = everyone.gather(default.calls)
    return {"calls": calls}


def test_no_wait_runs_in_the_default_group() -> None:
    assert run_distributed(target_in(__file__, "commands_and_waits"), 3, timeout_s=60) == {"calls": [[], [], []]}


def failing_body(_: Any) -> str:
    commands = Rank0Commands(coordinate(range(2), timeout_s=30))

    def body() -> None:
        raise ValueError("no prompts left")

    error = ValueError if dist.get_rank() == 0 else RuntimeError
    with pytest.raises(error, match="no prompts left"):
        commands.run_on_rank0(body)
    return "known to all"


def test_a_failure_on_rank_0_reaches_every_rank() -> None:
    assert run_distributed(target_in(__file__, "failing_body"), 2, timeout_s=60) == "known to all"


def long_phase(reports: bool) -> list[list[str]]:
    """Three times the limit on rank 0; the other rank only waits for its commands."""
    everyone, expired = coordinate(range(2), timeout_s=30), []
    commands = Rank0Commands(everyone)
    rank0_commands._REPORT_INTERVAL_S = 0.1

    def body() -> None:
        end = time.monotonic() + 6.0
        while time.monotonic() < end:
            time.sleep(0.1)
            if reports:
                commands.report_progress()

    heartbeat = Heartbeat(everyone.rank)
    heartbeat._expire = lambda failure: (expired.append(failure.where), setattr(heartbeat, "_has_reported", True))
    threading.Thread(target=heartbeat._beat, daemon=True).start()
    with heartbeat.phase("generate", everyone.progress, deadline_s=2.0):
        commands.run_on_rank0(body)
    return everyone.gather(expired)


@pytest.mark.parametrize("reports", [True, False])
def test_finished_responses_postpone_the_deadline_of_every_rank(reports: bool) -> None:
    expired = run_distributed(target_in(__file__, "long_phase"), 2, reports, timeout_s=60)
    if reports:
        assert expired == [[], []]
    else:
        assert all(
            found.startswith(f"rank {rank} (") and "phase generate" in found for rank, [found] in enumerate(expired)
        )


def late_rank(_: Any) -> str:
    everyone = coordinate(range(2), timeout_s=0.5)
    if everyone.rank == 1:
        return ""
    with pytest.raises(TimeoutError, match=r"rank 0 of 2 waited 0.5 s for the checkpoint to be written: .*[Rr]ank.*1"):
        everyone.barrier("the checkpoint to be written")
    return "named"


def test_barrier_names_its_purpose_and_the_missing_ranks() -> None:
    assert run_distributed(target_in(__file__, "late_rank"), 2, timeout_s=30) == "named"
