"""Experts of a real SGLang server: their weights come from expert-parallel trainer ranks, and its answers hold the ones that it
chose, which transformers chooses for the same tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sync_simulation import World
from synced_server import SyncedServer, drain, serving

from megatron_dapo.engines.sglang.engine import SglangEngine
from megatron_dapo.engines.sglang.server import SglangServer
from megatron_dapo.types import Completion, GenerationRequest, RoutingShape, SamplingParams, VersionRange

SHAPE = RoutingShape(num_layers=2, experts_per_token=2, num_experts=8)
DEADLINE_S = 240.0
PROMPT = (5, 6, 7, 250, 9, 31, 100, 5, 5, 17)


@pytest.fixture(scope="module")
def synced(seeded_servers: Callable[[int], list[SyncedServer]]) -> SyncedServer:
    return seeded_servers(1)[0]


def test_experts_of_expert_parallel_ranks_arrive(synced: SyncedServer) -> None:
    assert synced.gap(1.0) < 1e-5


@pytest.mark.long  # The test above has one rank.
def test_experts_arrive_on_two_ranks(
    server_factory: Callable[..., SglangServer], moe_model: Path, expert_world: Callable[[Path, int], World]
) -> None:
    server = server_factory(moe_model, tensor_parallel=2, random_weights=True, max_total_tokens=4096)
    synced = SyncedServer(server, moe_model, expert_world(moe_model, 2))
    assert synced.update(1, 1.0).is_complete and synced.gap(1.0) < 1e-5


@pytest.fixture
def engine(synced: SyncedServer) -> Iterator[SglangEngine]:
    with serving(synced.server, DEADLINE_S, routing=SHAPE) as engine:
        yield engine


@pytest.fixture(scope="module")
def chosen(moe_model: Path) -> Callable[[Completion], np.ndarray]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(moe_model, dtype=torch.float32).eval()

    def of(completion: Completion) -> np.ndarray:
        tokens = torch.tensor([[*PROMPT, *completion.token_ids.tolist()]])
        with torch.no_grad():
            layers = model(tokens, use_cache=False, output_router_logits=True).router_logits
        return torch.stack([logits.topk(2).indices.sort().values for logits in layers], dim=1)[:-1].numpy()

    return of


def requests(count: int, **fields: object) -> list[GenerationRequest]:
    sampling = SamplingParams(max_new_tokens=40, stop_token_ids=(2,))
    return [
        GenerationRequest(str(index), PROMPT, sampling, seed=index, **{"with_routing": True, **fields})
        for index in range(count)
    ]


def test_answers_hold_the_experts_of_every_token_but_the_last(
    engine: SglangEngine, chosen: Callable[[Completion], np.ndarray]
) -> None:
    engine.submit(requests(6))
    for done in drain(engine, DEADLINE_S):
        assert done.routing is not None and done.routing.dtype == np.uint8
        assert done.routing.shape == (len(PROMPT) + done.num_tokens - 1, 2, 2)
        assert (np.sort(done.routing) == chosen(done)).all()
    engine.submit(requests(1, with_routing=False))
    assert drain(engine, DEADLINE_S)[0].routing is None


def test_continued_responses_keep_the_experts_of_their_prefix(
    engine: SglangEngine, chosen: Callable[[Completion], np.ndarray]
) -> None:
    engine.submit(requests(4))
    whole = drain(engine, DEADLINE_S)
    marked = []
    for request, done in zip(requests(4), whole, strict=True):
        earlier = np.full_like(done.routing[: len(PROMPT) + 3], 7)
        numbers = {"token_ids": done.token_ids[:4], "logprobs": done.logprobs[:4], "routing": earlier}
        prefix = replace(done, finish_reason="abort", versions=(VersionRange(0, 4, 0),), **numbers)
        marked.append(replace(request, prefix=prefix))
    engine.submit(marked)
    for done, before in zip(drain(engine, DEADLINE_S), whole, strict=True):
        assert done.token_ids.tolist() == before.token_ids.tolist()
        known = len(PROMPT) + 3
        assert (done.routing[:known] == 7).all() and (np.sort(done.routing)[known:] == chosen(done)[known:]).all()


def test_aborted_responses_have_their_experts(engine: SglangEngine, chosen: Callable[[Completion], np.ndarray]) -> None:
    sampling = SamplingParams(max_new_tokens=480)
    engine.submit([replace(request, sampling=sampling) for request in requests(3)])
    end = time.monotonic() + DEADLINE_S
    aborted: list[Completion] = []
    while not any(done.num_tokens for done in aborted):
        assert time.monotonic() < end
        time.sleep(0.3)
        aborted = engine.abort()
        if not any(done.num_tokens for done in aborted):
            engine.submit([replace(request, sampling=sampling) for request in requests(3)])
            engine.poll()
    for done in aborted:
        if done.num_tokens:
            assert (np.sort(done.routing) == chosen(done)).all()


@pytest.mark.long  # tests/unit/engines/sglang/test_wire.py has such an answer
def test_a_server_that_cannot_say_is_an_error(server_factory: Callable[..., SglangServer], tiny_model: Path) -> None:
    with serving(server_factory(tiny_model), DEADLINE_S, routing=SHAPE, max_tries=1) as engine:
        engine.submit(requests(1))
        with pytest.raises(Exception, match="--enable-return-routed-experts"):
            drain(engine, DEADLINE_S)
