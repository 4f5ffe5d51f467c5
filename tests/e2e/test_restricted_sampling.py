"""Top-p and top-k through the command, over two ranks: what is trained is what was sampled."""

from __future__ import annotations

from pathlib import Path

import pytest
from whole_runs import NO_EVALUATION, lines_of, train

from tools.prove_resume import write_recipe

# One mini-batch a step: the old log-probs are of the weights that are trained.
SAMPLING = (
    "rollout.top_p=0.9",
    "rollout.top_k=30",
    "rollout.max_staleness=0",
    "rollout.oversample=1.0",
    "rollout.partial_rollout=false",
    "rollout.filter_groups=false",
    "rollout.prompts_per_step=6",
    "training.mini_batch_prompts=6",
    "run.total_steps=2",
    "optimizer.warmup_steps=0",
    *NO_EVALUATION,
)


@pytest.mark.parametrize(
    ("layout", "algorithm"),
    [
        ("tp2", "dapo"),
        *(pytest.param("dp2", name, marks=pytest.mark.long) for name in ("dapo", "episodes", "vapo", "tppo")),
    ],
)
def test_the_ratio_of_a_step_is_1_and_the_engine_agrees(tmp_path: Path, layout: str, algorithm: str) -> None:
    outcome = train(write_recipe(tmp_path / "recipe", algorithm), tmp_path / "run", layout, *SAMPLING)
    assert outcome.code == 0, outcome.text
    for step in lines_of(tmp_path / "run" / "metrics.jsonl"):
        assert step["actor/ratio_mean"] == 1.0
        # Without renormalization the trainer's log-probs would be lower by up to -log 0.9 = 0.1.
        assert step["mismatch/abs_logprob_diff_max"] < 1e-4
        assert step["actor/grad_norm"] > 0
