"""Parts of the reward besides the verifier's, as a recipe switches them on."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_dapo.config import config_from_dict, validate
from megatron_dapo.rewards.verifiers.format import has_form
from megatron_dapo.trainer.build_rollout import reward_addends
from megatron_dapo.types import Completion, Score, VersionRange


def completion(logprobs: list[float], reason: str = "stop") -> Completion:
    size = len(logprobs)
    return Completion("r", np.arange(size), np.array(logprobs), reason, (VersionRange(0, size, 0),))


def config_with(reward: dict):
    return config_from_dict({"model": {"path": "m"}, "data": {"train_paths": ["t"]}, "reward": reward})


def test_nothing_is_added_by_default() -> None:
    assert reward_addends(config_with({}).reward) == {}


def test_the_perplexity_is_that_of_the_policy_that_sampled() -> None:
    section = {"enabled": True, "start": 1.0, "end": 1.5, "factor": 2.0}
    [(name, addend)] = reward_addends(config_with({"perplexity_penalty": section}).reward).items()
    assert name == "perplexity"
    score = Score(1.0, 1.0, "correct")
    assert addend(completion([-0.5, -1.5, -1.0, -2.0]), "", score) == pytest.approx(-1.0)  # the golden half, times two
    assert addend(completion([-0.1]), "", score) == addend(completion([]), "", score) == 0.0


def test_the_form_is_an_answer_that_is_found_or_markers_in_order() -> None:
    addend = reward_addends(config_with({"format": {"reward": 0.5}}).reward)["format"]
    found, missing = Score(0.0, -1.0, "wrong", extracted="7"), Score(0.0, -1.0, "unparsable")
    assert addend(completion([-1.0]), "", found) == 0.5
    assert addend(completion([-1.0]), "", missing) == addend(completion([-1.0], "length"), "", found) == 0.0
    markers = ["<think>", "</think>", "<answer>", "</answer>"]
    addend = reward_addends(config_with({"format": {"reward": 0.5, "markers": markers}}).reward)["format"]
    assert addend(completion([-1.0]), "<think>1</think> <answer>2</answer>", missing) == 0.5
    assert addend(completion([-1.0]), "<answer>2</answer> <think>1</think>", found) == 0.0


def test_markers_occur_once_and_in_order() -> None:
    texts = ("a b", "b a", "a a b", "a", "", "xaybz")
    assert [text for text in texts if has_form(text, ("a", "b"), "")] == ["a b", "xaybz"]


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"enabled": True, "start": 2.0, "end": 1.0}, "perplexity_penalty.end > reward.perplexity_penalty.start"),
        ({"enabled": True, "low_start": 0.1, "low_end": 0.2}, "low_end < reward.perplexity_penalty.low_start"),
    ],
)
def test_bounds_out_of_order_are_refused(section: dict, expected: str) -> None:
    problems = [str(one) for one in validate(config_with({"perplexity_penalty": section}), 1)]
    assert [one for one in problems if expected in one], problems
