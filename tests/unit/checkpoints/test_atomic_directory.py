"""Directories appear complete or not at all, and a replaced one survives until its successor is complete."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_dapo.checkpoints.atomic_directory import (
    _finish_interrupted,
    atomic_directory,
    put_in_place,
    replace_directory,
)


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_failed_write_leaves_nothing(tmp_path: Path):
    with pytest.raises(KeyboardInterrupt), atomic_directory(tmp_path / "out") as directory:
        (directory / "half").write_text("x")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_a_target_that_appears_meanwhile_is_not_overwritten(tmp_path: Path):
    with pytest.raises(ValueError, match="out exists already"), atomic_directory(tmp_path / "out"):
        (tmp_path / "out").mkdir()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_directory_is_replaced(tmp_path: Path, one_process):
    target = tmp_path / "run" / "model"
    for content in ("first", "second"):
        with replace_directory(target) as directory:
            assert not directory.exists()
            directory.mkdir(parents=True)
            (directory / "weights").write_text(content)
        assert (target / "weights").read_text() == content
        assert [path.name for path in target.parent.iterdir()] == ["model"]


def test_a_failed_replacement_leaves_the_previous_directory(tmp_path: Path, one_process):
    target = tmp_path / "model"
    target.mkdir()
    (target / "weights").write_text("first")
    with pytest.raises(OSError, match="full"), replace_directory(target) as directory:
        directory.mkdir()
        raise OSError("disk full")
    assert (target / "weights").read_text() == "first"


KILLED = """
import itertools, os, signal, sys
from pathlib import Path
from megatron_dapo.checkpoints import atomic_directory
target, kill_at, can_exchange = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "exchange"
fresh = target.with_name("model.new")
fresh.mkdir()
for name in "ab":
    (fresh / name).write_text("second")
calls = itertools.count()
def step():
    if next(calls) == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
CHANGES = ("os.rename", "os.remove", "os.rmdir")
sys.addaudithook(lambda event, arguments: step() if event in CHANGES else None)
exchange = atomic_directory._exchange
def watched(one, other):
    step()  # a kill before the exchange; the first removal comes after it
    return can_exchange and exchange(one, other)
atomic_directory._exchange = watched
atomic_directory.put_in_place(fresh, target)
print("ended")
"""


@pytest.mark.parametrize("way", ["exchange", "renames"])
def test_a_kill_at_any_step_leaves_one_whole_directory(tmp_path: Path, way: str) -> None:
    """The process is killed before every change of the file system in turn, until one run comes to its end."""
    contents = []
    for kill_at in range(20):
        target = tmp_path / str(kill_at) / "model"
        target.mkdir(parents=True)
        for name in "ab":
            (target / name).write_text("first")
        command = [sys.executable, "-c", KILLED, str(target), str(kill_at), way]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == (0 if done.stdout else -signal.SIGKILL), done.stderr
        if way == "exchange":
            assert target.is_dir()  # It keeps its name all the time.
        else:
            _finish_interrupted(target)
        contents.append({(target / name).read_text() for name in "ab"})
        if done.stdout:
            break
    assert done.stdout == "ended\n" and kill_at >= 4
    assert contents[0] == {"first"} and contents[-1] == {"second"} and all(len(each) == 1 for each in contents)
    assert [path.name for path in target.parent.iterdir()] == ["model"]


def test_a_link_is_replaced_and_its_directory_stays(tmp_path: Path) -> None:
    for name in ("elsewhere", "fresh"):
        (tmp_path / name).mkdir()
    (tmp_path / "model").symlink_to(tmp_path / "elsewhere")
    put_in_place(tmp_path / "fresh", tmp_path / "model")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "model"]
    assert not (tmp_path / "model").is_symlink()


def test_an_exchange_that_fails_for_another_reason_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(FileNotFoundError, match="fresh"):
        put_in_place(tmp_path / "fresh", tmp_path / "model")
    assert (tmp_path / "model").is_dir()
