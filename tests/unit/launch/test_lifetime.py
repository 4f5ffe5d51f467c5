"""One run a directory, and no process that outlives its launcher."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_dapo.launch import lifetime
from megatron_dapo.files.durable import DirectoryReplaced
from megatron_dapo.launch.lifetime import (
    DirectoryInUse,
    DirectoryLock,
    RefusedByRank0,
    end_of_launch,
    hold_directory,
    require_unused,
)
from megatron_dapo.watch.attempts import ATTEMPTS, begin_attempt, begin_launch, record_end
from megatron_dapo.watch.failure import EXIT_CODE, failure_of

DEADLINE_S = 20.0
HOST = socket.gethostname()


def start(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True)


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "the deadline passed"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


HOLD = """
import sys, time
from pathlib import Path
from megatron_dapo.launch.lifetime import DirectoryLock
lock = DirectoryLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_a_directory_in_use_is_refused_until_its_holder_dies(tmp_path: Path) -> None:
    holder = start(HOLD, str(tmp_path))
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        for attempt in (require_unused, DirectoryLock):
            with pytest.raises(DirectoryInUse, match=rf"{tmp_path} is in use by process {holder.pid} on {HOST} "):
                attempt(tmp_path)
    finally:
        holder.kill()
        holder.wait()
    require_unused(tmp_path)
    DirectoryLock(tmp_path).release()


def test_a_file_system_without_locks_is_used_with_a_warning(tmp_path, monkeypatch, caplog) -> None:
    code = errno.ENOSYS

    def flock(stream: object, how: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(lifetime.fcntl, "flock", flock)
    DirectoryLock(tmp_path).release()
    assert f"{tmp_path} has no file locks (Function not implemented)" in caplog.text and "-o flock" in caplog.text
    code = errno.EIO
    with pytest.raises(OSError, match="Input/output error"):
        DirectoryLock(tmp_path)


@pytest.fixture
def own_umask() -> Iterator[None]:
    """`hold_directory` changes the process's."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def test_every_rank_learns_of_another_run_before_it_writes(own_umask: None, tmp_path: Path) -> None:
    store, other = dist.HashStore(), dist.HashStore()
    lock, attempt = hold_directory(tmp_path, 0, store)
    assert lock is not None and attempt == 1 and hold_directory(tmp_path, 1, store) == (None, 1)
    holder = start(HOLD, str(tmp_path / "taken"))
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        for rank, kind in ((0, DirectoryInUse), (1, RefusedByRank0), (2, RefusedByRank0)):
            with pytest.raises(kind, match=f"is in use by process {holder.pid} on {HOST} ") as refused:
                hold_directory(tmp_path / "taken", rank, other)
            failure = failure_of(rank, refused.value)
            assert (failure.exit_code, failure.is_consequence) == ((1, False) if rank == 0 else (EXIT_CODE, True))
    finally:
        holder.kill()
        holder.wait()
        lock.release()


def test_a_directory_that_cannot_be_written_is_not_said_to_be_in_use(own_umask: None, tmp_path: Path, monkeypatch) -> None:
    def read_only(path: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path / "run.lock"))

    monkeypatch.setattr(lifetime, "_lock", read_only)
    store = dist.HashStore()
    with pytest.raises(OSError, match="Read-only file system") as refused:
        hold_directory(tmp_path, 0, store)
    assert failure_of(0, refused.value).exit_code == EXIT_CODE
    with pytest.raises(RefusedByRank0, match=r"OSError: .*Read-only file system"):
        hold_directory(tmp_path, 1, store)


@pytest.mark.parametrize("bare", ["nothing", "an empty directory", "an older run"])
def test_a_node_without_the_run_s_file_system_is_named(own_umask: None, tmp_path: Path, monkeypatch, bare: str) -> None:
    monkeypatch.setattr(lifetime, "_SHARED_S", 0.0)
    mounted, here, store = tmp_path / "mounted", tmp_path / "here", dist.HashStore()
    lock, _ = hold_directory(mounted, 0, store)
    if bare != "nothing":
        here.mkdir()
    if bare == "an older run":
        (here / "run.lock").write_text("17 on node9 (0a1b)")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(DirectoryReplaced, match=rf"{here} on {HOST} is not the directory of rank 0, process \d+ on ") as refused:
        hold_directory(here, 1, store)
    assert failure_of(1, refused.value).cause == "file system lost" and sorted(tmp_path.rglob("*")) == before
    monkeypatch.setattr(lifetime, "_SHARED_S", 30.0)
    threading.Timer(0.3, lambda: here.exists() or here.symlink_to(mounted)).start()
    if bare == "nothing":  # a network file system shows it late
        assert hold_directory(here, 1, store) == (None, 1)
    lock.release()


def test_rank_0_writes_nothing_where_its_launcher_s_directory_was(own_umask: None, tmp_path: Path) -> None:
    """Unmounted between the batch script's note and the workers' start, in the same job."""
    run = tmp_path / "run"
    begin_launch(run, "17")
    lock, attempt = hold_directory(run, 0, dist.HashStore(), launched_by="17")
    assert attempt == 1
    lock.release()
    run.rename(tmp_path / "elsewhere")
    with pytest.raises(DirectoryReplaced, match=f"{run} on {HOST} does not know of this launch"):
        hold_directory(run, 0, dist.HashStore(), launched_by="17")
    assert not run.exists()


def test_the_end_of_a_launch_is_worth_another_attempt_if_it_can_be_counted(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = begin_launch(run, "17")
    ends = [end_of_launch(run, "17", attempt, 2) for attempt in (first, first + 1)]
    assert [end.exit_code for end in ends] == [EXIT_CODE, 1] and "before the attempt was on record" in ends[0].reason
    assert "2 attempts in a row" in ends[1].reason
    begin_attempt(run, 3, "17")
    record_end(run, "finished")
    assert end_of_launch(run, "17", first, 2).exit_code == 0
    # Another job has the directory: its attempts are not touched.
    holder = start(HOLD, str(run))
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        second, text = begin_launch(run, "18"), (run / ATTEMPTS).read_text()
        end = end_of_launch(run, "18", second, 2)
        assert end.exit_code == 1 and f"in use by process {holder.pid} on {HOST}" in end.reason
        assert (run / ATTEMPTS).read_text() == text
    finally:
        holder.kill()
        holder.wait()
    run.rename(tmp_path / "elsewhere")  # the bare mount point
    run.mkdir()
    end = end_of_launch(run, "17", first, 2)
    assert end.exit_code == EXIT_CODE and "unmounted" in end.reason and not end.leaves_nodes_healthy
    assert list(run.iterdir()) == []


def test_an_attempt_that_cannot_be_noted_ends_the_job_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each start of a job without a budget would meet the same file system."""

    def read_only(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(tmp_path / "attempts.jsonl"))

    first = begin_launch(tmp_path, "17")
    monkeypatch.setattr(lifetime, "record_unstarted", read_only)
    end = end_of_launch(tmp_path, "17", first, 3)
    assert end.exit_code == 1 and "nothing can be noted: [Errno 30] Read-only file system: " in end.reason


# Each case in a child, for the directory's mask is the process's.
PRIVACY = """
import json, os, subprocess, sys
from pathlib import Path
import torch.distributed as dist
from megatron_dapo.launch.lifetime import hold_directory
from megatron_dapo.files.durable import HERE
for run, readers in json.loads(sys.argv[1]):
    if os.fork():
        os.wait()
        continue
    run = Path(run)
    lock, _ = hold_directory(run, 0, dist.HashStore(), group_readable=readers == "group")
    (run / "metrics").mkdir()
    HERE.write_json(run / "metrics" / "own.json", {})
    subprocess.run(["touch", str(run / "metrics" / "of_a_child")], check=True)
    paths = (run, run / "metrics", *sorted((run / "metrics").iterdir()))
    print(json.dumps([oct(path.stat().st_mode & 0o7777) for path in paths]), flush=True)
    os._exit(0)
"""


def test_a_runs_files_are_its_users_alone_or_the_groups(tmp_path: Path) -> None:
    cases = [("owner", None, "0o700", "0o600"), ("group", 0o700, "0o750", "0o640"), ("owner", 0o2775, "0o2700", "0o600")]
    runs = [tmp_path / str(index) for index in range(len(cases))]
    for run, (_, before, _, _) in zip(runs, cases, strict=True):
        if before is not None:  # made by the user
            run.mkdir()
            run.chmod(before)
    process = start(PRIVACY, json.dumps([(str(run), readers) for run, (readers, *_) in zip(runs, cases, strict=True)]))
    output, _ = process.communicate(timeout=60)
    for line, (_, _, directories, files) in zip(output.splitlines(), cases, strict=True):
        found_run, inner, *written = json.loads(line)
        assert found_run == directories and int(inner, 8) & 0o777 == int(directories, 8) & 0o777
        assert set(written) == {files}


def test_an_unused_directory_is_left_alone(tmp_path: Path) -> None:
    require_unused(tmp_path / "new")
    assert not (tmp_path / "new").exists()


PARENT = """
import subprocess, sys, signal
from megatron_dapo.files.linux import signal_at_parents_death
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], preexec_fn=signal_at_parents_death(signal.SIGTERM))
print(child.pid, flush=True)
child.wait()
"""


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the kernel of another system has no parent-death signal"
)
def test_a_child_ends_when_its_parent_is_killed() -> None:
    parent = start(PARENT)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert is_running(child)
    parent.kill()
    parent.wait()
    wait_for(lambda: not is_running(child))
