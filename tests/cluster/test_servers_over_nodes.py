"""A stock SGLang server of two tensor ranks, one on each of two nodes: started, synced, lost and kept as a whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jobs import attempts, log_of, recorded_steps, require_completed, submit, trained_steps, wait_for, write_layout
from test_role_restart import RUN_S, kill_worker, server_pids

from tools.fault_injection.cluster_run import SERVERS
from tools.virtual_cluster import VirtualCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SPREAD = (
    SERVERS.replace("tp_size = 1", "tp_size = 2\nnodes_per_server = 2")
    + 'placement = "disaggregated"\nweight_sync_transport = "p2p"\n'
)
NUM_STEPS = 5


def test_a_server_over_two_nodes_is_trained_with_lost_and_kept(
    two_nodes: VirtualCluster, job_environment: dict[str, str], engine_python: Path, tmp_path: Path
) -> None:
    layout = write_layout(tmp_path, engine="sglang", rest=SPREAD.format(python=engine_python), steps=NUM_STEPS)
    job = submit(two_nodes, job_environment, layout)
    wait_for(lambda: recorded_steps(tmp_path) >= 1, tmp_path, RUN_S)
    before = [server_pids(two_nodes, node) for node in two_nodes.nodes]
    assert [len(pids) for pids in before] == [1, 1]
    # The part that answers nothing dies. The other ends with it, and both are started again and synced.
    steps = recorded_steps(tmp_path)
    two_nodes.run("node1", "kill", "-KILL", str(before[1][0]))
    wait_for(lambda: recorded_steps(tmp_path) > steps + 1, tmp_path, RUN_S)
    restarted = [server_pids(two_nodes, node) for node in two_nodes.nodes]
    assert [len(pids) for pids in restarted] == [1, 1] and not set(sum(before, [])) & set(sum(restarted, []))
    # A trainer rank dies: both parts stay for the next attempt.
    kill_worker(two_nodes, tmp_path, "node1", 1)
    assert [server_pids(two_nodes, node) for node in two_nodes.nodes] == restarted
    require_completed(two_nodes, job, tmp_path)
    assert two_nodes.job(job).restarts == 0 and trained_steps(tmp_path) == NUM_STEPS
    assert len([record for record in attempts(tmp_path) if "began" in record]) == 2
    assert log_of(tmp_path).count("was kept with version") == 1
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert all(row["mismatch/abs_logprob_diff_mean"] < 1e-4 for row in rows)
    assert [server_pids(two_nodes, node) for node in two_nodes.nodes] == [[], []]
