"""Ranks wait for each other through host memory, never in the default group, and progress on rank 0 postpones deadlines."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launcher import RankProcess, output_of, run_distributed, start_job, target_in

from megatron_dapo.parallel import rank0_commands
from megatron_dapo.parallel.coordination import CoordinationError, coordinate
from megatron_dapo.parallel.rank0_commands import Rank0Commands
from megatron_dapo.parallel.rank_set import partition_ranks
from megatron_dapo.watch.heartbeat import Heartbeat

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
    assert run_distributed(target_in(__file__, "commands_and_waits"), 3) == {"calls": [[], [], []]}


def failing_body(_: Any) -> str:
    commands = Rank0Commands(coordinate(range(2), timeout_s=30))

    def body() -> None:
        raise ValueError("no prompts left")

    error = ValueError if dist.get_rank() == 0 else RuntimeError
    with pytest.raises(error, match="no prompts left"):
        commands.run_on_rank0(body)
    return "known to all"


def test_a_failure_on_rank_0_reaches_every_rank() -> None:
    assert run_distributed(target_in(__file__, "failing_body"), 2) == "known to all"


def long_phase(reports: bool) -> list[list[str]]:
    """Twice the limit on rank 0; the other rank only waits for its commands."""
    everyone, expired = coordinate(range(2), timeout_s=30), []
    commands = Rank0Commands(everyone)
    rank0_commands._REPORT_INTERVAL_S = 0.1

    def body() -> None:
        end = time.monotonic() + 9.0
        while time.monotonic() < end:
            time.sleep(0.1)
            if reports:
                commands.report_progress()

    heartbeat = Heartbeat(everyone.rank)
    heartbeat._expire = lambda failure: (expired.append(failure.where), setattr(heartbeat, "_has_reported", True))
    threading.Thread(target=heartbeat._beat, daemon=True).start()
    with heartbeat.phase("generate", everyone.progress, deadline_s=4.0):
        commands.run_on_rank0(body)
    return everyone.gather(expired)


@pytest.mark.parametrize("reports", [True, False])
def test_finished_responses_postpone_the_deadline_of_every_rank(reports: bool) -> None:
    expired = run_distributed(target_in(__file__, "long_phase"), 2, reports)
    if reports:
        assert expired == [[], []]
    else:
        assert all(
            found.startswith(f"rank {rank} (") and "phase generate" in found for rank, [found] in enumerate(expired)
        )


def late_rank(_: Any) -> str:
    everyone = coordinate(range(2), timeout_s=2.0)
    if everyone.rank == 0:
        message = r"rank 0 of 2 waited 2 s for the checkpoint to be written: .*[Rr]ank.*1"
        with pytest.raises(TimeoutError, match=message):
            everyone.barrier("the checkpoint to be written")
    dist.barrier()  # a rank that returned would close its connections
    return "named"


def test_barrier_names_its_purpose_and_the_missing_ranks() -> None:
    assert run_distributed(target_in(__file__, "late_rank"), 2) == "named"


def tree(_: Any) -> list[int]:
    """Three levels of groups of two: every exchange must give what one group of all ranks would."""
    before = _num_sockets()
    everyone = coordinate(range(5), timeout_s=30, group_size=2, fan_out=2)
    opened = _num_sockets() - before
    rank, ranks = dist.get_rank(), range(5)
    assert (everyone.rank, everyone.size) == (rank, 5)
    for length in (1, 1016, 1017, 5000):
        text = {r: f"{r}" + "é" * length for r in ranks}
        assert everyone.gather({"text": text[rank]}) == [{"text": text[r]} for r in ranks]
        for source in ranks:
            assert everyone.broadcast([text[rank]] if rank == source else None, source) == [text[source]]
    values = torch.tensor([rank, -(1 << 62), 1 << rank])
    assert everyone.sum(values, "sums", 10.0).tolist() == [10, -5 * (1 << 62) + (1 << 64), 31]
    assert everyone.maximum(values.float(), "maxima").tolist() == [4.0, float(-(1 << 62)), 16.0]
    assert everyone.all_true(True) and not everyone.all_true(rank != 3)
    # Only the highest group, ranks 0 and 4, keeps the whole.
    whole = everyone.merge([rank], lambda parts: sum(parts, []), "ranks", 10.0, down=len)
    assert whole == ([0, 1, 2, 3, 4] if rank in (0, 4) else 5)
    everyone.barrier("everybody")
    pair = coordinate([1, 3], timeout_s=30)
    assert (pair is None) == (rank not in (1, 3))
    assert pair is None or pair.gather(rank) == [1, 3]
    # A rank's connections are only those of its groups; each group also listens on one socket.
    connections = sum(len(level.ranks) - 1 for level in everyone._levels)
    assert opened == connections + len(everyone._levels), (opened, connections)
    return everyone.gather(connections)


def _num_sockets() -> int:
    links = [entry.readlink() for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    return sum(str(link).startswith("socket:") for link in links)


def test_a_tree_of_groups_agrees_with_one_group_of_all_ranks() -> None:
    assert run_distributed(target_in(__file__, "tree"), 5) == [3, 1, 2, 1, 1]


def late_leaf(_: Any) -> list[str]:
    everyone = coordinate(range(5), timeout_s=2.0, group_size=2, fan_out=2)
    if everyone.rank == 3:
        time.sleep(16)
        return []
    start = time.monotonic()
    # Rank 2 is the one that waits for rank 3. The others stand elsewhere in the tree.
    with pytest.raises(TimeoutError, match=r"rank 2 of 5 waited 2 s for the checkpoint: .*[Rr]ank.*1.*2, 3"):
        everyone.barrier("the checkpoint")
    assert time.monotonic() - start < 15
    return []


@pytest.mark.long  # 16 s of waiting; a dead rank's wait ends at once
def test_every_rank_learns_who_is_missing_below_another_rank() -> None:
    assert run_distributed(target_in(__file__, "late_leaf"), 5) == []


def dead_leaf(directory: str) -> None:
    everyone = coordinate(range(5), timeout_s=60, group_size=2, fan_out=2)
    everyone.barrier("the start")
    if everyone.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(CoordinationError, match="an answer: rank"):
        everyone.gather("é" * 3000, "an answer")
    seconds = time.monotonic() - start
    with pytest.raises(CoordinationError, match="next one: not tried"):
        everyone.gather(1, "the next one")
    (Path(directory) / f"{everyone.rank}").write_text(f"{seconds}")
    os._exit(0)  # rank 3 is missing at the launcher's barrier


def test_a_dead_rank_ends_the_waits_of_the_whole_tree_at_once(tmp_path: Path) -> None:
    """The launcher would end all ranks when one fails; here the others must fail in time by themselves."""
    waits, run = tmp_path / "waits", tmp_path / "run"
    waits.mkdir()
    run.mkdir()
    processes = [RankProcess() for _ in range(5)]
    try:
        start_job(processes, target_in(__file__, "dead_leaf"), run, 300.0, str(waits))
        codes = [process.wait(300.0) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0, 0, 0, -signal.SIGKILL, 0], "\n".join(output_of(run, rank) for rank in range(5))
    waited = {path.name: float(path.read_text()) for path in waits.iterdir()}
    assert waited.keys() == {"0", "1", "2", "4"} and max(waited.values()) < 30, waited
