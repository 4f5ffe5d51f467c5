"""SGLang's servers outlive the trainer's step of a job, which slurm.sh starts again; a lost node's job moves to a spare one."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from jobs import (
    ENGINES,
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
from tools.fault_injection.cluster_run import SERVERS
from tools.virtual_cluster import VirtualCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NUM_STEPS = 8


def server_pids(cluster: VirtualCluster, node: str) -> list[int]:
    """Return the main processes of a node's servers."""
    command = cluster.command(node, ["pgrep", "-f", r"megatron_dapo\.engines\.sglang\.serve --"])
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return [int(line) for line in found.stdout.split()]


def start(
    cluster: VirtualCluster, environment: dict[str, str], python: Path, directory: Path, engine: str, sets: str = ""
) -> int:
    """Submit a run with a server on every node and wait for its second train step."""
    layout = write_layout(
        directory, engine="sglang", rest=SERVERS.format(python=python) + ENGINES[engine], steps=NUM_STEPS
    )
    job = submit(cluster, environment, layout, sets=sets)
    wait_for(lambda: recorded_steps(directory) >= 2, directory, RUN_S)
    return job


def kill_worker(cluster: VirtualCluster, directory: Path, node: str, rank: int) -> float:
    """Send SIGKILL to a trainer rank and return the seconds to the next finished train step."""
    num_steps = recorded_steps(directory)
    cluster.run(node, "kill", "-KILL", worker_pid_file(directory / "out", rank).read_text())
    return wait_for(lambda: recorded_steps(directory) > num_steps, directory, RUN_S)


@pytest.mark.parametrize("engine", ["colocated", "disaggregated"])
def test_the_trainer_alone_starts_again_beside_its_servers(
    two_nodes: VirtualCluster, job_environment: dict[str, str], engine_python: Path, tmp_path: Path, engine: str
) -> None:
    job = start(two_nodes, job_environment, engine_python, tmp_path, engine)
    before = [server_pids(two_nodes, node) for node in two_nodes.nodes]
    assert [len(pids) for pids in before] == [1, 1]
    seconds = kill_worker(two_nodes, tmp_path, "node1", 1)
    assert [server_pids(two_nodes, node) for node in two_nodes.nodes] == before
    print(f"role restart, {engine}: {seconds:.1f} s from SIGKILL to the next train step")
    require_completed(two_nodes, job, tmp_path)
    assert two_nodes.job(job).restarts == 0 and trained_steps(tmp_path) == NUM_STEPS
    assert len([record for record in attempts(tmp_path) if "began" in record]) == 2
    log = log_of(tmp_path)
    assert "rank 1 (node1), phase" in log and log.count("was kept with version") == 1, "rank 0 tells of its own"
    assert [server_pids(two_nodes, node) for node in two_nodes.nodes] == [[], []]


def test_without_kept_servers_the_job_is_requeued(
    two_nodes: VirtualCluster, job_environment: dict[str, str], engine_python: Path, tmp_path: Path
) -> None:
    job = start(two_nodes, job_environment, engine_python, tmp_path, "colocated", "sglang.keep_seconds=0")
    seconds = kill_worker(two_nodes, tmp_path, "node1", 1)
    print(f"whole-job restart: {seconds:.1f} s from SIGKILL to the next train step")
    require_completed(two_nodes, job, tmp_path, restarts=1)
    assert trained_steps(tmp_path) == NUM_STEPS and "was kept with version" not in log_of(tmp_path)


def test_a_cancelled_job_leaves_no_server(
    two_nodes: VirtualCluster, job_environment: dict[str, str], engine_python: Path, tmp_path: Path
) -> None:
    job = start(two_nodes, job_environment, engine_python, tmp_path, "colocated", "run.total_steps=500")
    two_nodes.run("ctl", "scancel", str(job))
    assert two_nodes.wait(job, 60.0).state == "CANCELLED"
    wait_for(lambda: not any(server_pids(two_nodes, node) for node in two_nodes.nodes), tmp_path, 30.0)


def test_the_job_of_a_lost_node_continues_on_a_spare_one(
    three_nodes: VirtualCluster, job_environment: dict[str, str], engine_python: Path, tmp_path: Path
) -> None:
    job = start(three_nodes, job_environment, engine_python, tmp_path, "colocated")
    lost, spare = "node1", "node2"
    assert server_pids(three_nodes, lost) and not server_pids(three_nodes, spare)
    num_steps = recorded_steps(tmp_path)
    three_nodes.fault("power-off", lost)
    wait_for(lambda: recorded_steps(tmp_path) > num_steps, tmp_path, RUN_S)
    assert server_pids(three_nodes, spare)
    require_completed(three_nodes, job, tmp_path, restarts=1)
    assert trained_steps(tmp_path) == NUM_STEPS
    assert not server_pids(three_nodes, "node0") and not server_pids(three_nodes, spare)
