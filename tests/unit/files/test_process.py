"""The file process of a rank: the same files and errors as without it, and it ends with its rank whatever holds it."""

from __future__ import annotations

import errno
import importlib
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_dapo.checkpoints.atomic_directory import put_in_place
from megatron_dapo.checkpoints.save import write_part
from megatron_dapo.checkpoints.store import CheckpointStore
from megatron_dapo.files.durable import HERE, DirectoryReplaced, Files, OpenFile
from megatron_dapo.files.process import FileProcess
from megatron_dapo.watch.evidence import activity
from megatron_dapo.watch.failure import EXIT_CODE, failure_of

pytestmark = pytest.mark.skipif(not FileProcess.IS_POSSIBLE, reason="needs Linux's memfd and prctl")
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def files() -> Iterator[FileProcess]:
    found = FileProcess()
    yield found
    found.close()


def test_what_it_is_asked_to_do_imports_the_standard_library_alone() -> None:
    """The modules of all functions that the package hands to `Files.run`: where a name is imported from, or where it is handed over."""
    modules = set()
    for path in (ROOT / "megatron_dapo").rglob("*.py"):
        text = path.read_text()
        for name in re.findall(r"files\.run\(\s*([a-z_]+),", text):
            here = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found = re.search(rf"^from (\S+) import [^\n(]*\b{name}\b", text, re.MULTILINE)
            modules.add(found[1] if found else here)
    assert len(modules) >= 6, modules
    command = [sys.executable, "-S", "-c", f"import {', '.join(sorted(modules))}"]
    done = subprocess.run(
        command, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_it_imports_isal_from_where_the_rank_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of that name in a directory of its own, as `pip install --target` makes one."""
    (tmp_path / "isal").mkdir()
    (tmp_path / "isal" / "__init__.py").write_text("")
    (tmp_path / "isal" / "isal_zlib.py").write_text("from zlib import crc32\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("isal", "isal.isal_zlib"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    files = FileProcess()
    try:
        assert str(tmp_path / "isal" / "isal_zlib.py") in files.run(importlib.import_module, "isal.isal_zlib")
    finally:
        files.close()


def test_files_are_the_same_as_without_it(tmp_path: Path, files: FileProcess) -> None:
    """More than the shared memory holds at once, in chunks that do not fit its parts."""
    tensors = {f"t{number}": torch.randint(256, (3_333_333,), dtype=torch.uint8) for number in range(24)}
    (tmp_path / "own").mkdir()
    own = HERE.write_tensors(tmp_path / "own" / "file", tensors)
    entry = files.write_tensors(tmp_path / "file", tensors)
    assert entry == own and entry.size > 64 << 20
    assert (tmp_path / "file").read_bytes() == (tmp_path / "own" / "file").read_bytes()
    for text in ("one\n", "", "two ≤\n"):
        files.append(tmp_path / "lines", text)
    assert (tmp_path / "lines").read_text(encoding="utf-8") == "one\ntwo ≤\n"
    files.replace(tmp_path / "lines", "new")
    assert (tmp_path / "lines").read_text() == "new" and not (tmp_path / "lines.tmp").exists()


def test_paths_are_those_of_the_rank(tmp_path: Path, files: FileProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files.make_directory(Path("a/b"))
    files.write_json(Path("a/b/c.json"), {"x": 1})
    files.run(put_in_place, Path("a/b"), Path("a/d"))
    assert (tmp_path / "a" / "d" / "c.json").is_file()


def test_errors_come_back_as_they_are(tmp_path: Path, files: FileProcess) -> None:
    (tmp_path / "there").touch()
    for path, mode, kind in (("none/x", "w", FileNotFoundError), ("there", "x", FileExistsError)):
        with pytest.raises(kind) as found:
            files.write(tmp_path / path, [b"1"] * 3, mode)
        assert found.value.filename == str(tmp_path / path) and found.value.errno in (errno.ENOENT, errno.EEXIST)
    with pytest.raises(OSError) as full:
        files.append(Path("/dev/full"), "x")
    assert full.value.errno == errno.ENOSPC
    with pytest.raises(ValueError, match="Out of range"):
        files.write_json(tmp_path / "x", {"loss": float("nan")})
    with pytest.raises(ZeroDivisionError):
        files.write(tmp_path / "torn", (bytes(1 // number) for number in (1, 0)))
    files.append(tmp_path / "after", "and it goes on")
    assert (tmp_path / "after").read_text() == "and it goes on"


def test_threads_share_it(tmp_path: Path, files: FileProcess) -> None:
    def write(number: int) -> None:
        for _ in range(20):
            files.append(tmp_path / str(number), f"{number}\n")

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    files.write(tmp_path / "large", [bytes(1 << 20)] * 8)
    for thread in threads:
        thread.join()
    assert [(tmp_path / str(number)).read_text() for number in range(4)] == [f"{number}\n" * 20 for number in range(4)]


def test_it_is_small_and_what_it_logs_is_the_ranks(
    tmp_path: Path, files: FileProcess, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "step_000003.tmp").mkdir()
    with caplog.at_level(logging.INFO):
        CheckpointStore(tmp_path, keep=1, files=files).ask("clean")
    assert "step_000003.tmp, left by an interrupted run" in caplog.text
    status = dict(line.split(":", 1) for line in Path(f"/proc/{files.pid}/status").read_text().splitlines())
    assert int(status["VmRSS"].split()[0]) < 25_000  # kB
    assert "torch" not in Path(f"/proc/{files.pid}/maps").read_text() and status["Name"].strip() == "file process"


def test_its_death_is_an_error_of_the_rank_and_no_hang(tmp_path: Path, files: FileProcess) -> None:
    files.append(tmp_path / "x", "x")
    os.kill(files.pid, signal.SIGKILL)
    with pytest.raises(
        RuntimeError, match=rf"file process {files.pid} of this rank was killed by signal 9 at \w+ .*/x"
    ):
        files.append(tmp_path / "x", "y")
    with pytest.raises(RuntimeError, match="killed by signal 9"):
        files.append(tmp_path / "x", "y")


def test_a_launchers_signals_do_not_end_it(tmp_path: Path, files: FileProcess) -> None:
    files.append(tmp_path / "x", "x")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        os.kill(files.pid, number)
    files.append(tmp_path / "x", "y")
    assert (tmp_path / "x").read_text() == "xy"


RANK = """
import os, sys
from pathlib import Path
from megatron_dapo.watch.evidence import activity
from megatron_dapo.watch.failure import EXIT_CODE, failure_of
from megatron_dapo.files.process import FileProcess
files = FileProcess()
files.append(Path(sys.argv[1]), "first\\n")
os.kill(files.pid, 19)  # stands in for a file system that hangs
print(files.pid, flush=True)
files.append(Path(sys.argv[1]), "late\\n")
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_rank_that_waits_ends_at_once_and_nothing_is_written_after_it(tmp_path: Path, number: int) -> None:
    command = [sys.executable, "-c", RANK, str(tmp_path / "lines")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        pid = int(rank.stdout.readline())
        time.sleep(0.3)
        start = time.monotonic()
        rank.send_signal(number)
        assert rank.wait(60.0) == -number and time.monotonic() - start < 10.0
    end = time.monotonic() + 60.0
    while activity(pid).state not in ("", "Z"):
        assert time.monotonic() < end, "the file process outlives its rank"
        time.sleep(0.05)
    assert (tmp_path / "lines").read_text() == "first\n"


def test_appended_bytes_are_counted_alone(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("old")
    file = OpenFile(tmp_path / "x", "a")
    file.write(b"new")
    assert file.finish().size == 3
    file.close()


def test_a_limit_on_files_is_one_of_those_it_writes(tmp_path: Path) -> None:
    """The shared memory is a file as well, and takes less where files may not be large."""
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))\n"
        "from pathlib import Path; from megatron_dapo.files.process import FileProcess\n"
        "files = FileProcess(); files.write(Path(sys.argv[1]), [bytes(2**20)])\n"
        "try: files.write(Path(sys.argv[1]), [bytes(2**21)])\n"
        "except OSError as error: print(error)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "x")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert "File too large" in done.stdout


def test_a_replaced_directory_is_written_to_by_no_request(files: FileProcess, tmp_path: Path) -> None:
    run, moved = tmp_path / "run", tmp_path / "moved"
    run.mkdir()
    here = Files()
    for one in (files, here):
        one.hold(run)
        one.append(run / "metrics.jsonl", "1\n")
        one.require_held()
    run.rename(moved)
    for replaces in (False, True):  # gone, then another one
        if replaces:
            run.mkdir()
        requests = (
            lambda one: one.require_held(),
            lambda one: one.append(run / "metrics.jsonl", "2\n"),
            lambda one: one.write(run / "batch", [b"0", b"1"]),
            lambda one: one.replace(run / "plan.json", "{}"),
            lambda one: one.make_directory(run / "step_000001.tmp"),
        )
        for one in (files, here):
            for request in requests:
                with pytest.raises(DirectoryReplaced, match=r"is another directory than before|is gone"):
                    request(one)
        with pytest.raises(DirectoryReplaced):
            files.start(write_part, run, 0, [], 1, None).result()
    assert list(run.iterdir()) == [] and (moved / "metrics.jsonl").read_text() == "1\n1\n"
    run.rmdir()
    moved.rename(run)  # mounted again
    files.append(run / "metrics.jsonl", "3\n")
    assert (run / "metrics.jsonl").read_text() == "1\n1\n3\n"


def test_an_error_while_a_directory_is_replaced_names_that(files: FileProcess, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    files.hold(run)
    with pytest.raises(subprocess.CalledProcessError):
        files.run(subprocess.check_call, ["false"])
    with pytest.raises(DirectoryReplaced, match="is gone"):
        files.run(subprocess.check_call, ["sh", "-c", f"mv {run} {tmp_path / 'moved'}; false"])


def test_a_replaced_directory_is_the_cause_of_a_failure_worth_another_attempt() -> None:
    try:
        try:
            raise DirectoryReplaced("/run is gone")
        except DirectoryReplaced as error:
            raise RuntimeError("checkpoint 3 could not be written") from error
    except RuntimeError as error:
        failure = failure_of(0, error)
    assert (failure.cause, failure.exit_code, failure.is_consequence) == ("file system lost", EXIT_CODE, False)
    assert "mount it again" in failure.advice
