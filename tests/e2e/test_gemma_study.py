"""All switches of the Gemma study at once: every layout makes the steps that one process makes, across a resume as well."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from whole_runs import STEADY, lines_of, train, trained_responses

from tools.prove_resume import write_recipe

SWITCHES = (
    'data.injection.templates=["distractor", "wrong_hint", "noise", "answer_range"]',
    "data.injection.rate=1.0",
    "reward.perplexity_penalty.enabled=true",
    "reward.perplexity_penalty.start=0.05",
    "reward.perplexity_penalty.end=0.3",
    "reward.format.reward=0.5",
    "algorithm.gkl.coefficient=0.1",
)
# No schedule that knows the end of the run, no surplus, steps so small that ranks' rounding changes no sampled token.
COMPARED = (
    "actor/loss",
    "actor/grad_norm",
    "actor/entropy",
    "actor/gkl_weighted_mse",
    "actor/gkl_cross_entropy",
    "reward/perplexity_mean",
    "reward/format_mean",
    "rollout/injected_share",
    "rollout/injected_accuracy",
    "advantage/std",
)


def run(recipe: Path, directory: Path, layout: str, num_steps: int) -> list[dict[str, Any]]:
    """Metrics of a run, continued if it has begun."""
    outcome = train(recipe, directory, layout, *STEADY, *SWITCHES, f"run.total_steps={num_steps}")
    assert outcome.code == 0, outcome.text
    return lines_of(directory / "metrics.jsonl")


def stream_state(directory: Path, step: int) -> dict[str, Any]:
    """Position, waiting rewrites and outcomes of templates in a checkpoint."""
    return json.loads((directory / "checkpoints" / f"step_{step:06d}" / "collector.json").read_text())["stream"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The recipe, and three uninterrupted steps of one process."""
    directory = tmp_path_factory.mktemp("alone")
    recipe = write_recipe(directory)
    steps = run(recipe, directory / "run", "tp1", 3)
    assert len(steps) == 3 and steps[0]["rollout/injected_share"] == 0
    assert steps[1]["rollout/injected_share"] > 0, "what step 1 filtered has rewrites in step 2"
    before, after = (stream_state(directory / "run", step)["injection"] for step in (2, 3))
    assert after["outcomes"] != before["outcomes"], "step 3 samples rewrites of what step 2 filtered"
    for name in ("reward/perplexity_mean", "reward/format_mean", "actor/gkl_weighted_mse", "actor/gkl_cross_entropy"):
        assert all(step[name] != 0 for step in steps), name
    return recipe, directory / "run"


@pytest.mark.parametrize("layout", ["tp2", pytest.param("pp2", marks=pytest.mark.long), pytest.param("cp2", marks=pytest.mark.long)])  # fmt: skip
@pytest.mark.long
def test_two_steps_and_a_resume_are_those_of_one_process(alone: tuple[Path, Path], tmp_path: Path, layout: str) -> None:
    recipe, expected = alone
    assert len(run(recipe, tmp_path / "run", layout, 2)) == 2
    steps = run(recipe, tmp_path / "run", layout, 3)
    assert trained_responses(tmp_path / "run") == trained_responses(expected)
    ours, theirs = (
        [line["reward"] for line in lines_of(run / "samples.jsonl")] for run in (tmp_path / "run", expected)
    )
    assert ours == pytest.approx(theirs, abs=1e-5)
    assert stream_state(tmp_path / "run", 3) == stream_state(expected, 3)
    for step, right in zip(steps, lines_of(expected / "metrics.jsonl"), strict=True):
        for name in COMPARED:
            # Adam divides by the size of gradients that are rounding alone, so weights drift a little.
            tolerance = 1e-5 if step["train_step"] == 1 else 1e-4
            assert step[name] == pytest.approx(right[name], rel=tolerance, abs=1e-6), (step["train_step"], name)
