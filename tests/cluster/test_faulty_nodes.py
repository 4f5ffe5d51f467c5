"""Nodes that become slow in a run of four: named within 90 s by their metrics, and none while all are healthy. A node that is
to be left out is not in the requeued job."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from jobs import attempts, cancel, log_of, recorded_steps, submit, wait_for, write_layout

from megatron_dapo.nodes.records import read_alerts
from megatron_dapo.nodes.samples import NodeAlert
from tools.virtual_cluster import CONTROLLER, VirtualCluster

HEALTHY_S = float(os.environ.get("MEGATRON_DAPO_HEALTHY_S", "180"))
FOUND_S = 90.0
SETS = "nodes.period_seconds=5.0 nodes.continuity_seconds=30.0 checkpoint.interval=20 checkpoint.keep=2"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900 + HEALTHY_S)]


class WatchedJob:
    """A run on four nodes, with its alerts."""

    def __init__(self, cluster: VirtualCluster, environment: dict[str, str], directory: Path, sets: str = "") -> None:
        self.cluster, self.directory = cluster, directory
        layout = write_layout(directory, num_processes=4, steps=100_000)
        self.number = submit(cluster, environment, layout, sets=f"{SETS} {sets}", num_nodes=4)
        wait_for(lambda: recorded_steps(directory) >= 2, directory, 300.0)

    def alerts(self) -> list[NodeAlert]:
        return read_alerts(self.directory / "out" / "nodes")

    def found(self, since: float) -> NodeAlert:
        """Wait for an alert and return it; it must come within FOUND_S of `since`."""
        known = len(self.alerts())
        wait_for(lambda: len(self.alerts()) > known, self.directory, FOUND_S - (time.time() - since))
        return self.alerts()[known]


def test_a_throttled_node_and_a_slow_link_are_named_and_healthy_nodes_are_not(
    five_nodes: VirtualCluster, job_environment: dict[str, str], tmp_path: Path
) -> None:
    job = WatchedJob(five_nodes, job_environment, tmp_path)
    try:
        time.sleep(HEALTHY_S)
        assert job.alerts() == [], f"in {HEALTHY_S:g} s in which all nodes were healthy"
        began = time.time()
        five_nodes.limit_cpu("node2", 0.05)
        alert = job.found(began)
        print(f"node2 throttled: {alert}; told after {time.time() - began:.0f} s")
        assert alert.node == "node2" and alert.since >= began - 10.0
        five_nodes.limit_cpu("node2", 0.0)
        time.sleep(60.0)
        began = time.time()
        five_nodes.fault("throttle", "node3")
        alert = job.found(began)
        print(f"node3's link slowed: {alert}; told after {time.time() - began:.0f} s")
        assert alert.node == "node3" and alert.since >= began - 10.0
        five_nodes.fault("plug", "node3")
        log = log_of(tmp_path)
        assert "faulty node: node2: " in log and "faulty node: node3: " in log
        assert not (tmp_path / "out" / "failure.json").exists(), "slow is no failure"
        rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
        assert any(row["nodes/generate_slowest_rank"] == 2 for row in rows), "the rank on the throttled node"
    finally:
        five_nodes.limit_cpu("node2", 0.0)
        five_nodes.fault("plug", "node3")
        cancel(five_nodes, job.number)
    processes = "".join(five_nodes.run(node, "ps", "-eo", "args") for node in five_nodes.nodes)
    assert "megatron_dapo.nodes." not in processes


def test_a_node_that_is_to_be_left_out_is_replaced_by_the_spare_one(
    five_nodes: VirtualCluster, job_environment: dict[str, str], tmp_path: Path
) -> None:
    job = WatchedJob(five_nodes, job_environment, tmp_path, 'nodes.action="exclude"')
    try:
        used = five_nodes.run(CONTROLLER, "squeue", "-h", "-j", str(job.number), "-o", "%N").strip()
        assert used == "node[0-3]"
        steps = recorded_steps(tmp_path)
        five_nodes.limit_cpu("node2", 0.05)
        wait_for(lambda: any(record.get("exit_code") == 75 for record in attempts(tmp_path)), tmp_path, 240.0)
        five_nodes.limit_cpu("node2", 0.0)
        (alert,) = [record for record in attempts(tmp_path) if "alert" in record]
        assert (alert["excluded"], alert["alert"]["node"]) == ("node2", "node2")
        wait_for(lambda: sum("began" in record for record in attempts(tmp_path)) == 2, tmp_path, 240.0)
        used = five_nodes.run(CONTROLLER, "squeue", "-h", "-j", str(job.number), "-o", "%N").strip()
        assert used == "node[0-1,3-4]"
        begun = [record["completed_steps"] for record in attempts(tmp_path) if "began" in record]
        assert begun[1] >= steps
        wait_for(lambda: recorded_steps(tmp_path) > begun[1], tmp_path, 300.0)
    finally:
        five_nodes.limit_cpu("node2", 0.0)
        cancel(five_nodes, job.number)
