"""Weighted mixtures: parts, the deciding component, failures of one of them, and the preset `format`."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_dapo.config import config_from_dict, validate
from megatron_dapo.config.reward_schema import RewardConfig
from megatron_dapo.rewards.build import open_verifier_pool
from megatron_dapo.rewards.pool.mixture import MixtureComponent, MixturePool
from megatron_dapo.rewards.pool.pool import VerifierPool

FIELDS = {"messages": [], "data_source": "", "extra_info": {}, "finish_reason": "stop", "group_index": 0}
CODE = """
import os, time
from megatron_dapo.rewards.result import RewardResult

def style(sample):
    if sample.response.startswith("crash"):
        os._exit(1)
    if sample.response.startswith("hang"):
        time.sleep(600)
    return RewardResult(parts={"short": 0.5, "polite": 0.25})
"""


def recipe(*mix: dict, **reward: object):
    tree = {
        "model": {"path": "m"},
        "data": {"train_paths": ["t"]},
        "reward": {"verifier": "mix", "mix": list(mix), **reward},
    }
    return config_from_dict(tree)


def items(*responses: str) -> list:
    return [(number, response, "42", False, FIELDS) for number, response in enumerate(responses)]


def test_rewards_add_up_by_weight_and_one_component_decides(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(CODE)
    mix = (
        {"verifier": "dapo"},
        {"verifier": f"{tmp_path}/own.py:style", "weight": 2.0},
        {"verifier": "format", "weight": 0.5},
    )
    config = recipe(*mix, correct=1.0, incorrect=0.0, timeout_seconds=4.0, format={"markers": ["Answer:"]})
    assert [one for one in validate(config) if one.path.startswith("reward")] == []
    with open_verifier_pool(config.reward) as pool:
        assert pool.takes_sample and "dapo-1" in pool.version and "2 x " in pool.version
        scores = pool.score_many(items("Answer: 42", "Answer: 41", "crash. Answer: 42", "hang. Answer: 42"))
        assert pool.validate_answers(["", "42"]).keys() == {""}
        assert pool.components[1].pool.counts["killed"] == 1
    assert scores[0].detail["parts"] == {"dapo": 1.0, "style/short": 1.0, "style/polite": 0.5, "format": 0.5}
    assert [(score.accuracy, score.reward) for score in scores.values()] == [
        (1.0, 3.0),
        (0.0, 2.0),
        (1.0, 1.5),
        (1.0, 1.5),
    ]
    assert (scores[0].extracted, scores[0].outcome, "failed" in scores[0].detail) == ("42", "correct", False)
    # What fails or is late costs its own part.
    assert scores[2].detail["parts"] == {"dapo": 1.0, "style": 0.0, "format": 0.5}
    assert (
        "exit status 1" in scores[2].detail["failed"]["style"]
        and "no score in 4 s" in scores[3].detail["failed"]["style"]
    )


def test_any_component_may_decide() -> None:
    mix = ({"verifier": "dapo"}, {"verifier": "format", "decides": True, "name": "form"})
    with open_verifier_pool(recipe(*mix, format={"pattern": "<a>.*</a>"}).reward) as pool:
        scores = pool.score_many(items("<a>\nAnswer: 41\n</a>", "Answer: 42"))
    assert [score.accuracy for score in scores.values()] == [1.0, 0.0]
    assert scores[0].detail["parts"] == {"dapo": -1.0, "form": 1.0}


def test_a_response_that_was_cut_off_has_no_form_and_is_never_right() -> None:
    mix = ({"verifier": "format"}, {"verifier": "dapo"})
    with open_verifier_pool(recipe(*mix, format={"markers": ["Answer:"]}).reward) as pool:
        item = ("a", "Answer: 42", "42", True, {**FIELDS, "finish_reason": "length"})
        score = pool.score_many([item])["a"]
    assert (score.accuracy, score.reward, score.outcome) == (0.0, -1.0, "truncated")


def test_a_component_that_does_not_start_ends_the_others(tmp_path: Path) -> None:
    mix = ({"verifier": "dapo"}, {"verifier": f"{tmp_path}/none.py:reward"})
    with pytest.raises(ValueError, match="cannot import module"):
        open_verifier_pool(recipe(*mix).reward)


def test_names_of_components_differ() -> None:
    with VerifierPool("dapo", RewardConfig()) as pool:
        with pytest.raises(ValueError, match="different names"):
            MixturePool([MixtureComponent("a", pool), MixtureComponent("a", pool)], "a")


@pytest.mark.parametrize(
    ("reward", "path"),
    [
        ({"verifier": "mix"}, "reward.verifier"),
        ({"mix": [{"verifier": "dapo"}]}, "reward.verifier"),
        ({"verifier": "mix", "mix": [{"verifier": "dapo"}, {"verifier": "dapo"}]}, "reward.mix"),
        ({"verifier": "mix", "mix": [{"verifier": "mix"}]}, "reward.mix"),
        ({"verifier": "mix", "mix": [{"verifier": "dapo", "weight": 0.0}]}, "reward.mix"),
        (
            {"verifier": "mix", "mix": [{"verifier": name, "decides": True} for name in ("dapo", "lenient")]},
            "reward.mix",
        ),
        ({"verifier": "judge"}, "reward.judge.url"),
        ({"verifier": "remote", "remote": {"url": "localhost:3"}}, "reward.remote.url"),
        ({"verifier": "judge", "judge": {"url": "http://h", "request_seconds": 60.0}}, "reward.timeout_seconds"),
        (
            {"verifier": "judge", "judge": {"url": "http://h", "score_key": "a", "score_pattern": "(b)"}},
            "reward.judge.score_key",
        ),
        ({"verifier": "reward_model"}, "reward.reward_model.path"),
        ({"verifier": "format"}, "reward.format.markers"),
        ({"verifier": "format", "format": {"markers": ["a"], "reward": 0.5}}, "reward.format.reward"),
        ({"verifier": "code", "timeout_seconds": 5.0}, "reward.timeout_seconds"),
        ({"verifier": "code", "code": {"memory_limit_mb": 4096}}, "reward.code.memory_limit_mb"),
        ({"verifier": "code", "code": {"max_processes": 64}}, "reward.max_processes"),
    ],
)
def test_contradictions_are_one_problem_each(reward: dict, path: str) -> None:
    config = config_from_dict({"model": {"path": "m"}, "data": {"train_paths": ["t"]}, "reward": reward})
    assert [one.path for one in validate(config) if one.path.startswith("reward")] == [path]
