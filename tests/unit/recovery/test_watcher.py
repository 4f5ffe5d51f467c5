"""Real ranks on one or two nodes, real faults: the first line printed and the first record name the culprit, and all end."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_dapo.recovery.evidence import activity
from megatron_dapo.recovery.watcher import SILENT_S, culprit_of_silence

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the watcher reads Linux's /proc and pidfds"),
]

RANK = Path(__file__).with_name("watched_rank.py")
ROOT = Path(__file__).resolve().parents[3]
CRASH_S, HANG_S = (
    5.0,
    20.0,
)  # from a fault to the record of its culprit, where no more processes run than the machine has cores
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: namespaces, cgroups and mounts")


class Run:
    """Ranks of one run, evenly on its nodes; `plans` say what each does after all are ready."""

    def __init__(
        self,
        directory: Path,
        plans: Sequence[str],
        num_nodes: int = 1,
        prefixes: Sequence[Sequence[str]] = (),
        host: str = "",
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
                "leader": [host or "127.0.0.1", port],
            }
            command = [
                *(prefixes[node] if prefixes else ()),
                sys.executable,
                str(RANK),
                json.dumps(place),
                str(directory),
                plan,
            ]
            self.logs.append(logs / f"log_{rank}")
            with self.logs[-1].open("w") as log:
                # As under srun: node 0 alone prints the verdict.
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
            if is_leader and b"recovery.watcher" in text and f'test-{self._port}"'.encode() in text:
                found.append(int(entry.name))
        return found

    @property
    def _port(self) -> int:
        return json.loads(self.processes[0].args[-3])["leader"][1]

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


def require_culprit(run: Run, rank: int, cause: str, within_s: float, phase: str = "train_actor") -> dict:
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


@pytest.mark.parametrize(("num_nodes", "victim"), [(1, 1), (2, 1), (2, 0)])
def test_a_killed_rank_is_named_also_rank_0(tmp_path: Path, num_nodes: int, victim: int) -> None:
    with running(tmp_path / "run", ["wait"] * 2, num_nodes) as run:
        os.kill(run.pid(victim), signal.SIGKILL)
        assert sorted(run.codes()) == [-9, 75]
        first = require_culprit(run, victim, "signal", CRASH_S)
        assert "signal 9 (SIGKILL)" in first["message"] and first["node"] == socket.gethostname()
        survivor = (run.directory / "stacks" / f"node_{0 if num_nodes == 1 else 1 - victim}.txt").read_text()
        assert "in all_reduce" in survivor and f"ranks [{1 - victim}]" in survivor


def test_a_broken_connection_is_a_consequence(tmp_path: Path) -> None:
    """The error of rank 1 comes after its peer's connection has broken, as a killed process's sockets close before it is gone."""
    with running(tmp_path / "run", ["reset:0.3", "reset:0.1", "wait", "wait"], 2) as run:
        os.kill(run.pid(3), signal.SIGKILL)
        assert run.codes() == [75, 75, 75, -9]
        require_culprit(run, 3, "signal", CRASH_S)
        causes = [(entry["rank"], entry["cause"]) for entry in run.record()["entries"]]
        assert sorted(causes) == [(0, "connection lost"), (1, "connection lost"), (3, "signal")]
        assert "rank 0 (" in run.text() and "as a consequence: RuntimeError: [gloo" in run.text()


def test_an_error_is_named_with_its_traceback_and_is_not_worth_a_restart(tmp_path: Path) -> None:
    with running(tmp_path / "run", ["wait", "raise:value", "reset:0.05"]) as run:
        assert run.codes() == [1, 1, 1]
        first = require_culprit(run, 1, "exception", CRASH_S)
        assert first["detail"].startswith("Traceback") and "bad gold" in first["message"]


def test_an_end_without_a_word_is_named(tmp_path: Path) -> None:
    with running(tmp_path / "run", ["wait", "exit:3"]) as run:
        assert run.codes() == [75, 3]
        assert "ended with exit code 3" in require_culprit(run, 1, "exit", CRASH_S)["message"]


def test_a_run_that_ends_in_good_order_leaves_no_record(tmp_path: Path) -> None:
    with running(tmp_path / "run", ["compute:0.1"] * 4, 2) as run:
        assert run.codes() == [0] * 4
        assert run.text() == "" and not (run.directory / "failure.json").exists()


def test_the_watcher_is_small_and_starts_fast(tmp_path: Path) -> None:
    with running(tmp_path / "run", ["wait"]) as run:
        [watcher] = run.watchers()
        status = dict(line.split(":", 1) for line in Path(f"/proc/{watcher}/status").read_text().splitlines())
        assert int(status["VmRSS"].split()[0]) < 20_000  # kB
        modules = Path(f"/proc/{watcher}/maps").read_text()
        assert "torch" not in modules and "numpy" not in modules
    program = "import time; import megatron_dapo.recovery.watcher; print(time.process_time())"
    command = [sys.executable, "-S", "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert float(done.stdout) < 0.4  # CPU seconds, the interpreter's own start among them


def test_stacks_on_request(tmp_path: Path) -> None:
    with running(tmp_path / "run", ["wait"]) as run:
        os.kill(run.pid(0), signal.SIGUSR1)
        end = time.monotonic() + 60
        while "in all_reduce" not in run.text():
            assert time.monotonic() < end
            time.sleep(0.1)
        assert run.processes[0].poll() is None


@pytest.mark.long
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_a_stopped_rank_is_named_and_its_stack_is_read(tmp_path: Path, num_nodes: int) -> None:
    with running(tmp_path / "run", ["wait", "compute:60"], num_nodes) as run:
        os.kill(run.pid(1), signal.SIGSTOP)
        assert run.codes() == [75, 75]
        require_culprit(run, 1, "stopped", HANG_S)
        assert "in compute" in (run.directory / "stacks" / f"node_{num_nodes - 1}.txt").read_text()


@pytest.mark.long
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_a_rank_that_hangs_outside_a_collective_is_named(tmp_path: Path, num_nodes: int) -> None:
    with running(tmp_path / "run", ["wait", "sleep"], num_nodes) as run:
        assert run.codes() == [75, 75]
        first = require_culprit(run, 1, "hang", HANG_S)
        assert "in act (recovery/watched_rank.py" in first["message"] and "in act" in first["detail"]


@pytest.mark.long
def test_the_rank_that_did_not_enter_a_collective_is_named(tmp_path: Path) -> None:
    """Real gloo: ranks 0 and 2 wait in their sixth all-reduce, rank 1 in a receive after its fifth. All look alike from outside."""
    with running(tmp_path / "run", ["gloo:6", "gloo:5", "gloo:6"]) as run:
        end = time.monotonic() + 120  # torch is imported first
        while len(list(run.directory.glob("met_*"))) < 3:
            assert time.monotonic() < end
            time.sleep(0.1)
        run.began = time.time()
        # Not all need be 75: gloo may abort a rank whose peer ends an instant before it.
        codes = run.codes()
        assert 75 in codes and 0 not in codes, codes
        first = require_culprit(run, 1, "hang", HANG_S)
        assert "it entered fewer collectives" in first["message"] and "in recv" in first["message"]
        stacks = (run.directory / "stacks" / "node_0.txt").read_text()
        assert "flight recorder" in stacks and "gloo:all_reduce" in stacks


@pytest.mark.long
def test_healthy_long_work_raises_no_alarm(tmp_path: Path) -> None:
    """60 s of pure CPU work on one rank without a mark of progress, while the other waits for it in a collective."""
    with running(tmp_path / "run", ["wait", "compute:60,raise:value"], 2) as run:
        assert run.codes(120) == [1, 1]
        require_culprit(run, 1, "exception", 60 + CRASH_S)


@pytest.mark.long
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_who_waited_for_the_last_rank_has_time_to_end_after_it(tmp_path: Path, num_nodes: int) -> None:
    """The others have been silent for longer than a hang when the rank that they wait for ends in good order."""
    with running(tmp_path / "run", [f"last:{SILENT_S + 3}", "barrier"], num_nodes) as run:
        assert run.codes() == [0, 0] and run.text() == "", run.text()


def silent(rank: int, wait: str = "collective", idle_s: float = 14.0, **groups: int) -> dict:
    where = {"node": f"node{rank}", "node_rank": rank, "phase": "score", "doing": f"f{rank}"}
    return {"rank": rank, "wait": wait, "idle_s": idle_s, "groups": groups, "sequence": sum(groups.values()), **where}


@pytest.mark.parametrize(
    ("ranks", "culprit", "reason"),
    [
        ([silent(0, a=7), silent(1, "", a=7), silent(2, a=7)], 1, "while the others wait for it"),
        ([silent(0, a=7, b=2), silent(1, a=7), silent(2, a=6, b=2)], 2, "fewer collectives"),
        # Rank 3 is late in both of its groups, rank 1 in one, because it waits for rank 3 in the other.
        ([silent(0, a=5), silent(1, a=4, b=9), silent(2, c=3), silent(3, b=8, c=2)], 3, "fewer collectives"),
        ([silent(0, a=5), silent(1, idle_s=20.0, a=5)], 1, "wait for each other"),
        ([silent(4, a=5)], 4, "no other rank is left"),
    ],
)
def test_the_culprit_of_a_silence(ranks: list, culprit: int, reason: str) -> None:
    found, message = culprit_of_silence(ranks)
    assert found["rank"] == culprit and reason in message


@contextmanager
def two_nodes_and_a_switch(name: str) -> Iterator[list[list[str]]]:
    """Yield commands that run a program on each of two nodes with an address of their own; `name`-sw has their ports."""
    switch, nodes = f"{name}-sw", [f"{name}-{index}" for index in range(2)]

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, timeout=20)

    try:
        for node in (switch, *nodes):
            ip("netns", "add", node)
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        for index, node in enumerate(nodes):
            ip("link", "add", "eth0", "netns", node, "type", "veth", "peer", "name", f"port{index}", "netns", switch)
            ip("-n", switch, "link", "set", f"port{index}", "master", "bridge", "up")
            ip("-n", node, "addr", "add", f"10.99.0.{index + 1}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", node, "link", "set", device, "up")
        # Host names tell the nodes apart.
        yield [
            ["ip", "netns", "exec", node, "unshare", "--uts", "sh", "-c", f'hostname node{index}; exec "$@"', "sh"]
            for index, node in enumerate(nodes)
        ]
    finally:
        for node in (switch, *nodes):
            subprocess.run(["ip", "netns", "del", node], check=False, timeout=20, stderr=subprocess.DEVNULL)


@needs_root
@pytest.mark.long
@pytest.mark.skipif(shutil.which("ip") is None, reason="needs iproute2")
@pytest.mark.parametrize("down", [0, 1])
def test_a_cut_link_is_named_by_both_sides(tmp_path: Path, down: int) -> None:
    """The switch's port of one node goes down; the files stay shared."""
    name = f"watch{os.getpid()}{down}"
    with (
        two_nodes_and_a_switch(name) as prefixes,
        running(tmp_path / "run", ["wait"] * 2, 2, prefixes, "10.99.0.1") as run,
    ):
        subprocess.run(["ip", "-n", f"{name}-sw", "link", "set", f"port{down}", "down"], check=True, timeout=20)
        assert run.codes() == [75, 75]
        assert run.seconds() < HANG_S
        for record in (run.directory / "failure.json", run.directory / f"failure_node_{1 - down}.json"):
            first = json.loads(record.read_text())["entries"][0]
            assert (first["node"], first["rank"], first["cause"]) == (f"node{down}", -1, "link lost"), (
                record.read_text()
            )
        assert f"attempt 7, node{down}, phase train_actor: link lost: " in run.logs[0].read_text()


@needs_root
@pytest.mark.long
@pytest.mark.skipif(shutil.which("tc") is None, reason="needs iproute2")
@pytest.mark.parametrize(("node", "is_deaf"), [(0, False), (0, True), (1, False), (1, True)])
def test_a_link_that_loses_one_direction_is_named_by_its_node(tmp_path: Path, node: int, is_deaf: bool) -> None:
    """Interfaces stay up: a third machine, which no longer answers one of the two, tells whose link it is."""
    name = f"way{os.getpid()}{node}{is_deaf:d}"
    with two_nodes_and_a_switch(name) as prefixes:
        subprocess.run(["ip", "-n", f"{name}-sw", "addr", "add", "10.99.0.9/24", "dev", "bridge"], check=True)
        for index in range(2):
            # The kernel learns who is on its network when it is talked to.
            command = ["ip", "netns", "exec", f"{name}-{index}", "bash", "-c", "echo > /dev/udp/10.99.0.9/9"]
            subprocess.run(command, check=False, capture_output=True)
        # In good times until the fault: the watchers ask once who answers.
        with running(tmp_path / "run", ["compute:6,wait"] * 2, 2, prefixes, "10.99.0.1") as run:
            time.sleep(4.0)
            end = (f"{name}-sw", f"port{node}") if is_deaf else (f"{name}-{node}", "eth0")
            command = ["tc", "-n", end[0], "qdisc", "add", "dev", end[1], "root", "pfifo", "limit", "0"]
            run.began = time.time()
            subprocess.run(command, check=True, timeout=20)
            assert run.codes() == [75, 75]
            first = run.record()["entries"][0]
            assert (first["node"], first["rank"]) == (f"node{node}", -1) and run.seconds() < HANG_S, run.text()
            assert first["cause"] == "link lost" and "10.99.0.9 answer" in first["message"], first


@needs_root
@pytest.mark.long
@pytest.mark.skipif(shutil.which("tc") is None, reason="needs iproute2")
def test_a_slow_link_is_no_hang(tmp_path: Path) -> None:
    """At 1 Mbit/s both ranks are in one collective, and without work to do, for twice the silence of a hang."""
    name = f"slow{os.getpid()}"
    with two_nodes_and_a_switch(name) as prefixes:
        limit = ["tbf", "rate", "1mbit", "burst", "32kbit", "latency", "400ms"]
        command = ["tc", "-n", f"{name}-0", "qdisc", "add", "dev", "eth0", "root", *limit]
        subprocess.run(command, check=True, timeout=20)
        with running(tmp_path / "run", ["stream:4000000"] * 2, 2, prefixes, "10.99.0.1") as run:
            assert run.codes(120) == [0, 0], run.text()
            assert time.time() - run.began > 2 * SILENT_S
            assert run.text() == "", run.text()


@needs_root
@pytest.mark.long
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_silent_node_is_named_also_that_of_the_leader(tmp_path: Path, stopped: int) -> None:
    """Every process of a node is stopped, its watcher too, as when it loses its power."""
    with running(tmp_path / "run", ["wait"] * 4, 2) as run:
        victims = [run.pid(2 * stopped), run.pid(2 * stopped + 1)]
        watchers = [
            pid for pid in run.watchers() if f'"node_rank": {stopped}' in Path(f"/proc/{pid}/cmdline").read_text()
        ]
        try:
            for pid in watchers + victims:
                os.kill(pid, signal.SIGSTOP)
            others = [process for process in run.processes if process.pid not in victims]
            assert [process.wait(60) for process in others] == [75, 75]
            first = run.record()["entries"][0]
            assert (first["cause"], first["node_rank"], first["rank"]) == ("node lost", stopped, -1), run.text()
            assert run.seconds() < HANG_S and first["node"] == socket.gethostname()
        finally:
            for pid in watchers + victims:
                os.kill(pid, signal.SIGKILL)


@pytest.mark.long
def test_of_four_nodes_the_next_one_decides_when_that_of_the_leader_is_silent(tmp_path: Path) -> None:
    with running(tmp_path / "run", ["wait"] * 4, 4) as run:
        end = time.monotonic() + 60
        while len(watchers := run.watchers()) < 4:
            assert time.monotonic() < end
        time.sleep(2.0)  # each has had an answer of the leader, which says who is next
        [leader] = [pid for pid in watchers if '"node_rank": 0' in Path(f"/proc/{pid}/cmdline").read_text()]
        run.began = time.time()
        try:
            for pid in (leader, run.pid(0)):
                os.kill(pid, signal.SIGSTOP)
            assert [process.wait(60) for process in run.processes[1:]] == [75] * 3
            document = run.record()
            assert document["writer"] == "node_1" and document["line"] in run.logs[1].read_text(), run.text()
            assert [(each["cause"], each["node_rank"]) for each in document["entries"]] == [("node lost", 0)]
            assert run.seconds() < HANG_S and not list(run.directory.glob("failure_node_*"))
        finally:
            for pid in (leader, run.pid(0)):
                os.kill(pid, signal.SIGKILL)


@needs_root
def test_out_of_memory_is_told_from_a_kill(tmp_path: Path) -> None:
    root = Path("/sys/fs/cgroup/memory")
    if not root.is_dir():
        root = Path("/sys/fs/cgroup")
        if "memory" not in (root / "cgroup.subtree_control").read_text():
            pytest.skip("no memory controller in this cgroup")
    cgroup = root / f"watch{os.getpid()}"
    cgroup.mkdir()
    try:
        limit = cgroup / ("memory.limit_in_bytes" if (cgroup / "memory.limit_in_bytes").exists() else "memory.max")
        limit.write_text(str(256 << 20))
        prefix = ["sh", "-c", f'echo $$ > {cgroup}/cgroup.procs; exec "$@"', "sh"]
        with running(tmp_path / "run", ["wait", "eat"], 1, [prefix]) as run:
            assert run.codes() == [75, -9]
            first = require_culprit(run, 1, "out of memory", 60.0)
            assert "limit of its cgroup of 0.2 GiB" in first["message"], first
    finally:
        end = time.monotonic() + 60
        while cgroup.exists():
            try:
                cgroup.rmdir()
            except OSError:  # a process in it has not quite ended
                assert time.monotonic() < end
                time.sleep(0.1)


@contextmanager
def small_file_system(directory: Path, megabytes: int) -> Iterator[Path]:
    """Mount an ext4 file system of its own."""
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


@needs_root
def test_a_full_disk_is_named_on_itself(tmp_path: Path) -> None:
    """Not a byte is left for the record but what was reserved for it."""
    mount = tmp_path / "small"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(mount)], check=True, timeout=20)
    try:
        with running(mount / "run", ["wait", f"write:{mount}"]) as run:
            assert run.codes() == [1, 1]
            assert "No space left on device" in require_culprit(run, 1, "disk full", CRASH_S)["message"]
    finally:
        subprocess.run(["umount", str(mount)], check=True, timeout=20)


def test_datagrams_of_strangers_are_ignored(tmp_path: Path) -> None:
    """Random bytes, JSON of any form, and even the run's own identifier with nonsense: the run goes on."""
    with running(tmp_path / "run", ["compute:4"] * 2, 2) as run:
        _, port = json.loads(run.processes[0].args[-3])["leader"]
        generator = random.Random(0)
        forms = [b"[]", b"{}", b'{"run": 1}', b"\xff" * 60_000]
        for kind in ("beat", "answer", "x", 7, None):
            for extra in (
                {},
                {"verdict": 5},
                {"failures": [1], "is_done": 0, "ranks": None, "details": "x", "verdict": []},
            ):
                forms.append(json.dumps({"run": f"test-{port}", "from": 1, "kind": kind, **extra}).encode())
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            for _ in range(300):
                sender.sendto(generator.choice([*forms, generator.randbytes(200)]), ("127.0.0.1", port))
                time.sleep(0.002)
        assert run.codes() == [0, 0]
        assert not (run.directory / "failure.json").exists()
        assert all("ignored a datagram" in line for line in run.text().splitlines()), run.text()
