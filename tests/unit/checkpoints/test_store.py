"""A checkpoint is whole or not there: kills and full disks at every write point, broken files, retention, several
ranks."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_dapo.checkpoints.retention import KeepPolicy
from megatron_dapo.checkpoints.store import (
    Checkpoint,
    CheckpointError,
    CheckpointStore,
    CheckpointWriter,
    find_resume,
    newest_valid,
    save_checkpoint,
    wrong_files,
)
from megatron_dapo.watch.failure import failure_of
from tests.unit.files import fault_points


def content(step: int) -> Callable[[CheckpointWriter], None]:
    def write(writer: CheckpointWriter) -> None:
        writer.save_tensors("model.safetensors", {"w": torch.full((64,), float(step))})
        writer.save_json("trainer.json", {"step": step})

    return write


def is_of(checkpoint: Checkpoint | None, step: int) -> bool:
    assert checkpoint is not None and checkpoint.step == step
    return checkpoint.load_json("trainer.json") == {"step": step} and bool(
        (checkpoint.load_tensors("model.safetensors")["w"] == step).all()
    )


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", keep=2)


def test_save_and_load(store: CheckpointStore) -> None:
    assert newest_valid(store) is None
    directory = save_checkpoint(store, 7, content(7), metadata={"layout": "TP2"})
    found = newest_valid(store)
    assert is_of(found, 7) and found.directory == directory == store.directory / "step_000007"
    assert found.metadata == {"layout": "TP2"}
    assert sorted(os.listdir(directory)) == ["manifest.json", "model.safetensors", "trainer.json"]


def test_a_run_directory_that_is_gone_is_not_made_again(tmp_path: Path) -> None:
    """What is left of an unmounted file system is its mount point, on another disk."""
    store = CheckpointStore(tmp_path / "run" / "checkpoints", keep=2)
    with pytest.raises(CheckpointError, match="No such file or directory"):
        save_checkpoint(store, 7, content(7))
    assert list(tmp_path.iterdir()) == []


def test_the_best_and_every_fifth_stay_over_a_resume(store: CheckpointStore) -> None:
    keep = KeepPolicy(1, every=5, best="eval/avg_at_k")
    values: dict[str, dict[str, float]] = {}
    for step in range(1, 13):
        # As a run that is started anew for each step, with what its last checkpoint knows.
        again = CheckpointStore(store.directory, keep)
        found = newest_valid(again)
        values = dict(found.metadata["evaluations"]) if found else {}
        values[str(step)] = {"eval/avg_at_k": 0.9 if step == 3 else 0.1}
        save_checkpoint(again, step, content(step), metadata={"evaluations": values})
    assert store.steps() == [12, 10, 5, 3]


def test_retention_after_resume_and_with_leftovers(store: CheckpointStore) -> None:
    for step in (1, 2):
        save_checkpoint(store, step, content(step))
    (store.directory / "step_000003.tmp").mkdir()
    (store.directory / "step_000000.deleting").mkdir()
    (store.directory / "notes").mkdir()
    again = CheckpointStore(store.directory, keep=1)
    assert is_of(newest_valid(again), 2)
    save_checkpoint(again, 4, content(4))
    assert sorted(os.listdir(again.directory)) == ["notes", "step_000004"]


def test_a_broken_checkpoint_does_not_count_as_kept(store: CheckpointStore) -> None:
    for step in (1, 2):
        save_checkpoint(store, step, content(step))
    (store.path(2) / "trainer.json").unlink()
    save_checkpoint(store, 3, content(3))
    assert is_of(store.open(1), 1) and is_of(store.open(3), 3)


def flip(path: Path, place: int) -> None:
    """Change one byte of a file."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def take_from_another_run(directory: Path) -> None:
    """Put the manifest of another run's checkpoint of the same step next to these files, which are as long as its own."""

    def write(writer: CheckpointWriter) -> None:
        writer.save_tensors("model.safetensors", {"w": torch.full((64,), 0.5)})
        writer.save_json("trainer.json", {"step": 8})

    other = CheckpointStore(directory.parent.with_name("other"), keep=1)
    shutil.copy(save_checkpoint(other, int(directory.name[-6:]), write) / "manifest.json", directory)


def copy_half(directory: Path) -> None:
    """Leave what an interrupted copy leaves: some files, and the begin of another."""
    (directory / "trainer.json").unlink()
    os.truncate(directory / "model.safetensors", (directory / "model.safetensors").stat().st_size // 2)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "manifest of another run": take_from_another_run,
    "copied by half": copy_half,
    "one bit": lambda directory: flip(directory / "model.safetensors", -1),
    "a byte of a header": lambda directory: flip(directory / "model.safetensors", 20),
    "truncated": lambda directory: os.truncate(directory / "model.safetensors", 40),
    "missing file": lambda directory: (directory / "trainer.json").unlink(),
    "no manifest": lambda directory: (directory / "manifest.json").unlink(),
    "manifest cut": lambda directory: os.truncate(directory / "manifest.json", 20),
    "manifest of another step": lambda directory: (directory / "manifest.json").write_text(
        (directory / "manifest.json").read_text().replace('"step": 2', '"step": 9')
    ),
    "another hash in the manifest": lambda directory: (directory / "manifest.json").write_text(
        (directory / "manifest.json").read_text().replace('"sha256": "', '"sha256": "0', 1)
    ),
    "other metadata in the manifest": lambda directory: (directory / "manifest.json").write_text(
        (directory / "manifest.json").read_text().replace('"metadata": {', '"metadata": {"train_step": 7')
    ),
    "path in manifest": lambda directory: (directory / "manifest.json").write_text(
        (directory / "manifest.json").read_text().replace("trainer.json", "../../trainer.json")
    ),
    "file becomes directory": lambda directory: (
        (directory / "trainer.json").unlink(),
        (directory / "trainer.json").mkdir(),
    ),
}


def load_all(checkpoint: Checkpoint) -> None:
    assert is_of(checkpoint, checkpoint.step)


@pytest.mark.parametrize("load", [None, load_all], ids=["verified first", "verified by the load"])
@pytest.mark.parametrize("damage", list(DAMAGE))
def test_broken_newest_is_reported_and_the_one_before_used(
    store: CheckpointStore, damage: str, load: Callable[[Checkpoint], None], caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        save_checkpoint(store, step, content(step))
    DAMAGE[damage](store.path(2))
    with caplog.at_level(logging.WARNING):
        assert is_of(newest_valid(store, load), 1)
    assert "step_000002" in caplog.text and "trying the one before" in caplog.text


def test_tensors_are_read_once_by_the_load_and_other_files_before_it(store: CheckpointStore) -> None:
    for step in (1, 2):
        save_checkpoint(store, step, content(step))
    flip(store.path(2) / "model.safetensors", -1)
    loaded: list[int] = []
    found = newest_valid(store, lambda checkpoint: loaded.append(checkpoint.step))
    assert found is not None and found.step == 2 == loaded[0], "a load that reads nothing notices nothing"
    assert wrong_files(found, sorted(found.files)) == ["model.safetensors"]
    flip(store.path(2) / "trainer.json", 3)
    found = newest_valid(store, load_all)
    assert is_of(found, 1)


def test_all_ranks_load_the_one_before_where_one_reads_wrong_bytes(store: CheckpointStore) -> None:
    for step in (1, 2):
        save_checkpoint(store, step, content(step))
    flip(store.path(2) / "model.safetensors", -1)
    loaded: dict[int, list[int]] = {0: [], 1: [], 2: []}

    def work(own: CheckpointStore) -> object:
        def load(checkpoint: Checkpoint) -> None:
            loaded[own.rank].append(checkpoint.step)
            if own.rank == 1:
                load_all(checkpoint)

        return newest_valid(own, load)

    assert [found.step for found in Ranks(store, 3).run(work)] == [1, 1, 1]
    assert loaded == {rank: [2, 1] for rank in range(3)}


def test_pieces_that_are_not_those_of_the_file_are_refused(store: CheckpointStore) -> None:
    save_checkpoint(store, 1, content(1))
    manifest = store.path(1) / "manifest.json"
    document = json.loads(manifest.read_text())
    del document["sha256"]
    for pieces in ("17:00000000", "x", document["files"][0]["pieces"] + " 4:00000000"):
        document["files"][0]["pieces"] = pieces
        manifest.write_text(json.dumps(document))
        with pytest.raises(CheckpointError, match="pieces"):
            store.open(1)


def test_saving_over_a_broken_checkpoint_of_the_same_step(store: CheckpointStore) -> None:
    for step in (1, 2, 2):
        save_checkpoint(store, step, content(step))
        if step == 2:
            flip(store.path(2) / "model.safetensors", -1)
    save_checkpoint(store, 2, content(2))
    assert is_of(newest_valid(store), 2) and store.steps() == [2, 1]


def test_all_broken_is_an_error_with_every_reason(store: CheckpointStore) -> None:
    for step in (1, 2):
        save_checkpoint(store, step, content(step))
        DAMAGE["no manifest"](store.path(step))
    with pytest.raises(CheckpointError, match="step_000002.*step_000001"):
        newest_valid(store)


def test_resume_modes(store: CheckpointStore) -> None:
    assert find_resume("auto", store) is None and find_resume("never", store) is None
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        find_resume("must", store)
    save_checkpoint(store, 3, content(3))
    assert is_of(find_resume("auto", store), 3) and is_of(find_resume("must", store), 3)
    with pytest.raises(CheckpointError, match=r"holds checkpoints of steps \[3\]"):
        find_resume("never", store)


def test_newest_counts_by_number_not_by_spelling(store: CheckpointStore) -> None:
    for step in (999999, 1000000):
        save_checkpoint(store, step, content(step))
    assert is_of(newest_valid(store), 1000000)


@pytest.mark.parametrize("name", ["../x", "/x", "a/b", "", ".hidden", "manifest.json", "manifest_rank_0.json"])
def test_names_are_no_paths(store: CheckpointStore, name: str) -> None:
    with pytest.raises(CheckpointError, match="use letters"):
        save_checkpoint(store, 1, lambda writer: writer.save_json(name, 1))
    assert store.steps() == []


def test_full_disk_at_every_write_point(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "count", keep=1)
    save_checkpoint(store, 1, content(1))
    fault_points.arm(0)
    save_checkpoint(store, 2, content(2))
    calls = fault_points.disarm()
    assert {"write", "fsync", "replace", "mkdir"} <= set(calls) and len(calls) > 12
    for point in range(1, len(calls) + 1):
        store = CheckpointStore(tmp_path / str(point), keep=1)
        save_checkpoint(store, 1, content(1))
        fault_points.arm(point)
        try:
            save_checkpoint(store, 2, content(2))
            failed = False
        except CheckpointError as error:
            failed = True
            assert "the disk is full" in str(error) and "step_000001" in str(error)
            assert failure_of(0, error).cause == "disk full"
        finally:
            fault_points.disarm()
        found = newest_valid(store)
        assert is_of(found, 2 if found is not None and found.step == 2 else 1)
        assert failed or is_of(found, 2), f"point {point}: reported as saved, but it is not"
        assert [path.name for path in store.directory.iterdir() if path.suffix] == []
        save_checkpoint(store, 3, content(3))
        assert is_of(newest_valid(store), 3)


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[3])
from megatron_dapo.checkpoints.store import CheckpointStore, save_checkpoint
point, calls = int(sys.argv[2]), 0
def wrap(real):
    def call(*args, **kwargs):
        global calls
        calls += 1
        if calls == point:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)
    return call
store = CheckpointStore(sys.argv[1], keep=1)
write = lambda step: lambda writer: [writer.save_json(f"{name}.json", [step] * 500) for name in "abc"]
save_checkpoint(store, 1, write(1))
for name in CALLS:
    setattr(os, name, wrap(getattr(os, name)))
save_checkpoint(store, 2, write(2))
save_checkpoint(store, 2, write(2))
print(calls)
""".replace("CALLS", repr(fault_points.CALLS))


def run_killed(directory: Path, point: int) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).resolve().parents[3])
    command = [sys.executable, "-c", KILLED, str(directory), str(point), root]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def require_whole(directory: Path, point: int) -> None:
    store = CheckpointStore(directory, keep=1)
    found = newest_valid(store)
    assert found is not None, f"nothing loadable after a kill at write point {point}"
    assert all(found.load_json(f"{name}.json") == [found.step] * 500 for name in "abc")
    assert [path.name for path in directory.iterdir() if path.suffix] == []


def test_kill_at_random_write_points(tmp_path: Path) -> None:
    total = int(run_killed(tmp_path / "count", 0).stdout)
    assert total > 30
    points = random.Random(0).sample(range(1, total + 1), 16)
    for point in points:
        directory = tmp_path / str(point)
        assert run_killed(directory, point).returncode == -9
        require_whole(directory, point)


class Ranks:
    """Threads that stand for ranks, agreeing through a barrier. Each gets a store of its own over one directory."""

    def __init__(self, store: CheckpointStore, num_ranks: int) -> None:
        self._store, self._num_ranks = store, num_ranks
        self._barrier = threading.Barrier(num_ranks, timeout=20)
        self._votes: dict[int, bool] = {}

    def store_of(self, rank: int) -> CheckpointStore:
        def vote(ok: bool) -> bool:
            self._votes[rank] = ok
            self._barrier.wait()
            result = all(self._votes.values())
            self._barrier.wait()
            return result

        coordination = SimpleNamespace(rank=rank, size=self._num_ranks, all_true=vote)
        return CheckpointStore(self._store.directory, self._store.keep, coordination)

    def run(self, work: Callable[[CheckpointStore], object]) -> list[object]:
        results: list[object] = [None] * self._num_ranks

        def target(rank: int) -> None:
            try:
                results[rank] = work(self.store_of(rank))
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=target, args=(rank,)) for rank in range(self._num_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


def test_several_ranks(store: CheckpointStore) -> None:
    def save(step: int) -> Callable[[CheckpointStore], object]:
        def work(own: CheckpointStore) -> object:
            def write(writer) -> None:
                writer.save_tensors(f"rank_{own.rank}.safetensors", {"w": torch.full((8,), float(own.rank + step))})

            return save_checkpoint(own, step, write)

        return work

    assert Ranks(store, 3).run(save(1)) == [store.path(1)] * 3
    Ranks(store, 3).run(save(2))
    path = store.path(2) / "rank_2.safetensors"
    path.write_bytes(path.read_bytes()[:-4] + b"abcd")
    # Only rank 2 reads the broken file; all must take the one before.
    found = Ranks(store, 3).run(newest_valid)
    assert [checkpoint.step for checkpoint in found] == [1, 1, 1]
    assert found[0].load_tensors("rank_2.safetensors")["w"][0] == 3.0


def test_one_failing_rank_fails_all_and_leaves_the_old(store: CheckpointStore) -> None:
    def save(step: int, bad: int | None) -> list[object]:
        def work(own: CheckpointStore) -> object:
            def write(writer: CheckpointWriter) -> None:
                if own.rank == bad:
                    raise OSError(errno.ENOSPC, "No space left on device")
                writer.save_json(f"rank_{own.rank}.json", step)

            return save_checkpoint(own, step, write)

        return Ranks(store, 2).run(work)

    save(1, bad=None)
    results = save(2, bad=1)
    assert all(isinstance(result, CheckpointError) for result in results)
    assert "another rank failed" in str(results[0]) and "the disk is full" in str(results[1])
    assert sorted(os.listdir(store.directory)) == ["step_000001"]
    assert newest_valid(store).load_json("rank_1.json") == 1


def test_ranks_that_do_not_share_the_directory_are_named(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1, coordination=SimpleNamespace(rank=0, size=3))
    store.begin(1)
    store.write(1, CheckpointWriter())
    with pytest.raises(CheckpointError, match=r"ranks \[1, 2\] of 3.*shared"):
        store.commit(1)


def test_loading_a_file_that_is_not_there_lists_what_is(store: CheckpointStore) -> None:
    save_checkpoint(store, 1, content(1))
    with pytest.raises(CheckpointError, match="model.safetensors, trainer.json"):
        newest_valid(store).load_json("optimizer.json")


def test_a_manifest_that_changed_or_has_no_hash_is_refused(store: CheckpointStore) -> None:
    save_checkpoint(store, 1, content(1))
    manifest = store.path(1) / "manifest.json"
    document = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(document))  # laid out otherwise: the same manifest
    assert is_of(newest_valid(store), 1)
    manifest.write_text(json.dumps({**document, "metadata": {"layout": "TP8"}}))
    with pytest.raises(CheckpointError, match="its own sha256 does not fit: it changed since it was written"):
        store.open(1)
    del document["sha256"]
    manifest.write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match="manifest.json is not readable.*sha256"):
        store.open(1)
