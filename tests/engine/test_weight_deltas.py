"""A run whose servers get only the weights that changed, through kill -9 of a trainer rank."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from test_training import NUM_STEPS, ON_POLICY, Run, check_nothing_is_left, check_samples, train

__all__ = ["train"]  # a fixture
UPDATE = re.compile(r"weight sync: version (\d+): 1 of 1 engines serve it \((full|only changes), ([0-9.]+) MB")
DELTAS = (
    'model.dtype="bfloat16"',
    "mismatch.step0_max_mean_abs=0.2",
    "sglang.weight_sync_full_interval=4",
    "optimizer.learning_rate=1e-6",
    "optimizer.warmup_steps=0",
)


@pytest.mark.long
def test_a_trainer_that_is_started_again_begins_with_a_full_update(train: Callable[..., Run]) -> None:
    run = train(*ON_POLICY, *DELTAS, "checkpoint.interval=1", restarts=2)
    run.wait_until("the second step", lambda: len(run.rows("metrics.jsonl")) >= 2)
    run.worker(1).kill()
    summary = run.finish()
    assert summary["stopped"] == "finished" and summary["train_steps"] == NUM_STEPS
    updates = UPDATE.findall(run.log.read_text(errors="replace"))
    starts = [index for index, (_, how, _) in enumerate(updates) if how == "full"]
    assert starts[0] == 0 and 2 <= len(starts), updates  # the first of each attempt; the server lives on
    assert len(updates) - len(starts) >= 2, updates
    full_mb = float(updates[0][2])
    assert all(float(size) < 0.1 * full_mb for _, how, size in updates if how == "only changes"), updates
    check_samples(run)
    assert all(row["mismatch/abs_logprob_diff_mean"] < 0.05 for row in run.rows("metrics.jsonl"))
    check_nothing_is_left(run)
