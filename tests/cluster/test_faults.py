"""Faults of a node, its link and the file system, on a cluster of four nodes: the record names the culprit in time, all ranks
end, and the job starts again if that helps."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import cancel, log_of, require_completed, submit, trained_steps, wait_for, write_layout

from megatron_dapo.launch.local import worker_pid_file
from tools.fault_injection.faults import fill
from tools.virtual_cluster import VirtualCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NAMED_S = 20.0  # limit between a fault and the record of its culprit
END_S = 10.0  # limit between that record and the end of all ranks


class Job:
    """A run of 500 steps on the first nodes of a cluster, with its directory on a separate disk."""

    def __init__(
        self, cluster: VirtualCluster, environment: dict[str, str], logs: Path, disk: Path, num_nodes: int
    ) -> None:
        self.cluster, self.logs, self.num_nodes = cluster, logs, num_nodes
        self.disk, self.output = disk, disk / logs.name
        layout = write_layout(logs, steps=500, num_processes=num_nodes, output=self.output)
        self.number = submit(cluster, environment, layout, sets="checkpoint.keep=2", num_nodes=num_nodes)
        wait_for(lambda: self.steps() >= 2, logs)

    def steps(self) -> int:
        metrics = self.output / "metrics.jsonl"
        return metrics.read_bytes().count(b"\n") if metrics.is_file() else 0

    def inject(self, kind: str, node: str = "") -> None:
        self.began = time.time()
        if kind == "fill":
            fill(self.disk / "filler")
        elif kind == "freeze":
            subprocess.run(["fsfreeze", "--freeze", str(self.disk)], check=True)
        else:
            self.cluster.fault(kind, node)

    def heal(self) -> None:
        subprocess.run(["fsfreeze", "--unfreeze", str(self.disk)], capture_output=True, check=False)
        (self.disk / "filler").unlink(missing_ok=True)
        for node in self.cluster.nodes:
            self.cluster.fault("plug", node)

    def record(self, within_s: float) -> dict:
        """Wait for failure.json, which must come within `within_s` of the fault; return its first entry."""
        path = self.output / "failure.json"
        wait_for(path.is_file, self.logs, 60.0)
        seconds = path.stat().st_mtime - self.began
        document = json.loads(path.read_text())
        assert seconds < within_s, f"named after {seconds:.1f} s: {document['line']}"
        first = document["entries"][0]
        where = document["line"].split(", phase")[0]
        # What a node that is cut off prints does not arrive, but the others say the same of it.
        wait_for(lambda: where in log_of(self.logs), self.logs, 15.0)
        return first

    def wait_for_the_end_of_ranks(self) -> float:
        """Assert that no process of a rank is left on any node soon after the record; return the seconds that it took."""

        def is_over() -> bool:
            return not any("megatron_dapo.run.worker" in self.processes(node) for node in self.cluster.nodes[: self.num_nodes])

        return wait_for(is_over, self.logs, END_S + 5.0)

    def processes(self, node: str) -> str:
        return self.cluster.run(node, "ps", "-eo", "stat,args")


@pytest.fixture
def job(
    four_nodes: VirtualCluster,
    small_shared_disk: Path,
    job_environment: dict[str, str],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> Iterator[Job]:
    """A run under way, on as many nodes as the test's parameter says; afterwards its cluster is whole again."""
    found = Job(four_nodes, job_environment, tmp_path, small_shared_disk, getattr(request, "param", 2))
    try:
        yield found
    finally:
        found.heal()
        cancel(four_nodes, found.number)


def test_four_nodes(four_nodes: VirtualCluster, job_environment: dict[str, str], tmp_path: Path) -> None:
    job = submit(four_nodes, job_environment, write_layout(tmp_path, num_processes=4), num_nodes=4)
    require_completed(four_nodes, job, tmp_path)
    assert trained_steps(tmp_path) == 2


@pytest.mark.parametrize(
    ("job", "kind", "node"),
    [(4, "mute", "node2"), (4, "deafen", "node0")],
    indirect=["job"],
)
def test_a_link_that_loses_one_direction_is_named_with_its_node(job: Job, kind: str, node: str) -> None:
    """No interface goes down: a node that hears nobody can tell only that nobody answers any more."""
    job.inject(kind, node)
    first = job.record(NAMED_S)
    assert (first["cause"], first["node"], first["rank"]) == ("link lost", node, -1), first
    job.wait_for_the_end_of_ranks()


def test_a_slow_link_is_no_failure(job: Job) -> None:
    """At 1 Mbit/s the gradients of one step take longer than the silence that is a hang elsewhere."""
    job.inject("throttle", "node1")
    time.sleep(45.0)
    assert not (job.output / "failure.json").exists(), log_of(job.logs)[-3000:]
    job.heal()
    steps = job.steps()
    wait_for(lambda: job.steps() >= steps + 2, job.logs)
    assert job.cluster.job(job.number).restarts == 0


def test_a_full_disk_is_named_on_it(job: Job) -> None:
    """The record is written although not a byte is left, and what would repeat is not started again.

    The save in flight fails at once, and the ranks see it at the end of the train step.
    """
    job.inject("fill")
    first = job.record(NAMED_S)
    assert first["cause"] == "disk full" and first["node"] == f"node{first['rank']}", first
    state = job.cluster.wait(job.number, 60.0)
    assert (state.state, state.exit_code, state.restarts) == ("FAILED", "1:0", 0), log_of(job.logs)[-3000:]


def test_a_hung_file_system_holds_no_rank_and_is_named_with_its_file(job: Job) -> None:
    """All ranks end within 10 s of the verdict, while the file system still hangs; the line names a file process and its file."""
    job.inject("freeze")
    seconds = wait_for(lambda: "first failure: " in log_of(job.logs), job.logs, 60.0)
    line = next(line for line in log_of(job.logs).splitlines() if line.startswith("first failure: "))
    assert "file system hung" in line and seconds < NAMED_S, (seconds, line)
    assert re.search(rf"it holds file process \d+, at \w+ {re.escape(str(job.output))}", line), line
    assert job.wait_for_the_end_of_ranks() < END_S
    assert "does not end" not in log_of(job.logs), log_of(job.logs)[-3000:]


def first_lines(job: Job, attempt: int) -> list[str]:
    return [line for line in log_of(job.logs).splitlines() if line.startswith(f"first failure: attempt {attempt}, ")]


def begun(job: Job) -> list[int]:
    """Return the numbers of the attempts that have begun."""
    records = map(json.loads, filter(None, (job.output / "attempts.jsonl").read_text().splitlines()))
    return [record["attempt"] for record in records if "began" in record]


def test_a_lost_path_and_an_unmounted_directory_are_named_and_the_job_goes_on(job: Job) -> None:
    """One job, two attempts that fail; nothing is written to the bare mount point."""
    cluster, bare = job.cluster, str(job.disk)
    device = subprocess.run(["findmnt", "-n", "-o", "SOURCE", bare], check=True, capture_output=True, text=True).stdout.strip()
    cluster.lose_path("node1", "node0")
    wait_for(lambda: bool(first_lines(job, 1)), job.logs, 60.0)
    cluster.mend_path("node1", "node0")
    for line in first_lines(job, 1):
        assert "attempt 1, node0 and node1, phase " in line and "path lost" in line, line

    wait_for(lambda: begun(job) == [1, 2], job.logs)
    steps = job.steps()
    wait_for(lambda: job.steps() > steps, job.logs)
    cluster.run("node0", "umount", "-l", bare)
    wait_for(lambda: bool(first_lines(job, 2)), job.logs, 60.0)
    assert "rank 0 (node0)" in first_lines(job, 2)[0] and "is gone on node0" in first_lines(job, 2)[0], first_lines(job, 2)
    wait_for(lambda: "knows nothing of this launch" in log_of(job.logs), job.logs, 60.0)
    assert cluster.run("node0", "ls", "-A", bare) == "", "something was written to the mount point"
    cluster.run("node0", "mount", device, bare)
    steps = job.steps()
    wait_for(lambda: job.steps() > steps, job.logs)
    assert begun(job) == [1, 2, 3] and cluster.job(job.number).restarts >= 2


def workers(job: Job, node: str) -> list[str]:
    """Return the process ids of a node's ranks."""
    lines = job.cluster.run(node, "ps", "-eo", "pid,args").splitlines()
    return [line.split()[0] for line in lines if "-m megatron_dapo.run.worker" in line and "--keep-servers" not in line]


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_starts_that_fail_are_repeated_and_a_directory_in_the_place_of_the_run_s_stays_empty(job: Job) -> None:
    """One job: attempt 2 meets a node that does not know rank 0's name, attempt 3 loses a rank before it is on record, attempt 4
    trains until its directory is replaced."""
    cluster = job.cluster
    cluster.run("node1", "mount", "--bind", "/dev/null", "/etc/hosts")
    cluster.run("node1", "kill", "-KILL", worker_pid_file(job.output, 1).read_text())
    wait_for(lambda: bool(first_lines(job, 2)), job.logs)
    cluster.run("node1", "umount", "/etc/hosts")
    assert "attempt 2, node1, phase start: NoAddress: the node of rank 0, 'node0'," in first_lines(job, 2)[0]

    wait_for(lambda: log_of(job.logs).count("exit code 75: ") == 2, job.logs)
    wait_for(lambda: bool(workers(job, "node1")), job.logs)
    cluster.run("node1", "kill", "-KILL", *workers(job, "node1"))
    wait_for(lambda: log_of(job.logs).count("exit code 75: ") == 3, job.logs)
    assert "the workers ended before the attempt was on record" in log_of(job.logs).split("exit code 75: ")[3]
    steps = job.steps()
    wait_for(lambda: job.steps() > steps, job.logs)
    assert begun(job) == [1, 2, 3, 4] and cluster.job(job.number).restarts == 3

    aside = job.output.with_suffix(".aside")
    job.output.rename(aside)
    job.output.mkdir()
    wait_for(lambda: bool(first_lines(job, 4)), job.logs, 60.0)
    assert f"{job.output} is another directory than before on node" in first_lines(job, 4)[0]
    state = cluster.wait(job.number, 180.0)
    assert state.state == "FAILED" and "does not know of it" in log_of(job.logs), log_of(job.logs)[-3000:]
    assert list(job.output.iterdir()) == [], "something was written to the new directory"
    assert (aside / "metrics.jsonl").read_bytes().count(b"\n") >= steps
