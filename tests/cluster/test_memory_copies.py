"""Copies of checkpoints in memory of the nodes: a restart after a killed rank reads its own node's, one after a lost node the
peer's, and both end with the bits of a run that nothing disturbed."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from jobs import (
    RUN_S,
    attempts,
    log_of,
    recorded_steps,
    require_completed,
    submit,
    trained_steps,
    wait_for,
    write_layout,
)

from megatron_dapo.launch.local import worker_pid_file
from tools.resume_proof.compare_runs import run_differences
from tools.virtual_cluster import VirtualCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * RUN_S)]

NUM_STEPS, INTERVAL = 6, 3
SAVES = f"checkpoint.keep=3 checkpoint.interval={INTERVAL}"
SETS = f"checkpoint.memory_copies=peer checkpoint.memory_copies_seconds=300 {SAVES}"


@pytest.fixture(scope="module")
def undisturbed(
    three_nodes: VirtualCluster, job_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The directory of a run without copies that nothing disturbed."""
    directory = tmp_path_factory.mktemp("undisturbed")
    job = submit(three_nodes, job_environment, write_layout(directory, steps=NUM_STEPS), sets=SAVES)
    require_completed(three_nodes, job, directory)
    return directory


def start(cluster: VirtualCluster, environment: dict[str, str], directory: Path) -> int:
    """Submit a run with copies and wait until its first checkpoint is in place and copied; the next one is steps away.

    A commit does not wait for the copies: of a node that is lost between the two, storage is read.
    """
    job = submit(cluster, environment, write_layout(directory, steps=NUM_STEPS), sets=SETS)
    wait_for(lambda: f"checkpoint of train step {INTERVAL} in" in log_of(directory), directory, RUN_S)
    time.sleep(1.0)
    return job


def keepers(cluster: VirtualCluster, node: str) -> int:
    return sum("memory keeper" in line for line in cluster.run(node, "ps", "-eo", "comm").splitlines())


def loaded(directory: Path) -> list[dict[str, int]]:
    """Return the files that each resume has read, by where they were."""
    pattern = r"read: (\d+) \([\d.]+ MB\) in memory of their node, (\d+) .*? of a peer, (\d+) "
    found = re.findall(pattern, log_of(directory))
    return [dict(zip(("node", "peer", "storage"), map(int, each))) for each in found]


def loaded_bytes(directory: Path) -> dict[str, int]:
    """Return the bytes that the last attempt's resume has read, from its metrics."""
    row = json.loads((directory / "out" / "metrics.jsonl").read_text().splitlines()[-1])
    return {source: int(row[f"checkpoint/loaded_{source}_bytes"]) for source in ("node", "peer", "storage")}


def require_same_bits(undisturbed: Path, directory: Path) -> None:
    assert trained_steps(directory) == NUM_STEPS
    assert next(run_differences(undisturbed / "out", directory / "out"), "") == ""


def test_a_killed_rank_is_replaced_by_one_that_reads_memory_of_its_node(
    three_nodes: VirtualCluster, job_environment: dict[str, str], tmp_path: Path, undisturbed: Path
) -> None:
    job = start(three_nodes, job_environment, tmp_path)
    assert [keepers(three_nodes, node) for node in three_nodes.nodes] == [1, 1, 0]
    steps = recorded_steps(tmp_path)
    three_nodes.run("node1", "kill", "-KILL", worker_pid_file(tmp_path / "out", 1).read_text())
    seconds = wait_for(lambda: recorded_steps(tmp_path) > steps, tmp_path, RUN_S)
    require_completed(three_nodes, job, tmp_path)
    assert three_nodes.job(job).restarts == 0 and len([each for each in attempts(tmp_path) if "began" in each]) == 2
    (files,), num_bytes = loaded(tmp_path), loaded_bytes(tmp_path)
    print(f"killed rank: next step after {seconds:.1f} s; read {files}, {num_bytes} bytes")
    assert files["node"] >= 2 and files["peer"] == files["storage"] == num_bytes["storage"] == 0 < num_bytes["node"]
    require_same_bits(undisturbed, tmp_path)
    wait_for(lambda: not any(keepers(three_nodes, node) for node in three_nodes.nodes), tmp_path, 10.0)


def test_a_lost_node_is_replaced_by_a_spare_one_that_reads_memory_of_the_peer(
    three_nodes: VirtualCluster, job_environment: dict[str, str], tmp_path: Path, undisturbed: Path
) -> None:
    job = start(three_nodes, job_environment, tmp_path)
    steps = recorded_steps(tmp_path)
    three_nodes.fault("power-off", "node1")
    try:
        seconds = wait_for(lambda: recorded_steps(tmp_path) > steps, tmp_path, RUN_S)
        assert keepers(three_nodes, "node2") == 1
        require_completed(three_nodes, job, tmp_path, restarts=1)
        (files,), num_bytes = loaded(tmp_path), loaded_bytes(tmp_path)
        print(f"lost node: next step after {seconds:.1f} s; read {files}, {num_bytes} bytes")
        assert files["node"] >= 1 and files["peer"] >= 1
        assert files["storage"] == num_bytes["storage"] == 0 < num_bytes["peer"]
        require_same_bits(undisturbed, tmp_path)
        wait_for(lambda: not any(keepers(three_nodes, node) for node in ("node0", "node2")), tmp_path, 10.0)
    finally:
        three_nodes.fault("boot", "node1")
