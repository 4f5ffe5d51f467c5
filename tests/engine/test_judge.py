"""Preset `judge` against a real SGLang server: its endpoint, a key that it refuses, graded replies, and its death."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_dapo.config.reward_schema import RewardConfig
from megatron_dapo.engines.sglang import server as server_module
from megatron_dapo.engines.sglang.keys import read_key
from megatron_dapo.engines.sglang.server import SglangServer
from megatron_dapo.rewards.pool.pool import VerifierPool
from tests.reward_samples import FIELDS

pytestmark = pytest.mark.long
MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "base_model"


def only(*texts: str) -> dict[str, Any]:
    """Settings of a judge whose reply is one of these tokens. SGLang's grammars, which users have, need a GPU."""
    vocabulary = json.loads((MODEL / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    bias = {str(vocabulary[text]): 100.0 for text in texts}
    return {"extra_body": {"logit_bias": bias}, "max_tokens": 1, "temperature": 1.0}


# The model of 2 MB grades nothing: which digit it says is its grade.
GRADE = {**only(*"0123456789"), "score_pattern": "([0-9])", "max_score": 9.0}


@pytest.fixture(scope="module")
def server(server_factory) -> Iterator[SglangServer]:
    """The quickstart's base model with its tokenizer and chat template, which servers of a run do without."""
    command = server_module.command

    def with_tokenizer(*arguments: Any) -> list[str]:
        return [part for part in command(*arguments) if part != "--skip-tokenizer-init"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_module, "command", with_tokenizer)
        yield server_factory(MODEL, max_total_tokens=8192)


def items(count: int) -> list:
    return [(number, f"It is {number}.", "4", False, FIELDS) for number in range(count)]


def open_pool(server: SglangServer, monkeypatch: pytest.MonkeyPatch, key: str = "", **own: object) -> VerifierPool:
    monkeypatch.setenv("SERVER_KEY", key or read_key(server.key_file))
    settings = {
        "url": f"{server.url}/v1",
        "key_variable": "SERVER_KEY",
        "template": "{prompt} {response}",
        "request_seconds": 60.0,
        **own,
    }
    return VerifierPool("judge", RewardConfig(timeout_seconds=120.0, judge=settings, environment=("SERVER_KEY",)))


def test_a_wrong_key_is_an_error_at_once(server: SglangServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_pool(server, monkeypatch, key="wrong", failure=0.0) as pool:
        score = pool.score_many(items(1))[0]
    assert (score.outcome, score.reward, score.accuracy) == ("error", 0.0, 0.0)
    assert "status 401" in score.detail["error"] and "attempt 1 of 4" in score.detail["error"]


def test_a_reply_without_a_score_is_an_error_that_says_so(
    server: SglangServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_pool(server, monkeypatch, **{**GRADE, **only("a")}) as pool:
        score = pool.score_many(items(1))[0]
    assert score.outcome == "error" and "the judge's reply has no score: 'a'" in score.detail["error"]


def test_a_grade_is_a_reward_between_0_and_1(server: SglangServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_pool(server, monkeypatch, **GRADE) as pool:
        scores = pool.score_many(items(32)).values()
    assert {score.outcome for score in scores} <= {"correct", "wrong"}, [score.detail for score in scores]
    assert all(score.reward == int(score.extracted) / 9 for score in scores)
    assert all((score.reward >= 0.5) == (score.accuracy == 1.0) for score in scores)
    assert len({score.reward for score in scores}) > 2, "more than yes and no"


def test_what_a_server_said_outlives_it(server: SglangServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The test ends the server: it is the module's last."""
    with open_pool(server, monkeypatch, **GRADE, cache_dir=str(tmp_path)) as pool:
        scores = pool.score_many(items(8))
    assert len(list(tmp_path.rglob("*.json"))) == 8
    os.killpg(os.getpgid(server.pid), signal.SIGKILL)
    with open_pool(server, monkeypatch, **GRADE, cache_dir=str(tmp_path), retries=1) as pool:
        again = pool.score_many(items(9))
    assert all(again[key] == score for key, score in scores.items())
    assert again[8].outcome == "error" and "attempt 2 of 2" in again[8].detail["error"]
    assert pool.counts["started"] == 1
