"""One run directory, three jobs of the shipped script: on two nodes, on one, on two again."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from jobs import attempts, log_of, recorded_steps, require_completed, submit, trained_steps, write_layout

from megatron_dapo.checkpoints.formats.saved_model import MOMENTS, SavedModel
from tools.virtual_cluster import VirtualCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS_OF_JOB, GROUPS, GROUP_SIZE, WARMUP, PEAK = 2, 4, 4, 8, 1e-3


def test_two_nodes_one_and_two_again(
    two_nodes: VirtualCluster, job_environment: dict[str, str], tmp_path: Path
) -> None:
    layout = write_layout(tmp_path, num_processes=0)  # 0: as many as the job has
    for number, num_nodes in enumerate((2, 1, 2), start=1):
        sets = f"run.total_steps={number * STEPS_OF_JOB} optimizer.warmup_steps={WARMUP}"
        job = submit(two_nodes, job_environment, layout, sets=sets, num_nodes=num_nodes)
        require_completed(two_nodes, job, tmp_path)
        assert recorded_steps(tmp_path) == trained_steps(tmp_path) == number * STEPS_OF_JOB
        summary = json.loads((tmp_path / "out" / "summary.json").read_text())
        assert summary["layout"] == f"TP1 PP1 CP1 DP{num_nodes}"
    assert [record["completed_steps"] for record in attempts(tmp_path) if "began" in record] == [0, 2, 4]
    assert log_of(tmp_path).count("was saved by another layout") == 2
    require_one_run(tmp_path / "out")


def require_one_run(directory: Path) -> None:
    """Check that the records and the last checkpoint of a run are those of one that was never moved."""
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    num_steps = len(rows)
    assert [row["train_step"] for row in rows] == list(range(1, num_steps + 1))
    assert [row["rollout/groups_trained"] for row in rows] == [GROUPS] * num_steps
    rates = [row["actor/learning_rate"] for row in rows]
    assert rates == pytest.approx([PEAK * (step + 1) / WARMUP for step in range(num_steps)])
    samples = [json.loads(line) for line in (directory / "samples.jsonl").read_text().splitlines()]
    assert len({record["sample_id"] for record in samples}) == len(samples) == num_steps * GROUPS * GROUP_SIZE
    checkpoint = directory / "checkpoints" / f"step_{num_steps:06d}"
    state = json.loads((checkpoint / "collector.json").read_text())
    counters, kept = state["counters"], len(state["buffer"]["groups"]) + len(state["open_groups"])
    assert counters["num_started"] == counters["num_trained"] + counters["num_filtered"] + kept
    with SavedModel(checkpoint) as saved:
        for kind in MOMENTS:
            largest = max(float(saved.read_tensor(name, kind).abs().max()) for name in saved.specs)
            assert 0.0 < largest < math.inf, kind
