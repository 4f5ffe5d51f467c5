"""Mini-batches trained part by part make the step of the whole batch (training.stream)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from launcher import run_distributed, target_in

from tools.prove_resume import write_recipe

WORKER = target_in(str(Path(__file__).with_name("streamed_steps_worker.py")), "run")
LAYOUTS: dict[str, tuple[str, ...]] = {
    "dp2": (),
    "tp2": ("parallel.tp_size=2", "parallel.sequence_parallel=true"),
    "pp2": ("parallel.pp_size=2",),
}
SETTINGS = {
    "plain": ("algorithm.off_policy.correction=none",),
    "normalized": ("algorithm.off_policy.correction=tis", "algorithm.off_policy.batch_normalize=true"),
    "rollout": ("algorithm.off_policy.correction=none", "training.old_logprobs=rollout"),
}


def steps(directory: Path, *overrides: str, mutate: bool = False) -> dict[str, Any]:
    recipe = write_recipe(directory, "priority")
    common = ("training.shuffle=false", "optimizer.warmup_steps=0", "algorithm.loss.aggregation=token_mean")
    arguments = {"recipe": str(recipe), "overrides": [*common, *overrides], "mutate": mutate}
    return run_distributed(WORKER, 2, arguments)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_make_the_step_of_the_whole_batch(layout: str, tmp_path: Path) -> None:
    found = steps(tmp_path, *LAYOUTS[layout], *SETTINGS["plain"], mutate=layout == "dp2")
    assert found["difference"] == 0.0 if layout == "dp2" else found["difference"] <= 1e-6
    # Metrics are sums over mini-batches in another order.
    assert found["metrics"] == pytest.approx(found["expected"], rel=1e-9 if layout == "dp2" else 1e-4, abs=1e-6)
    if layout == "dp2":
        assert found["whole_denominator"] > 1e-6, "a wrong denominator is seen"
        assert found["current_weights"] > 1e-6, "the weights of old log-probs are seen"


@pytest.mark.long
@pytest.mark.parametrize("settings", ["normalized", "rollout"])
def test_so_do_other_behavior_terms(settings: str, tmp_path: Path) -> None:
    found = steps(tmp_path, *SETTINGS[settings])
    assert found["difference"] == 0.0 and found["metrics"] == pytest.approx(found["expected"], rel=1e-9)
