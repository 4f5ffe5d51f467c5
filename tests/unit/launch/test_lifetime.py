"""One run a directory, and no process that outlives its launcher."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_dapo.launch import lifetime
from megatron_dapo.launch.lifetime import DirectoryInUse, DirectoryLock, hold_directory, require_unused

DEADLINE_S = 20.0


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
            with pytest.raises(RuntimeError, match=rf"{tmp_path} is in use by process {holder.pid}:"):
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
    lock = hold_directory(tmp_path, 0, store)
    assert lock is not None and hold_directory(tmp_path, 1, store) is None
    holder = start(HOLD, str(tmp_path / "taken"))
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        for rank in (0, 1, 2):
            with pytest.raises(DirectoryInUse, match=f"is in use by process {holder.pid}:") as refused:
                hold_directory(tmp_path / "taken", rank, other)
            assert refused.value.is_final and refused.value.is_consequence == (rank > 0)
    finally:
        holder.kill()
        holder.wait()
        lock.release()


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
    lock = hold_directory(run, 0, dist.HashStore(), group_readable=readers == "group")
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
