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
from safetensors.torch import load_file
from sync_simulation import World, run_ranks

from megatron_dapo.bridge.transports.shared_memory import default_directory
from megatron_dapo.bridge.weight_sync import SyncTimeouts
from megatron_dapo.engines.sglang.client import SglangClient, Timeouts
from megatron_dapo.engines.sglang.engine import SglangEngine, SglangEngineSettings
from megatron_dapo.engines.sglang.keys import read_key
from megatron_dapo.engines.sglang.server import SglangServer
from megatron_dapo.models.config_json import read_architecture
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.types import Completion, GenerationRequest, RoutingShape, SamplingParams, VersionRange

SHAPE = RoutingShape(num_layers=2, experts_per_token=2, num_experts=8)
DEADLINE_S = 240.0
PROMPT = (5, 6, 7, 250, 9, 31, 100, 5, 5, 17)
PATIENT = SyncTimeouts(120, 120, 120, 120, 200, 120, 60)


def filled_by_ranks(server: SglangServer, moe_model: Path, tensor_parallel: int) -> SglangServer:
    """Sync the model from two pipeline stages of two expert ranks to a server of random weights, and compare what it serves."""
    from transformers import AutoModelForCausalLM

    client = SglangClient(server.url, read_key(server.key_file), Timeouts(generate_s=120.0), server.info.api_version)
    architecture, layout = read_architecture(moe_model), ParallelLayout(4, pipeline=2, expert=2)
    world = World(architecture, layout, tensor_parallel=tensor_parallel, bucket_bytes=64 << 10)
    state = load_file(moe_model / "model.safetensors")
    updates = world.updates([client], default_directory(), PATIENT, message_timeout_s=100.0, session="moe")
    reports = run_ranks(4, lambda rank: updates[rank].update(1, world.shards(state, rank)), 280)
    assert all(report.is_complete for report in reports), reports
    model = AutoModelForCausalLM.from_pretrained(moe_model, dtype=torch.float32)
    with torch.no_grad():
        logprobs = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    expected = [float(logprobs[t, token]) for t, token in enumerate(PROMPT[1:])]
    assert client.prompt_logprobs(list(PROMPT)) == pytest.approx(expected, abs=1e-5)
    return server


@pytest.mark.long  # the server below is filled in the same way
def test_experts_arrive_on_two_ranks(server_factory: Callable[..., SglangServer], moe_model: Path) -> None:
    server = server_factory(moe_model, tensor_parallel=2, random_weights=True, max_total_tokens=4096)
    filled_by_ranks(server, moe_model, tensor_parallel=2)


@pytest.fixture(scope="module")
def server(server_factory: Callable[..., SglangServer], moe_model: Path) -> SglangServer:
    fields = {"routing": True, "seeded": True, "random_weights": True, "max_total_tokens": 4096}
    return filled_by_ranks(server_factory(moe_model, **fields), moe_model, tensor_parallel=1)


@pytest.fixture
def engine(server: SglangServer) -> Iterator[SglangEngine]:
    client = SglangClient(server.url, read_key(server.key_file), Timeouts(generate_s=DEADLINE_S))
    settings = SglangEngineSettings(client.max_length(), 300, routing=SHAPE, poll_wait_s=0.2, abort_s=DEADLINE_S)
    with SglangEngine([client], settings) as engine:
        engine.set_policy_version(1)  # that of the sync
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


def drain(engine: SglangEngine) -> list[Completion]:
    completions, end = [], time.monotonic() + DEADLINE_S
    while engine.num_unfinished:
        assert time.monotonic() < end, f"{engine.num_unfinished} requests never came back; {engine.failed_servers}"
        completions += engine.poll()
    return completions


def test_answers_hold_the_experts_of_every_token_but_the_last(
    engine: SglangEngine, chosen: Callable[[Completion], np.ndarray]
) -> None:
    engine.submit(requests(6))
    for done in drain(engine):
        assert done.routing is not None and done.routing.dtype == np.uint8
        assert done.routing.shape == (len(PROMPT) + done.num_tokens - 1, 2, 2)
        assert (np.sort(done.routing) == chosen(done)).all()
    engine.submit(requests(1, with_routing=False))
    assert drain(engine)[0].routing is None


def test_continued_responses_keep_the_experts_of_their_prefix(
    engine: SglangEngine, chosen: Callable[[Completion], np.ndarray]
) -> None:
    engine.submit(requests(4))
    whole = drain(engine)
    marked = []
    for request, done in zip(requests(4), whole, strict=True):
        earlier = np.full_like(done.routing[: len(PROMPT) + 3], 7)
        numbers = {"token_ids": done.token_ids[:4], "logprobs": done.logprobs[:4], "routing": earlier}
        prefix = replace(done, finish_reason="abort", versions=(VersionRange(0, 4, 0),), **numbers)
        marked.append(replace(request, prefix=prefix))
    engine.submit(marked)
    for done, before in zip(drain(engine), whole, strict=True):
        assert done.token_ids.tolist() == before.token_ids.tolist()
        known = len(PROMPT) + 3
        assert (done.routing[:known] == 7).all() and (np.sort(done.routing)[known:] == chosen(done)[known:]).all()


def test_aborted_responses_have_their_experts(engine: SglangEngine, chosen: Callable[[Completion], np.ndarray]) -> None:
    sampling = SamplingParams(max_new_tokens=800)
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


def test_a_server_that_cannot_say_is_an_error(
    seeded_servers: Callable[[int], list[SglangServer]],
) -> None:
    [other] = seeded_servers(1)
    client = SglangClient(other.url, read_key(other.key_file), Timeouts(generate_s=DEADLINE_S))
    client.update_weight_version(0)
    with SglangEngine([client], SglangEngineSettings(client.max_length(), 300, routing=SHAPE, max_tries=1)) as engine:
        engine.set_policy_version(0)
        engine.submit(requests(1))
        with pytest.raises(Exception, match="--enable-return-routed-experts"):
            drain(engine)
