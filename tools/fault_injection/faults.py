"""Puts faults into the nodes of a virtual cluster, and takes them out again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from tools.fault_injection.cluster_run import ClusterRun, RankProcess, command_line, is_given_up, wait_until
from tools.virtual_cluster import CGROUP_V1, CONTROLLER, VirtualCluster

ROOT = Path(__file__).resolve().parents[2]
DISK_MIB = 256
GIVEN_UP_S = 120.0
REPEATED_ORDER_S = 65.0
_FORWARDER = "import sys; from tools.fault_injection.forwarder import stand_between; stand_between(sys.argv[1])"
_HOG = """
import os, sys
open("/proc/self/oom_score_adj", "w").write("-1000")  # the kernel chooses among the others
blocks = []
for _ in range(int(sys.argv[1])):
    blocks.append(bytearray(os.urandom(4096)) * 256)
"""


@contextmanager
def small_disk(image: Path, directory: Path) -> Iterator[Path]:
    """A file system of `DISK_MIB` MiB on `directory`, which all nodes booted meanwhile see."""
    directory.mkdir(parents=True, exist_ok=True)
    image.write_bytes(b"")
    os.truncate(image, DISK_MIB << 20)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(directory)], check=True)
    try:
        yield directory
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", str(directory)], capture_output=True, check=False)
        for _ in range(50):
            if subprocess.run(["umount", str(directory)], capture_output=True, check=False).returncode == 0:
                break
            time.sleep(0.2)
        image.unlink(missing_ok=True)


class Injector:
    """Injects one fault at a time into a run; `heal` takes out what is in."""

    def __init__(self, cluster: VirtualCluster, disk: Path) -> None:
        self._cluster, self._disk = cluster, disk
        self._repairs: list[Callable[[], object]] = []

    def prepare(self, fault: str, run: ClusterRun, rank: int) -> Callable[[], None]:
        """Return the fault, ready to be injected within milliseconds. rank: the target, or one on the target node."""
        cluster, node = self._cluster, run.ranks[rank].node
        if fault in ("sigkill", "sigstop"):
            pid, number = run.ranks[rank].pid, signal.SIGKILL if fault == "sigkill" else signal.SIGSTOP
            if fault == "sigstop":
                self._repairs.append(lambda: _signal(pid, signal.SIGCONT))
            return lambda: _signal(pid, number)
        if fault == "sigkill-start":
            return partial(self._kill_twice, run, rank)
        if fault == "path-lost":
            other = next(each for each in cluster.nodes if each != node)
            self._repairs.append(lambda: cluster.mend_path(node, other))
            return lambda: cluster.lose_path(node, other)
        if fault == "unmount":
            device = subprocess.run(
                ["findmnt", "-n", "-o", "SOURCE", str(self._disk)], capture_output=True, text=True, check=True
            ).stdout.strip()
            self._repairs.append(lambda: cluster.run(node, "mount", device, str(self._disk)))
            return lambda: cluster.run(node, "umount", "-l", str(self._disk))
        if fault == "verifiers":
            return lambda: [_signal(pid, signal.SIGKILL) for pid in run.processes("megatron_dapo.rewards.pool.worker")]
        if fault == "server":
            servers = [pid for pid in run.processes("sglang", node) if run.is_session_leader(pid)]
            return lambda: [_signal(pid, signal.SIGKILL) for pid in servers]
        if fault == "oom":
            return lambda: self._meet_memory_limit(run.ranks[rank])
        if fault == "lossy":
            return self._forwarder(node)
        if fault == "disk-full":
            self._repairs.append((self._disk / "filler").unlink)
            return lambda: fill(self._disk / "filler")
        if fault == "fs-hung":
            self._repairs.append(lambda: subprocess.run(["fsfreeze", "--unfreeze", str(self._disk)], check=True))
            return lambda: subprocess.run(["fsfreeze", "--freeze", str(self._disk)], check=True)
        if fault == "scancel":
            return lambda: cluster.run(CONTROLLER, "scancel", str(run.job_id))
        if fault == "time-limit":
            job = str(run.job_id)
            self._repairs.append(
                lambda: cluster.run(CONTROLLER, "scontrol", "update", f"JobId={job}", "TimeLimit=2-00:00:00")
            )
            # Within the notice of --signal, before the limit itself.
            minutes = int((time.time() - run.job_began()) / 60) + 4
            return lambda: cluster.run(CONTROLLER, "scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}")
        kind, repair = {
            "unplug": ("unplug", "plug"),
            "mute": ("mute", "plug"),
            "deafen": ("deafen", "plug"),
            "throttle": ("throttle", "plug"),
            "power-off": ("power-off", "boot"),
            "slurmd": ("kill-slurmd", "start-slurmd"),
        }[fault]
        if fault == "power-off":
            self._repairs.append(lambda: (self._wait_given_up(node), cluster.fault(repair, node)))
        else:
            self._repairs.append(lambda: cluster.fault(repair, node))
        return lambda: cluster.fault(kind, node)

    @property
    def can_heal(self) -> bool:
        """True if a fault is in, or prepared, that can be taken out."""
        return bool(self._repairs)

    def heal(self) -> None:
        """Take out the fault that is in."""
        while self._repairs:
            with suppress(ProcessLookupError, FileNotFoundError):
                self._repairs.pop()()

    def _wait_given_up(self, node: str) -> None:
        """Wait until Slurm has given a node up, as it has when a machine has booted.

        Namespaces boot within a second and do not change the kernel's boot time, by which slurmctld knows that the job's
        step there is lost: it would wait for it forever. A minute after the node was given up slurmctld repeats the order
        to end the job there, and it would end the requeued job of the same number.
        """
        if wait_until(lambda: is_given_up(self._cluster, node), GIVEN_UP_S, poll_s=0.5):
            time.sleep(REPEATED_ORDER_S)

    def _kill_twice(self, run: ClusterRun, rank: int) -> None:
        """Kill a rank, and in the next attempt the process of the same node before it can have found the others."""
        target = run.ranks[rank]
        _signal(target.pid, signal.SIGKILL)

        def kill_next() -> None:
            known, end = {target.pid}, time.monotonic() + GIVEN_UP_S
            while time.monotonic() < end:
                workers = set(run.processes("megatron_dapo.run.worker", target.node)) - known
                started = [pid for pid in workers if "--keep-servers" not in command_line(pid)]
                for pid in started:
                    _signal(pid, signal.SIGKILL)
                if started:
                    return
                time.sleep(0.01)

        threading.Thread(target=kill_next, daemon=True).start()

    def _meet_memory_limit(self, target: RankProcess) -> None:
        """Set the limit of the node's cgroup to what it uses, let a small process of it use more, and see the rank end."""
        group = self._cluster.cgroups(target.node)[0]
        is_first = group.is_relative_to(CGROUP_V1)
        limit, usage = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes") if is_first else ("memory.max", "memory.current")
        )
        self._repairs.append(lambda: (group / limit).write_text("-1" if is_first else "max"))
        (group / limit).write_text(str(int((group / usage).read_text()) + (8 << 20)))
        # Page caches give way first: the hog may use as much as those and the rest, and less than a rank.
        hog = subprocess.Popen(self._cluster.command(target.node, [sys.executable, "-S", "-c", _HOG, "400"]))
        try:
            # The fault is the kernel's kill, which comes a second or two later.
            while hog.poll() is None and not target.has_ended():
                time.sleep(0.002)
        finally:
            hog.kill()
            hog.wait()

    def _forwarder(self, node: str) -> Callable[[], None]:
        """Start the forwarder of a node's frames, which lets all pass until it is told otherwise."""
        command = ["ip", "netns", "exec", self._cluster.namespace(CONTROLLER), sys.executable]
        process = subprocess.Popen(
            [*command, "-c", _FORWARDER, f"to-{node}"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None

        def stop() -> None:
            process.stdin.close()
            process.wait(timeout=10.0)

        self._repairs.append(stop)
        if process.stdout.readline() != b"ready\n":
            raise RuntimeError(f"the forwarder of {node}'s frames did not start")

        def inject() -> None:
            process.stdin.write(json.dumps({"delay_s": 0.02, "loss": 0.02}).encode() + b"\n")
            process.stdin.flush()

        return inject


def fill(path: Path) -> None:
    """Make a file of all the space that its file system has left."""
    with open(path, "wb") as stream:
        end, block = 0, 1 << 24
        while block >= 512:
            try:
                os.posix_fallocate(stream.fileno(), end, block)
                end += block
            except OSError:
                block //= 2


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
