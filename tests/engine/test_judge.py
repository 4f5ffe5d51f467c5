"""Preset `judge` against a real SGLang server: its endpoint, and a key that it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_dapo.engines.sglang.keys import read_key
from megatron_dapo.engines.sglang.server import SglangServer
from megatron_dapo.rewards.pool import VerifierPool

FIELDS = {
    "messages": [{"role": "user", "content": "2 + 2?"}],
    "data_source": "",
    "extra_info": {},
    "finish_reason": "stop",
    "group_index": 0,
}


@pytest.fixture(scope="module")
def server(server_factory, repository: Path) -> SglangServer:
    """The quickstart's base model, which has a chat template and says some text or other."""
    return server_factory(repository / "examples" / "quickstart" / "base_model", max_total_tokens=8192)


def items(count: int) -> list:
    return [(number, f"It is {number}.", "4", False, FIELDS) for number in range(count)]


def open_pool(server: SglangServer, monkeypatch: pytest.MonkeyPatch, key: str = "", **own: object) -> VerifierPool:
    monkeypatch.setenv("SERVER_KEY", key or read_key(server.key_file))
    settings = {
        "url": f"{server.url}/v1",
        "key_variable": "SERVER_KEY",
        "template": "{prompt} {response}",
        "max_tokens": 16,
        "request_seconds": 60.0,
        # A model of 2 MB grades nothing: the length of what it says stands for a score.
        "score_pattern": r"(?s)^.*?([0-9])",
        "max_score": 9.0,
        **own,
    }
    return VerifierPool("judge", 1, 120.0, presets={"judge": settings}, more_environment=["SERVER_KEY"])


def test_a_wrong_key_is_an_error_at_once(server: SglangServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_pool(server, monkeypatch, key="wrong", failure=0.0) as pool:
        score = pool.score_many(items(1))[0]
    assert (score.outcome, score.reward, score.accuracy) == ("error", 0.0, 0.0)
    assert "status 401" in score.detail["error"] and "attempt 1 of 4" in score.detail["error"]
