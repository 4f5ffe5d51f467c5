"""Published clients, unmodified, against the endpoint over a stock SGLang server: no session is lost, each is one stream."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from synced_server import connect
from transformers import Qwen2Config, Qwen2ForCausalLM

from megatron_dapo.engines.sglang.engine import SglangEngine, SglangEngineSettings
from megatron_dapo.engines.sglang.server import SglangServer
from megatron_dapo.rollout.episodes.engine import EpisodeAccounting, EpisodeEngine
from megatron_dapo.types import GenerationRequest
from tests.unit.engines.endpoint.client_programs import CLIENTS, TALKS
from tests.unit.engines.endpoint.test_clients import assert_one_stream, make_pool, template  # noqa: F401
from tests.unit.rollout import episode_world as world

CONTEXT = 2048
SESSIONS = int(os.environ.get("AGENT_SESSIONS", "30"))
DYING = range(3, SESSIONS, 20)  # sessions whose program is killed while its first request is open


class NotingEngine(SglangEngine):
    """Keeps the ids that each turn continues, by episode."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.contexts = defaultdict[str, list[tuple[int, ...]]](list)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            self.contexts[request.request_id.partition("@")[0]].append(request.prompt_ids)
        super().submit(requests)


def ending_model(config: Qwen2Config, stop_token_ids: Sequence[int]) -> Qwen2ForCausalLM:
    """Return a model with random weights that ends a turn after each token with probability 1/2.

    Some clients raise an error if a turn is cut. A component that all embeddings share stays in every hidden state.
    """
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 10.0
        shared = math.sqrt(config.hidden_size)  # value after the last norm
        model.lm_head.weight[list(stop_token_ids), 0] = math.log(config.vocab_size / len(stop_token_ids)) / shared
    return model


@pytest.mark.long  # a server, and 29 programs that import their client; the embedded engine's is in the unit tests
def test_no_session_is_lost(template: Path, server_factory: Callable[..., SglangServer], tmp_path: Path) -> None:  # noqa: F811
    turns = world.template("qwen3", "keep")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen2Config(
        vocab_size=len(turns.template.tokenizer), num_key_value_heads=2, max_position_embeddings=CONTEXT, dtype="float32", tie_word_embeddings=False, **sizes
    )
    ending_model(config, turns.stop_token_ids).save_pretrained(tmp_path / "model")
    server = server_factory(tmp_path / "model", max_total_tokens=32 * CONTEXT)
    client = connect(server)
    client.update_weight_version(0)
    kinds = [*((name, False) for name in CLIENTS), *((name, True) for name in TALKS)]
    requests = []
    for seed in range(SESSIONS):
        name, talks = kinds[seed % len(kinds)]
        task = {"client": "dies", "died": str(tmp_path / str(seed)), "turn": 0} if seed in DYING else {"client": name, "talks": talks}
        requests.append(world.request(f"e{seed:03}", turns, seed, 200, **task))
    limits = world.settings(
        max_context_tokens=CONTEXT - 16, max_turn_tokens=40, on_cut="observe", max_environments=4, order="arrival"
    )
    settings = SglangEngineSettings(client.max_length(), config.vocab_size)
    with NotingEngine([client], settings) as inner, make_pool(template) as pool:
        inner.set_policy_version(0)
        engine = EpisodeEngine(inner, pool, turns, limits)
        engine.submit(requests)
        finished = world.drain(engine)
    assert engine.accounting() == EpisodeAccounting(SESSIONS, {"done": SESSIONS}, 0, 0, {}, retried=len(DYING))
    for done in finished:
        seed = int(done.request_id[1:])
        _, talks = kinds[seed % len(kinds)]
        assert done.episode is not None and done.episode.num_retries == (seed in DYING)
        assert done.episode.parts, "the program says what it read"
        if seed not in DYING:
            assert_one_stream(done, 3 if talks else len(done.episode.turns), inner.contexts[done.request_id])
    assert inner.statistics.num_tokens == sum(done.num_sampled for done in finished), "nothing is sampled twice"
