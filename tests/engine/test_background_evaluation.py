"""A run that evaluates while it trains, killed in the middle: each evaluation is on record once, of one policy version."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from sglang_runs import ENVIRONMENT, command

from megatron_dapo.launch.local import worker_pid_file
from tools.prove_resume import write_recipe

NUM_STEPS, RUN_S = 3, 540.0
NUM_PROBLEMS, NUM_SAMPLES = 4, 24
BACKGROUND = (
    'sglang.placement="disaggregated"',
    "rollout.partial_rollout=true",
    "evaluation.background=true",
    "evaluation.interval=1",
    "evaluation.at_start=true",
    "evaluation.at_end=true",
    f"evaluation.num_samples={NUM_SAMPLES}",
    f"run.total_steps={NUM_STEPS}",
    "checkpoint.export_huggingface=false",
    "sglang.weight_sync_bucket_mb=1",
)


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


@pytest.mark.long  # tests/unit/trainer/test_loop.py has the order of evaluations, checkpoints and versions
def test_a_run_killed_during_an_evaluation_repeats_it(engine_python: Path, tmp_path: Path) -> None:
    recipe, directory, log = write_recipe(tmp_path), tmp_path / "run", tmp_path / "run.log"
    held_out = f'data.eval_paths=["{tmp_path / "heldout.jsonl"}"]'
    started = command(recipe, directory, engine_python, held_out, *BACKGROUND, layout="dp2")
    with open(log, "wb") as stream:
        run = subprocess.Popen([*started, "--restarts=1"], stdout=stream, stderr=subprocess.STDOUT, env=ENVIRONMENT)
    metrics, evaluations, deadline = directory / "metrics.jsonl", directory / "evaluations.jsonl", time.monotonic() + RUN_S
    try:
        while not rows_of(metrics):
            assert run.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.01)
        # The evaluation after step 1 has begun, and ends before the weights of step 2 are served.
        known = [row["train_step"] for row in rows_of(evaluations)]
        psutil.Process(int(worker_pid_file(directory, 0).read_text())).kill()
        assert run.wait(RUN_S) == 0, log.read_text()[-3000:]
    finally:
        for process in [*psutil.Process(run.pid).children(recursive=True)] if run.poll() is None else []:
            process.kill()
        run.kill()
    assert known == [0], "the first was on record before the weights of step 1 were served"
    rows = rows_of(evaluations)
    assert [row["train_step"] for row in rows] == list(range(NUM_STEPS + 1))
    assert [row["train_step"] for row in rows_of(metrics)] == list(range(1, NUM_STEPS + 1))
    for step in range(NUM_STEPS + 1):
        result = json.loads((directory / "evaluations" / f"step_{step:06d}.json").read_text())
        assert [len(problem["accuracies"]) for problem in result["problems"]] == [NUM_SAMPLES] * NUM_PROBLEMS
        responses = rows_of(directory / "evaluations" / f"step_{step:06d}.jsonl")
        assert responses and {span["version"] for one in responses for span in one["versions"]} == {step}
    ids = [sample["sample_id"] for sample in rows_of(directory / "samples.jsonl")]
    assert len(set(ids)) == len(ids) == NUM_STEPS * 24
