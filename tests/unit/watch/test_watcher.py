"""Real ranks on one or two nodes, real faults: the first line printed and the first record name the culprit, and all end.

What is concluded from which facts is test_verdict.py's.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_dapo.watch import network
from megatron_dapo.watch.evidence import activity
from megatron_dapo.watch.failure import EXIT_CODE, Failure, clear_failures, first_line, write_failures
from megatron_dapo.watch.watcher import Watcher
from megatron_dapo.watch.watcher import _read_word as read_word

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the watcher reads Linux's /proc and pidfds"),
]

RANK = Path(__file__).with_name("watched_rank.py")
ROOT = Path(__file__).resolve().parents[3]
# From a fault to the record of its culprit, if no more processes run than the machine has cores.
CRASH_S, HANG_S = 5.0, 20.0
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: namespaces, cgroups and mounts")


class Run:
    """Ranks of one run, evenly on its nodes; `plans` say what each does after all are ready."""

    def __init__(
        self,
        directory: Path,
        plans: Sequence[str],
        num_nodes: int = 1,
        prefixes: Sequence[Sequence[str]] = (),
        limits: Mapping[str, float] | None = None,
    ) -> None:
        directory.mkdir(exist_ok=True)
        self.directory, self.processes, self.logs = directory, [], []
        logs = Path(tempfile.mkdtemp(prefix="watched_"))
        per_node, port = len(plans) // num_nodes, free_port()
        for rank, plan in enumerate(plans):
            node = rank // per_node
            place = {
                "rank": rank,
                "world_size": len(plans),
                "local_rank": rank % per_node,
                "node_rank": node,
                "num_nodes": num_nodes,
                "run_id": f"test-{port}",
                "leader": ["127.0.0.1", port],
            }
            command = [
                *(prefixes[node] if prefixes else ()),
                sys.executable,
                str(RANK),
                json.dumps(place),
                str(directory),
                plan,
                json.dumps(limits or {}),
            ]
            self.logs.append(logs / f"log_{rank}")
            with self.logs[-1].open("w") as log:
                # As under srun: only node 0 prints the verdict.
                environment = {**os.environ, "PYTHONPATH": str(ROOT), "SLURM_JOB_ID": "1"}
                self.processes.append(subprocess.Popen(command, env=environment, stderr=log))
        end = time.monotonic() + 120
        while len(list(directory.glob("ready_*"))) < len(plans):
            assert time.monotonic() < end and all(process.poll() is None for process in self.processes), self.text()
            time.sleep(0.05)
        time.sleep(0.3)
        self.began = time.time()

    def text(self) -> str:
        return "".join(log.read_text() for log in self.logs)

    def pid(self, rank: int) -> int:
        return self.processes[rank].pid

    def codes(self, timeout_s: float = 120.0) -> list[int]:
        """Wait for all ranks and their watchers; return the ranks' exit codes."""
        codes = [process.wait(timeout_s) for process in self.processes]
        end = time.monotonic() + 90
        while watchers := self.watchers():
            assert time.monotonic() < end, f"watchers {watchers} outlive their ranks"
            time.sleep(0.1)
        return codes

    def watchers(self) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            try:
                text = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
            except OSError:
                continue
            # Children that write files have the same command line; only the watcher leads a session.
            is_leader = entry.name.isdigit() and text and os.getsid(int(entry.name)) == int(entry.name)
            if is_leader and b"watch.watcher" in text and f'test-{self._port}"'.encode() in text:
                found.append(int(entry.name))
        return found

    @property
    def _port(self) -> int:
        return json.loads(self.processes[0].args[-4])["leader"][1]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        shutil.rmtree(self.logs[0].parent, ignore_errors=True)

    def record(self) -> dict:
        return json.loads((self.directory / "failure.json").read_text())

    def seconds(self) -> float:
        """Return the time from the fault to the record."""
        return (self.directory / "failure.json").stat().st_mtime - self.began


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(*arguments, **options) -> Iterator[Run]:
    run = Run(*arguments, **options)
    try:
        yield run
    finally:
        run.kill()


def require_culprit(run: Run, rank: int, cause: str, within_s: float, phase: str = "train") -> dict:
    """Assert that the first line printed and the first record name the culprit in time; return the record's first entry."""
    document = run.record()
    first, lines = document["entries"][0], [line for line in run.text().splitlines() if line.strip()]
    assert (first["rank"], first["cause"], first["phase"]) == (rank, cause, phase), run.text()
    assert (first["is_consequence"], document["attempt"]) == (False, 7)
    assert all(entry["is_consequence"] for entry in document["entries"][1:])
    assert lines[0] == document["line"], run.text()
    load = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    assert run.seconds() < within_s * load, (run.seconds(), load)
    return first


def test_a_killed_rank_is_named_and_what_follows_is_a_consequence(tmp_path: Path) -> None:
    """Rank 0 dies, on the node that decides. The error of rank 2 comes first, as a killed process's sockets close before it is gone."""
    with running(tmp_path / "run", ["wait", "wait", "reset:0.3", "wait"], 2) as run:
        os.kill(run.pid(0), signal.SIGKILL)
        assert run.codes() == [-9, 75, 75, 75]
        first = require_culprit(run, 0, "signal", CRASH_S)
        assert "signal 9 (SIGKILL)" in first["message"] and first["node"] == socket.gethostname()
        assert [(entry["rank"], entry["cause"]) for entry in run.record()["entries"][1:]] == [(2, "connection lost")]
        assert "rank 2 (" in run.text() and "as a consequence: RuntimeError: [gloo" in run.text()
        survivor = (run.directory / "stacks" / "node_0.txt").read_text()
        assert "in all_reduce" in survivor and "ranks [1]" in survivor


def test_an_error_is_named_with_its_traceback_and_is_not_worth_a_restart(tmp_path: Path) -> None:
    with running(tmp_path / "run", ["wait", "raise:bad gold"]) as run:
        assert run.codes() == [1, 1]
        first = require_culprit(run, 1, "exception", CRASH_S)
        assert first["detail"].startswith("Traceback") and "bad gold" in first["message"]


def test_a_hang_of_ranks_that_spin_is_seen_by_their_collectives(tmp_path: Path) -> None:
    """Real gloo. Rank 0 waits in its sixth all-reduce and rank 1 never enters it: both are as busy as ranks are in NCCL."""
    with running(tmp_path / "run", ["spin:6", "spin:5"], limits={"stalled_s": 2.0}) as run:
        end = time.monotonic() + 120  # torch is imported first
        while len(list(run.directory.glob("met_*"))) < 2:
            assert time.monotonic() < end
            time.sleep(0.05)
        run.began = time.time()
        # Not all need be 75: gloo may abort a rank whose peer ends an instant before it.
        codes = run.codes()
        assert 75 in codes and 0 not in codes, codes
        first = require_culprit(run, 1, "hang", 20.0)  # the ranks spin on all cores
        assert "5 of group 0 (default_pg), the ranks that wait for it 6" in first["message"], first["message"]
        assert "gloo:all_reduce" in (run.directory / "stacks" / "node_0.txt").read_text()


def test_a_run_that_ends_in_good_order_leaves_no_record_but_stacks_on_request(tmp_path: Path) -> None:
    with running(tmp_path / "run", ["compute:2"] * 2, 2) as run:
        os.kill(run.pid(0), signal.SIGUSR1)
        assert run.codes() == [0, 0]
        assert "in compute" in run.logs[0].read_text() and run.logs[1].read_text() == ""
        assert not (run.directory / "failure.json").exists()


def test_the_watcher_imports_only_the_standard_library() -> None:
    """It starts fast, and does not depend on what the environment installs."""
    program = (
        "import sys, time, megatron_dapo.watch.watcher; print(time.process_time(), {'torch', 'numpy'} & {*sys.modules})"
    )
    command = [sys.executable, "-S", "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    seconds, modules = done.stdout.split(maxsplit=1)
    assert float(seconds) < 0.4 and modules.strip() == "set()"


@contextmanager
def small_file_system(directory: Path, megabytes: int) -> Iterator[Path]:
    """Mount a separate ext4 file system."""
    image, mount = directory / "image", directory / "mount"
    mount.mkdir()
    with image.open("wb") as stream:
        stream.truncate(megabytes << 20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True, timeout=60)
    subprocess.run(["mount", "-o", "loop", str(image), str(mount)], check=True, timeout=60)
    try:
        yield mount
    finally:
        end = time.monotonic() + 20  # a rank that the file system has held ends only now
        while subprocess.run(["umount", str(mount)], check=False, timeout=60).returncode:
            assert time.monotonic() < end
            time.sleep(0.2)


@needs_root
@pytest.mark.long
@pytest.mark.skipif(shutil.which("fsfreeze") is None, reason="needs util-linux's fsfreeze and e2fsprogs")
def test_a_hung_file_system_is_named_and_what_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen file system holds whoever writes to it: not even SIGKILL ends that rank before it thaws.

    Its launcher, which waits for it as torchrun does, ends nevertheless.
    """
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    launcher = ["sh", "-c", '"$@"; exit 9', "sh"]
    with small_file_system(tmp_path, 32) as mount:
        with running(mount / "run", ["wait", f"append:{mount / 'file'}"], 1, [launcher]) as run:
            subprocess.run(["fsfreeze", "--freeze", str(mount)], check=True, timeout=20)
            (tmp_path / "go").touch()
            began = time.monotonic()
            try:
                assert [process.wait(60) for process in run.processes] == [9, -signal.SIGKILL]
                assert time.monotonic() - began < HANG_S + 10
                end = time.monotonic() + 90
                while run.watchers():
                    assert time.monotonic() < end
                    time.sleep(0.2)
            finally:
                subprocess.run(["fsfreeze", "--unfreeze", str(mount)], check=True, timeout=20)
            text = "".join(path.read_text() for path in run.logs)
        lines = [line for line in text.splitlines() if line.strip()]
        assert "rank 1 (" in lines[0] and f"file system hung: {mount / 'run'}" in lines[0], text
        assert "does not end: the kernel holds it" in text and f", with {mount / 'file'}" in text
        assert "the file system holds process" in text


@needs_root
@pytest.mark.long
@pytest.mark.skipif(shutil.which("fsfreeze") is None, reason="needs util-linux's fsfreeze and e2fsprogs")
@pytest.mark.parametrize("state", ["D", "S"])
def test_a_hung_file_system_holds_the_file_process_and_no_rank(tmp_path: Path, state: str) -> None:
    """The rank ends within 10 s of the verdict; its file process is named with its file, and writes nothing after the thaw.

    "S": it sleeps interruptibly, as with FUSE; a pipe that nobody reads stands in.
    """
    with small_file_system(tmp_path, 32) as mount:
        (mount / "directory").mkdir()
        file = mount / "directory" / "lines"
        if state == "D":
            file.write_text("before\n")
        else:
            os.mkfifo(file)
        (mount / "go").touch()
        with running(mount / "run", ["wait", f"sleep:1.5,files:{file}"]) as run:
            subprocess.run(["fsfreeze", "--freeze", str(mount)], check=True, timeout=20)
            try:
                while not run.text():
                    assert time.time() - run.began < HANG_S
                    time.sleep(0.05)
                verdict, line = time.monotonic(), run.text().splitlines()[0]
                pid = int(line.split("file process ")[1].split(",")[0])
                assert activity(pid).state == state
                assert run.codes() == [75, 75] and time.monotonic() - verdict < 10.0
                others = run.text().splitlines()[1:]
            finally:
                subprocess.run(["fsfreeze", "--unfreeze", str(mount)], check=True, timeout=20)
            held = f"file process {pid}, at append {file}"
            assert "rank 1 (" in line and f"file system hung: {mount / 'run'}" in line and f"it holds {held}" in line
            assert any(f"ends without what the kernel holds: {held}" in each for each in others) == (state == "D")
            end = time.monotonic() + 10.0
            while activity(pid).state not in ("", "Z"):
                assert time.monotonic() < end, "the file process outlives the thaw"
                time.sleep(0.05)
        assert state == "S" or file.read_text() == "before\n"


def test_a_node_that_does_not_resolve_rank_0_s_name_says_so_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_address(*arguments: object, **options: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(network, "_RESOLVE_S", 0.0)
    monkeypatch.setattr(socket, "getaddrinfo", no_address)
    place = {"node_rank": 1, "num_nodes": 2, "world_size": 2, "leader": ["node0", 1], "run_id": "x", "attempt": 3}
    watcher = Watcher({**place, "address": f"test-no-address-{os.getpid()}"})
    [failure] = watcher._run.decide(time.monotonic() + 5.0, time.time())
    assert watcher._run.is_leader and failure.cause == "no address" and failure.exit_code == EXIT_CODE
    host = socket.gethostname()
    line = f"first failure: attempt 3, {host}, phase start: NoAddress: the node of rank 0, 'node0', has no address on {host}: "
    assert first_line(failure).startswith(line)


def test_what_a_lost_node_left_is_read_once_it_belongs_to_this_start(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_word(tmp_path, 1, 0, "start 2")
    (tmp_path / ".no_contact_1_0").write_text("start 1")
    with pytest.raises(FileNotFoundError):
        read_word(tmp_path, 1, 0, "start 2")
    (tmp_path / ".no_contact_1_0").write_text("start 2")
    with pytest.raises(OSError, match="already connected"):
        read_word(tmp_path, 1, 0, "start 2")
    write_failures(tmp_path, [Failure(-1, "link lost", "no carrier", "node1")], "node_1")
    assert read_word(tmp_path, 1, 0, "start 2") is None
    clear_failures(tmp_path, keep=7)
    assert list(tmp_path.iterdir()) == []
