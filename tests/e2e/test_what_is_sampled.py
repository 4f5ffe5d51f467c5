"""Budget, priority, filter and soft dynamic sampling at once, through the command: two ranks resumed make the steps of one process."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from whole_runs import NO_EVALUATION, lines_of, train, trained_responses

from tools.prove_resume import write_recipe

SWITCHES = (
    "rollout.budget.enabled=true",
    "rollout.budget.min_size=2",
    "rollout.budget.max_size=8",
    "rollout.prompt_order=priority",
    "rollout.prompt_filter.name=bounds",
    "rollout.prompt_filter.margin=0.3",
    "rollout.dynamic_sampling=soft",
    # Two steps an epoch: then prompts have a history.
    "rollout.prompts_per_step=8",
    "rollout.group_size=4",
    "training.mini_batch_prompts=8",
    "rollout.oversample=1.0",
    "rollout.max_staleness=0",
    # No schedule that knows the end of the run, steps so small that ranks' rounding changes no sampled token.
    "optimizer.schedule=constant",
    "optimizer.warmup_steps=0",
    "optimizer.learning_rate=1e-4",
    *NO_EVALUATION,
)
COMPARED = ("actor/loss", "actor/grad_norm", "prompts/group_size_min", "prompts/group_size_max", "prompts/skipped")


def run(recipe: Path, directory: Path, layout: str, num_steps: int) -> list[dict[str, Any]]:
    """Metrics of a run, continued if it has begun."""
    outcome = train(recipe, directory, layout, *SWITCHES, f"run.total_steps={num_steps}")
    assert outcome.code == 0, outcome.text
    return lines_of(directory / "metrics.jsonl")


@pytest.mark.long
def test_a_resumed_run_of_two_ranks_makes_the_steps_of_one_process(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "recipe")
    expected = run(recipe, tmp_path / "alone", "tp1", 4)
    records = trained_responses(tmp_path / "alone")
    sizes = {step: set(Counter(prompt for at, _, prompt, _ in records if at == step).values()) for step in range(1, 5)}
    assert all(sizes[step] == {4} for step in (1, 2)), "no prompt has a history in the first epoch"
    assert any(len(sizes[step]) > 1 for step in (3, 4)), f"groups of the sizes {sizes}"
    assert len(run(recipe, tmp_path / "two", "dp2", 3)) == 3
    steps = run(recipe, tmp_path / "two", "dp2", 4)
    assert trained_responses(tmp_path / "two") == records
    for step, right in zip(steps, expected, strict=True):
        for name in COMPARED:
            # Adam divides by the size of gradients that are rounding alone, so weights drift a little.
            assert step[name] == pytest.approx(right[name], rel=1e-4, abs=1e-6), (step["train_step"], name)
