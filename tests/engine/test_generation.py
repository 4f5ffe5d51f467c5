"""Generation by real SGLang servers: log-probs, stops, aborts, continuations, and the death of a server."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from synced_server import SyncedServer, connect
from synced_server import drain as all_of

from megatron_dapo.engines.base import PrefixReuse
from megatron_dapo.engines.sglang.client import EngineAnswerError, SglangClient
from megatron_dapo.engines.sglang.engine import SglangEngine, SglangEngineSettings
from megatron_dapo.engines.sglang.wire import Generation
from megatron_dapo.types import Completion, GenerationRequest, SamplingParams, VersionRange, num_distinct

VOCAB_SIZE = 300
CONTEXT_LENGTH = 512
DEADLINE_S = 240.0


def clients_of(servers: list[SyncedServer]) -> list[SglangClient]:
    clients = [connect(synced.server, generate_s=DEADLINE_S, control_s=DEADLINE_S) for synced in servers]
    for client in clients:
        client.update_weight_version(0)
    return clients


@pytest.fixture(scope="module")
def clients(seeded_servers: Callable[[int], list[SyncedServer]]) -> list[SglangClient]:
    return clients_of(seeded_servers(1))


@pytest.fixture(scope="module")
def servers(seeded_servers: Callable[[int], list[SyncedServer]]) -> list[SyncedServer]:
    """Two servers; the last test of the module kills one."""
    return seeded_servers(2)


@pytest.fixture
def engine(clients: list[SglangClient]) -> Iterator[SglangEngine]:
    with SglangEngine(clients, settings_of(clients[0])) as engine:
        engine.set_policy_version(0)
        yield engine


def settings_of(client: SglangClient) -> SglangEngineSettings:
    return SglangEngineSettings(
        max_length=client.max_length(), vocab_size=VOCAB_SIZE, poll_wait_s=0.2, abort_s=DEADLINE_S
    )


@pytest.fixture(scope="module")
def model(moe_model: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(moe_model, dtype=torch.float32).eval()


def reference_logprobs(model: torch.nn.Module, prompt: tuple[int, ...], response: tuple[int, ...], t: float) -> list:
    """log softmax(logits / t) of the response's tokens, from a full forward pass."""
    tokens = torch.tensor([[*prompt, *response]])
    with torch.no_grad():
        logits = model(tokens, use_cache=False).logits[0, len(prompt) - 1 : -1].double()
    return (logits / t).log_softmax(-1).gather(-1, tokens[0, len(prompt) :, None]).squeeze(-1).tolist()


def make_requests(num_groups: int, group_size: int = 4, **sampling: object) -> list[GenerationRequest]:
    rng = random.Random(0)
    params = SamplingParams(**{"max_new_tokens": 40, "stop_token_ids": (2,), **sampling})
    requests = []
    for group in range(num_groups):
        prompt = tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(4, 40)))
        for index in range(group_size):
            requests.append(GenerationRequest(f"{group}/{index}", prompt, params, seed=(group << 40) + index))
    return requests


def drain(engine: SglangEngine) -> dict[str, Completion]:
    found = all_of(engine, DEADLINE_S)
    completions = {done.request_id: done for done in found}
    assert len(completions) == len(found), "a response came back twice"
    return completions


def generate(client: SglangClient, request: GenerationRequest, rid: str) -> Generation:
    async def answer() -> Generation:
        async with client.open_async(1) as http:
            return await client.generate(http, request, rid, vocab_size=VOCAB_SIZE)

    return asyncio.run(answer())


def check_equal(actual: dict[str, Completion], expected: dict[str, Completion]) -> None:
    assert set(actual) == set(expected)
    for name, done in actual.items():
        assert (done.token_ids.tolist(), done.finish_reason) == (
            expected[name].token_ids.tolist(),
            expected[name].finish_reason,
        )
        assert done.logprobs == pytest.approx(expected[name].logprobs, abs=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_logprobs_are_the_models_at_the_sampled_temperature(
    temperature: float, engine: SglangEngine, model: torch.nn.Module
) -> None:
    requests = make_requests(3, temperature=temperature)
    engine.submit(requests)
    completions = drain(engine)
    for request in requests:
        done = completions[request.request_id]
        expected = reference_logprobs(model, request.prompt_ids, done.token_ids, temperature or 1.0)
        assert done.logprobs == pytest.approx(expected, abs=1e-5)
    if temperature:
        assert num_distinct(completions.values()) == len(requests)


def test_prompt_logprobs_are_the_models(clients: list[SglangClient], model: torch.nn.Module) -> None:
    ids = make_requests(1)[0].prompt_ids
    expected = reference_logprobs(model, ids[:1], ids[1:], 1.0)
    for _ in range(2):  # the second time the prompt is in the server's cache
        assert clients[0].prompt_logprobs(ids) == pytest.approx(expected, abs=1e-5)


def test_stops_and_limits(clients: list[SglangClient]) -> None:
    request = replace(make_requests(1)[0], sampling=SamplingParams(max_new_tokens=30))
    free = generate(clients[0], request, "free.")
    assert len(free.token_ids) == 30 and free.finish_reason == "length" and free.weight_version == "0"
    tokens = free.token_ids.tolist()
    stop = tokens[5]
    cut = tokens.index(stop) + 1
    for limit in (30, cut):
        sampling = SamplingParams(max_new_tokens=limit, stop_token_ids=(stop, 299))
        done = generate(clients[0], replace(request, sampling=sampling), f"{limit}.")
        assert done.token_ids.tolist() == free.token_ids[:cut].tolist() and done.finish_reason == "stop"


def test_the_longest_sequence_is_served_and_a_longer_one_is_not_cut_silently(clients: list[SglangClient]) -> None:
    assert clients[0].max_length() == CONTEXT_LENGTH - 2
    request = make_requests(1)[0]
    room = CONTEXT_LENGTH - 2 - len(request.prompt_ids)
    longest = replace(request, sampling=SamplingParams(max_new_tokens=room))
    assert len(generate(clients[0], longest, "longest.").token_ids) == room
    longer = replace(request, sampling=SamplingParams(max_new_tokens=room + 1))
    with pytest.raises(EngineAnswerError, match=f"at {room} tokens, {room + 1} were requested"):
        generate(clients[0], longer, "longer.")


def abort_in_flight(engine: SglangEngine, requests: list[GenerationRequest]) -> list[Completion]:
    """Abort, later if no response has tokens and earlier if all have ended, until some have tokens and are unfinished."""
    wait_s = 0.2
    for _ in range(20):  # a busy machine may let all of them end
        engine.submit(requests)
        time.sleep(wait_s)
        partial = engine.abort()
        reasons = {done.finish_reason for done in partial}
        assert reasons <= {"abort", "stop", "length"}
        has_begun = max(len(done.token_ids) for done in partial) > 3
        if has_begun and "abort" in reasons:
            return partial
        wait_s *= 0.6 if has_begun else 2
    raise AssertionError("in 20 attempts no response was cut off after its first tokens")


def test_an_aborted_response_continues_with_the_same_tokens(engine: SglangEngine, clients: list[SglangClient]) -> None:
    requests = make_requests(4, max_new_tokens=120)
    engine.submit(requests)
    whole = drain(engine)
    partial = {done.request_id: done for done in abort_in_flight(engine, requests)}
    for name, done in partial.items():
        assert done.token_ids.tolist() == whole[name].token_ids[: len(done.token_ids)].tolist()
        assert done.logprobs == pytest.approx(whole[name].logprobs[: len(done.token_ids)], abs=1e-5)
    for client in clients:
        client.pause()
        client.flush_cache()
        client.update_weight_version(1)
        client.resume()
    engine.set_policy_version(1)
    engine.submit([replace(request, prefix=partial[request.request_id]) for request in requests])
    continued = drain(engine)
    check_equal(continued, whole)
    for name, done in continued.items():
        start, end = len(partial[name].token_ids), len(done.token_ids)
        expected = (VersionRange(0, start, 0), VersionRange(start, end, 1))
        assert done.versions == tuple(entry for entry in expected if entry.end > entry.start)
    for client in clients:
        client.update_weight_version(0)


def test_a_continued_window_finds_its_prefix_until_the_weights_change(clients: list[SglangClient]) -> None:
    """Windows of 40 tokens of 8 prompts: the second with the same weights, the third after a weight sync and its flush."""
    client = clients[0]
    client.flush_cache()
    requests = make_requests(8, group_size=1, stop_token_ids=())
    with SglangEngine([client], settings_of(client)) as engine:
        engine.set_policy_version(0)
        held = generate_all(engine, requests)
        assert engine.prefix_reuse == PrefixReuse()
        second = [continuation(request, held[request.request_id]) for request in requests]
        held = generate_all(engine, second)
        by_same_weights = engine.prefix_reuse
        num_context = sum(len(request.prompt_ids) + 40 for request in requests)
        # All but the last token, which the model must process to sample the next one.
        assert by_same_weights == PrefixReuse(num_context, num_context - len(requests))
        client.pause()
        client.flush_cache()
        client.update_weight_version(1)
        client.resume()
        engine.set_policy_version(1)
        generate_all(engine, [continuation(request, held[request.request_id]) for request in second])
        assert engine.prefix_reuse - by_same_weights == PrefixReuse(num_context + 40 * len(requests), 0)
    client.update_weight_version(0)


def continuation(request: GenerationRequest, window: Completion) -> GenerationRequest:
    """Return the request for 40 more tokens."""
    sampling = replace(request.sampling, max_new_tokens=len(window.token_ids) + 40)
    return replace(request, sampling=sampling, prefix=replace(window, finish_reason="abort"))


def generate_all(engine: SglangEngine, requests: list[GenerationRequest]) -> dict[str, Completion]:
    engine.submit(requests)
    return drain(engine)


@pytest.mark.long  # tests/unit/engines/sglang/test_engine.py has stand-ins for servers
def test_all_responses_of_a_killed_server_are_returned_once(servers: list[SyncedServer]) -> None:
    clients, requests = clients_of(servers), make_requests(6, max_new_tokens=400, stop_token_ids=())
    with SglangEngine(clients, settings_of(clients[0])) as engine:
        engine.set_policy_version(0)
        engine.submit(requests)
        whole = drain(engine)
        engine.submit(requests)
        time.sleep(0.2)  # 9,600 tokens take far longer
        for pid in servers[1].server.pids():
            os.kill(pid, signal.SIGKILL)
        check_equal(drain(engine), whole)
        assert list(engine.failed_servers) == [1] and not servers[1].server.is_alive()
        assert engine.statistics.num_redispatched > 0
