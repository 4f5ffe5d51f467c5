"""`megatron-dapo try`: what it says about a few responses of the untrained model."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from megatron_dapo.cli import try_recipe
from megatron_dapo.cli.main import app
from megatron_dapo.config import Config, config_from_dict
from megatron_dapo.types import Completion, Group, Prompt, Score, ScoredSample

PROMPT = Prompt("p", ({"role": "user", "content": "1 + 1 ="},), (1,), "2")


def config_of(**rollout: object) -> Config:
    sections = {"model": {"path": "m"}, "data": {"train_paths": ["a"]}, "rollout": {"max_response_tokens": 8, **rollout}}
    return config_from_dict(sections, Path())


def group_of(*rewards: float, cut: int = 0, failure: str = "") -> Group:
    """A group of such rewards, of which the first `cut` responses were cut; 0.5 and more is correct."""
    samples = []
    for index, reward in enumerate(rewards):
        is_cut = index < cut
        tokens = np.arange(8 if is_cut else 2, dtype=np.int32)
        completion = Completion(str(index), tokens, np.zeros(len(tokens), np.float32), "length" if is_cut else "stop", ())
        is_correct = reward >= 0.5 and not is_cut
        outcome = "error" if failure else "correct" if is_correct else "wrong"
        score = Score(float(is_correct), reward, outcome, None, {"error": failure} if failure else {})
        samples.append(ScoredSample(f"g/{index}", completion, "two", score, {"verifier": reward}))
    return Group("g", PROMPT, tuple(samples), 0, 0)


def test_it_counts_what_would_be_filtered_and_what_is_cut() -> None:
    groups = [group_of(0, 0, 0, 0, cut=3), group_of(1, 1, 1, 1), group_of(0, 1, 0, 0.5), group_of(0, 0.25, 0, 0)]
    lines = list(try_recipe.findings(config_of(), groups))
    assert lines == [
        "rewards: mean 0.36, from 0 to 1; spread within a group 0.31 on average, 0 in 2 of 4",
        "3 of 4 groups would be filtered: 2 all wrong, 1 all right",
        "3 of 16 responses were cut at 8 tokens",
    ]
    assert not any("filtered" in line for line in try_recipe.findings(config_of(filter_groups=False), groups))


def test_it_says_what_to_do_if_nothing_would_be_learned() -> None:
    lines = list(try_recipe.findings(config_of(), [group_of(0, 0, cut=2), group_of(0, 0)]))
    assert "nothing would be learned" in lines[1] and "partial credit" in lines[1]
    assert lines[2] == "2 of 4 responses were cut at 8 tokens: raise rollout.max_response_tokens (8)"


@pytest.mark.parametrize("failure", ["", "KeyError: 'JUDGE_KEY'"])
def test_the_command_shows_each_group(failure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    module = types.ModuleType("evaluate")
    module.try_prompts = lambda config, prompts, responses: (  # type: ignore[attr-defined]
        asked.append((prompts, responses)) or [group_of(-1, 1, failure=failure)]
    )
    monkeypatch.setitem(sys.modules, "megatron_dapo.run.evaluate", module)
    result = CliRunner().invoke(app, ["try", "quickstart", "--prompts", "1", "--responses", "2"])
    assert asked == [(1, 2)] and "prompt 1: 1 + 1 =" in result.output and "two" in result.output
    assert result.exit_code == (1 if failure else 0)
    assert ("2 of 2 rewards failed, the first with: KeyError" in result.output) == bool(failure)
