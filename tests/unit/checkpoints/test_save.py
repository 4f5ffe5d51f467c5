"""Saves during the run: what is saved is the state of its moment, every fault leaves a checkpoint, memory is bounded."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_dapo.checkpoints import save as background_save
from megatron_dapo.checkpoints.save import FAILED, IDLE, IN_FLIGHT, BackgroundSaves, Saved
from megatron_dapo.checkpoints.store import (
    Checkpoint,
    CheckpointError,
    CheckpointStore,
    CheckpointWriter,
    newest_valid,
)
from megatron_dapo.files.durable import HERE, is_intact, write_direct
from megatron_dapo.files.process import FileProcess
from megatron_dapo.watch.failure import failure_of
from tests.unit.files import fault_points
from tests.unit.checkpoints.test_store import Ranks

pytestmark = pytest.mark.skipif(not FileProcess.IS_POSSIBLE, reason="needs Linux's memfd")
ROOT = Path(__file__).resolve().parents[3]


class Run:
    """A rank whose state is filled with its step, and is written over as soon as that is allowed."""

    def __init__(self, store: CheckpointStore) -> None:
        self.store, self.saves = store, BackgroundSaves(store)
        self.state = {
            "double": torch.zeros(3, dtype=torch.float64),
            "half": torch.zeros(5, 7, dtype=torch.bfloat16),
            "columns": torch.zeros(6, 4).t(),
            "none": torch.zeros(0),
            "scalar": torch.zeros(()),
            "large": torch.zeros(3 << 20, dtype=torch.uint8),
        }

    def start(self, step: int) -> None:
        for tensor in self.state.values():
            tensor.fill_(step)
        counters = {"step": step}
        rank = self.store.rank

        def write(writer: CheckpointWriter) -> None:
            writer.save_tensors(f"rank_{rank}.safetensors", self.state)
            writer.save_json(f"rank_{rank}.json", counters)

        self.saves.start(step, write, {"step": step})
        counters["step"] = -1
        self.saves.wait_for_copy()
        for tensor in self.state.values():
            tensor.fill_(255)

    def save(self, step: int) -> Saved:
        self.start(step)
        return self.saves.finish()


def require_state_of(checkpoint: Checkpoint | None, step: int, rank: int = 0) -> None:
    assert checkpoint is not None and checkpoint.step == step and checkpoint.metadata == {"step": step}
    tensors = checkpoint.load_tensors(f"rank_{rank}.safetensors")
    assert len(tensors) == 6 and tensors["columns"].shape == (4, 6) and tensors["none"].numel() == 0
    for name, tensor in tensors.items():
        assert (tensor == step).all(), name
    assert checkpoint.load_json(f"rank_{rank}.json") == {"step": step}


@pytest.fixture
def files() -> Iterator[FileProcess]:
    found = FileProcess()
    yield found
    found.close()


@pytest.mark.parametrize("is_beside", [True, False])
def test_the_state_of_the_moment_is_saved_while_the_run_goes_on(
    tmp_path: Path, files: FileProcess, is_beside: bool
) -> None:
    run = Run(CheckpointStore(tmp_path, keep=2, files=files if is_beside else HERE))
    assert run.saves.status == IDLE and not run.saves.is_in_flight
    for step in (1, 2, 3):
        saved = run.save(step)
        assert saved.step == step and saved.directory == run.store.path(step) and saved.seconds > 0.0
        assert run.saves.status == IDLE and not run.saves.is_in_flight
        require_state_of(newest_valid(run.store), step)
        assert run.store.steps() == list(range(step, max(0, step - 2), -1))
    assert [path.name for path in tmp_path.iterdir() if path.suffix] == []


def test_the_run_does_not_wait_for_a_slow_disk(tmp_path: Path, files: FileProcess) -> None:
    run = Run(CheckpointStore(tmp_path, keep=1, files=files))
    run.save(1)
    files.run(fault_points.slow_down, 0.5)
    start = time.perf_counter()
    run.start(2)
    blocked = time.perf_counter() - start
    assert run.saves.status == IN_FLIGHT and newest_valid_step(run) == 1
    # What else is written meanwhile does not wait for the checkpoint.
    files.run(os.path.exists, tmp_path)
    assert run.saves.status == IN_FLIGHT
    while run.saves.status == IN_FLIGHT:
        time.sleep(0.01)
    require_state_of(run.store.open(2), 2)  # It is in place before anybody has asked for its end.
    saved = run.saves.finish()
    assert blocked < 0.2 * saved.seconds, (blocked, saved.seconds)


def test_the_copy_runs_on_the_gpu_of_its_rank(
    tmp_path: Path, files: FileProcess, gpu_3: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call on GPU 0 would open a context there: eight ranks of a node take 4 GiB of it."""
    calls: list[tuple[str, str, int]] = []

    def note(name: str, answer: Any) -> Any:
        calls.append((name, threading.current_thread().name, torch.cuda.current_device()))
        return answer

    stream = SimpleNamespace(synchronize=lambda: note("synchronize", None))
    cudart = SimpleNamespace(cudaHostRegister=lambda *arguments: note("register", 1))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: note("cudart", cudart))
    monkeypatch.setattr(torch.cuda, "stream", lambda used: note("stream", nullcontext()))
    monkeypatch.setattr(background_save, "_stream_after_current", lambda device: stream)
    monkeypatch.setattr(background_save, "tensors_of", lambda noted: [SimpleNamespace(device=torch.device("cuda", 3))])
    run = Run(CheckpointStore(tmp_path, keep=1, files=files))
    run.save(1)
    assert [name for name, _, _ in calls] == ["cudart", "register", "stream", "synchronize"]
    assert {(thread, device) for _, thread, device in calls} == {("checkpoint copy", 3)}
    require_state_of(newest_valid(run.store), 1)


def newest_valid_step(run: Run) -> int:
    return run.store.steps()[0]


def test_memory_is_bounded_over_many_saves(tmp_path: Path, files: FileProcess) -> None:
    run = Run(CheckpointStore(tmp_path, keep=1, files=files))

    def used() -> list[int]:
        texts = [Path(f"/proc/{pid}/status").read_text() for pid in (os.getpid(), files.pid)]
        return [int(text.partition("VmRSS:")[2].split()[0]) + len(os.listdir("/proc/self/fd")) * 1024 for text in texts]

    for step in range(1, 11):
        run.save(step)
    before = used()
    for step in range(11, 111):
        run.save(step)
    grown = [now - then for now, then in zip(used(), before, strict=True)]
    assert max(grown) < 2 << 10, f"kB that rank and file process have grown by in 100 saves: {grown}"
    require_state_of(newest_valid(run.store), 110)


def test_a_failed_save_is_told_later_and_the_one_before_stands(tmp_path: Path, files: FileProcess) -> None:
    run = Run(CheckpointStore(tmp_path, keep=1, files=files))
    run.save(1)
    files.run(fault_points.arm, 4)
    run.start(2)
    files.run(os.path.exists, tmp_path)
    while run.saves.status == IN_FLIGHT:
        time.sleep(0.01)
    assert run.saves.status == FAILED
    files.run(fault_points.disarm)
    with pytest.raises(CheckpointError, match="checkpoint of step 2 was not saved.*the disk is full.*step_000001"):
        run.saves.finish()
    assert sorted(os.listdir(tmp_path)) == ["step_000001"]
    require_state_of(newest_valid(run.store), 1)
    run.save(3)
    require_state_of(newest_valid(run.store), 3)


def test_an_error_of_what_is_saved_is_one_of_the_save(tmp_path: Path, files: FileProcess) -> None:
    saves = BackgroundSaves(CheckpointStore(tmp_path, keep=1, files=files))
    for write, reason in (
        (lambda writer: writer.save_json("../x", 1), "use letters"),
        (lambda writer: [writer.save_json("a", 1), writer.save_json("a", 2)], "written twice"),
        (lambda writer: writer.save_json("a", float("nan")), "not JSON compliant"),
        (lambda writer: writer.save_tensors("a", {"x": torch.zeros(2, dtype=torch.complex64)}), "has no complex64"),
    ):
        saves.start(1, write)
        saves.wait_for_copy()
        assert saves.status == FAILED
        with pytest.raises(CheckpointError, match=reason):
            saves.finish()
    assert os.listdir(tmp_path) == []


def test_full_disk_at_every_write_point(tmp_path: Path, files: FileProcess) -> None:
    def points_of(directory: Path, point: int) -> tuple[list[str], str]:
        run = Run(CheckpointStore(directory, keep=1, files=files))
        run.save(1)
        files.run(fault_points.arm, point)
        problem = ""
        try:
            run.save(2)
        except CheckpointError as error:
            problem = str(error)
            assert failure_of(0, error).cause == "disk full"
        calls = files.run(fault_points.disarm)
        found = newest_valid(run.store)
        require_state_of(found, found.step if found else 0)
        assert problem or found.step == 2, f"point {point}: told as saved, but it is not"
        assert [path.name for path in directory.iterdir() if path.suffix] == []
        run.save(3)
        require_state_of(newest_valid(run.store), 3)
        return calls, problem

    calls, _ = points_of(tmp_path / "count", 0)
    assert {"write", "fsync", "open", "replace", "mkdir", "unlink"} <= set(calls) and len(calls) > 15
    problems = [points_of(tmp_path / str(point), point)[1] for point in range(1, len(calls) + 1)]
    assert all("the disk is full" in problem and "step_000001" in problem for problem in problems if problem)
    assert sum(bool(problem) for problem in problems) > len(calls) // 2


def require_loadable(directory: Path, allowed: tuple[int, ...], what: str) -> int:
    store = CheckpointStore(directory, keep=1)
    found = newest_valid(store)
    assert found is not None and found.step in allowed, what
    require_state_of(found, found.step)
    assert [path.name for path in directory.iterdir() if path.suffix] == []
    return found.step


def test_kill_of_the_file_process_at_every_write_point(tmp_path: Path) -> None:
    def save(point: int) -> list[str]:
        files = FileProcess()
        run = Run(CheckpointStore(tmp_path / str(point), keep=1, files=files))
        run.save(1)
        files.run(fault_points.arm, point, "kill")
        run.save(2)
        calls = files.run(fault_points.disarm)
        files.close()
        return calls

    total = len(save(0))
    assert total > 15
    for point in range(1, total + 1):
        with pytest.raises(RuntimeError, match=r"file process \d+ of this rank was killed by signal 9"):
            save(point)
        require_loadable(tmp_path / str(point), (1, 2), f"a kill at write point {point}")


KILLED = """
import sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from megatron_dapo.checkpoints.store import CheckpointStore
from megatron_dapo.files.process import FileProcess
from tests.unit.checkpoints.test_save import Run
run = Run(CheckpointStore(sys.argv[1], keep=1, files=FileProcess()))
for step in range(int(sys.argv[3]), 10**9):
    run.save(step)
    print(step, flush=True)
"""


@pytest.mark.parametrize("num_kills", [1, pytest.param(4, marks=pytest.mark.long)])
def test_kill_of_the_rank_at_random_moments(tmp_path: Path, num_kills: int) -> None:
    """The rank and its file process die while saves go on, each time in the same directory."""
    moments = random.Random(0)
    newest = 0
    for _ in range(num_kills):
        first = newest + 1
        command = [sys.executable, "-c", KILLED, str(tmp_path), str(ROOT), str(first)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert int(process.stdout.readline()) == first
            time.sleep(moments.uniform(0.0, 0.5))
            process.kill()
            told = [first, *map(int, process.stdout.read().split())][-1]
        newest = require_loadable(tmp_path, (told, told + 1), f"a kill after step {told}")


def test_all_ranks_learn_of_the_failure_of_one(tmp_path: Path) -> None:
    all_files = [FileProcess() for _ in range(3)]
    ranks = Ranks(CheckpointStore(tmp_path, keep=1), 3)

    def work(own: CheckpointStore) -> list[object]:
        own.files = all_files[own.rank]
        run = Run(own)
        told: list[object] = [run.save(1)]
        if own.rank == 2:
            own.files.run(fault_points.arm, 3)
        try:
            run.save(2)
        except CheckpointError as error:
            told.append((str(error), error.is_consequence))
        own.files.run(fault_points.disarm)
        run.save(3)
        return told

    results = ranks.run(work)
    for rank, told in enumerate(results):
        assert isinstance(told, list), told
        text, is_consequence = told[1]
        assert is_consequence == (rank != 2) and ("the disk is full" in text) == (rank == 2)
        require_state_of(CheckpointStore(tmp_path, keep=1).open(3), 3, rank)
    assert sorted(os.listdir(tmp_path)) == ["step_000003"]
    for files in all_files:
        files.close()


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, (1 << 24) + 4096, (1 << 25) + 5])
def test_files_past_the_cache_have_every_byte(tmp_path: Path, files: FileProcess, size: int) -> None:
    content = torch.randint(256, (size,), dtype=torch.uint8).numpy().tobytes()
    memory = files.copy_memory(max(1, size))
    memory[:size] = content
    for name, sizes in (("whole", ()), ("pieces", (size // 3, 0, size - size // 3))):
        entry = write_direct(tmp_path / name, memoryview(memory)[:size], sizes)
        assert (tmp_path / name).read_bytes() == content and entry.size == size
        assert is_intact(tmp_path / name, entry) and bool(entry.pieces) == bool(sizes)


def test_a_file_system_without_a_way_past_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write

    def write(descriptor: int, content: memoryview) -> int:
        if os.get_blocking(descriptor) and is_direct(descriptor):
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, content)

    monkeypatch.setattr(os, "write", write)
    entry = write_direct(tmp_path / "x", memoryview(bytes(10_000)))
    assert entry.size == 10_000 == (tmp_path / "x").stat().st_size


def is_direct(descriptor: int) -> bool:
    import fcntl

    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
