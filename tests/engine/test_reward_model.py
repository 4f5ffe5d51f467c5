"""Preset `reward_model` with a classifier that a real SGLang server holds."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForSequenceClassification

from megatron_dapo.config.reward_schema import RewardConfig
from megatron_dapo.engines.sglang.keys import read_key
from megatron_dapo.engines.sglang.server import SglangServer
from megatron_dapo.rewards.pool.pool import VerifierPool
from tests.reward_samples import FIELDS

pytestmark = pytest.mark.long  # a server is started for it

BASE = Path(__file__).parents[2] / "examples" / "quickstart" / "base_model"
START_TIMEOUT_S = 400.0


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random classifier of three labels, far from uniform."""
    directory = tmp_path_factory.mktemp("classifier")
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    torch.manual_seed(1)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_labels=3, pad_token_id=tokenizer.pad_token_id, max_position_embeddings=1024,
    )  # fmt: skip
    model = Qwen2ForSequenceClassification(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)
    # SGLang's head of this family has a bias: without one in the file it would be random.
    weights = {**model.state_dict(), "score.bias": torch.zeros(3)}
    model.save_pretrained(directory, state_dict=weights)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def server(server_factory: Callable[..., SglangServer], classifier: Path) -> SglangServer:
    started = server_factory(classifier, wait=False, max_total_tokens=8192, more_arguments=("--is-embedding",))
    headers = {"Authorization": f"Bearer {read_key(started.key_file)}"}
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        assert time.monotonic() < deadline and started.is_alive(), started.exit_reason()
        try:
            if httpx.get(f"{started.url}/health", headers=headers, timeout=10.0).status_code == 200:
                return started
        except httpx.HTTPError:
            pass
        time.sleep(0.5)


def test_scores_of_a_server_are_those_of_the_model(
    server: SglangServer, classifier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVER_KEY", read_key(server.key_file))
    own = {"path": str(classifier), "dtype": "float32", "label": "LABEL_2", "threshold": 0.5}
    remote = {**own, "url": server.url, "key_variable": "SERVER_KEY", "request_seconds": 60.0}
    responses = ["4", "It is four, as two and two are.", "", "5 " * 40, "x"]
    items = [(number, text, "", False, FIELDS) for number, text in enumerate(responses)]
    scores = []
    for settings in (own, remote):
        with VerifierPool(
            "reward_model",
            RewardConfig(timeout_seconds=120.0, reward_model=settings, batch_size=3, environment=("SERVER_KEY",)),
        ) as pool:
            scores.append(pool.score_many(items))
    for number in range(len(responses)):
        here, there = (found[number] for found in scores)
        assert there.outcome in ("correct", "wrong"), there.detail
        assert there.reward == pytest.approx(here.reward, abs=1e-4) and there.accuracy == here.accuracy
    assert len({round(score.reward, 3) for score in scores[1].values()}) > 2


def test_a_wrong_key_is_an_error(server: SglangServer, classifier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_KEY", "wrong")
    own = {"path": str(classifier), "label": "LABEL_2", "url": server.url, "key_variable": "SERVER_KEY"}
    with VerifierPool(
        "reward_model", RewardConfig(timeout_seconds=60.0, reward_model=own, environment=("SERVER_KEY",))
    ) as pool:
        score = pool.score_many([(0, "4", "", False, FIELDS)])[0]
    assert score.outcome == "error" and "status 401" in score.detail["error"]
