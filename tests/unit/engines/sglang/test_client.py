"""The client against a server that misbehaves to order: every failure is a typed error, in time and without the key."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from fake_server import FAULTS, KEY, FakeServer

from megatron_dapo.engines.sglang.client import (
    EngineAnswerError,
    EngineGone,
    EngineHttpError,
    EngineTimeout,
    SglangClient,
    Timeouts,
)
from megatron_dapo.engines.sglang.wire import AnswerError, Generation, parse_generation, parse_prompt_logprobs
from megatron_dapo.types import Completion, GenerationRequest, SamplingParams, VersionRange

FAST = Timeouts(connect_s=5, generate_s=3, control_s=1.5, flush_s=1.5, update_s=1.5, health_s=1.5)
PATIENT = Timeouts(generate_s=30)
REQUEST = GenerationRequest("a", (5, 6, 7), SamplingParams(max_new_tokens=8, stop_token_ids=(3,)), seed=11)


def client_of(server: FakeServer, timeouts: Timeouts = PATIENT, **options: object) -> SglangClient:
    return SglangClient(server.url, server.key, timeouts, **options)


def generate(client: SglangClient, request: GenerationRequest = REQUEST, vocab_size: int = 100) -> Generation:
    async def answer() -> Generation:
        async with client.open_async(1) as http:
            with client._errors("POST /generate", client.timeouts.generate_s):  # the dispatcher ends a hang
                attempt = client.generate(http, request, "a.", vocab_size=vocab_size)
                return await asyncio.wait_for(attempt, client.timeouts.generate_s)

    return asyncio.run(answer())


def test_a_response_comes_back_exactly(server: FakeServer) -> None:
    done = generate(client_of(server))
    tokens, logprobs = server.expected(3, 11, 8, stops=(3,))
    assert done.token_ids.tolist() == tokens and done.logprobs.tolist() == logprobs
    assert (done.finish_reason, done.weight_version) == ("length", "default")
    body = server.calls[-1][1]
    assert body["logprob_start_len"] == -1 and body["return_logprob"] and "text" not in body


def test_the_body_names_everything_that_shapes_the_distribution(server: FakeServer) -> None:
    sampling = SamplingParams(temperature=0.7, top_p=0.9, top_k=5, max_new_tokens=4, stop_token_ids=(9, 3, 9))
    generate(client_of(server), replace(REQUEST, sampling=sampling, seed=(1 << 64) - 1))
    params = server.calls[-1][1]["sampling_params"]
    assert params == {
        "max_new_tokens": 4,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
        "n": 1,
        "stop_token_ids": [3, 9],
        "ignore_eos": False,
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "sampling_seed": (1 << 63) - 1,
    }
    generate(client_of(server), replace(REQUEST, sampling=SamplingParams(temperature=0.0, max_new_tokens=4), seed=-1))
    params = server.calls[-1][1]["sampling_params"]
    assert (params["temperature"], params["top_k"], params["ignore_eos"]) == (0.0, -1, True)
    assert params["sampling_seed"] == (1 << 63) - 1


def test_a_stop_token_is_part_of_the_response_also_at_the_limit(server: FakeServer) -> None:
    tokens, _ = server.expected(3, 11, 8)
    stop = tokens[4]
    for limit in (8, 5):  # SGLang gives the second one the finish reason length
        sampling = SamplingParams(max_new_tokens=limit, stop_token_ids=(stop,))
        done = generate(client_of(server), replace(REQUEST, sampling=sampling))
        assert done.token_ids.tolist() == tokens[:5] and done.finish_reason == "stop"


def test_a_prefix_follows_the_prompt_and_continues_the_random_numbers(server: FakeServer) -> None:
    tokens, logprobs = server.expected(3, 11, 8)
    prefix = Completion("a", tuple(tokens[:3]), tuple(logprobs[:3]), "abort", (VersionRange(0, 3, 0),))
    request = replace(REQUEST, sampling=SamplingParams(max_new_tokens=8), prefix=prefix)
    done = generate(client_of(server), request)
    assert done.token_ids.tolist() == tokens[3:] and done.logprobs.tolist() == logprobs[3:]
    assert server.calls[-1][1]["input_ids"] == [5, 6, 7, *tokens[:3]]


@pytest.mark.parametrize("cached", [0, 2, None])
def test_cached_tokens_are_read_where_a_server_counts_them(cached: int | None) -> None:
    assert parse_generation(answer_with(cached), REQUEST, vocab_size=100).num_cached == (cached or 0)


@pytest.mark.parametrize("cached", [-1, 4, 1.0, True, "2"])
def test_impossible_counts_of_cached_tokens_are_refused(cached: object) -> None:
    with pytest.raises(AnswerError, match="cached_tokens is .* of 3 tokens read"):
        parse_generation(answer_with(cached), REQUEST, vocab_size=100)


def answer_with(cached: object) -> bytes:
    tokens = list(range(10, 10 + REQUEST.sampling.max_new_tokens))
    answer = {
        "output_ids": tokens,
        "meta_info": {
            "prompt_tokens": 3,
            "completion_tokens": len(tokens),
            "cached_tokens": cached,
            "finish_reason": {"type": "length", "length": len(tokens)},
            "output_token_logprobs": [[-1.0, token, None] for token in tokens],
        },
    }
    return json.dumps(answer, separators=(",", ":")).encode()


EXPECTED = {
    "hang": (EngineTimeout, "no answer within 3 s"),
    "hang_mid_answer": (EngineTimeout, "no answer within 3 s"),
    "reset": (EngineGone, "connection lost"),
    "reset_mid_answer": (EngineGone, "connection lost"),
    "400": (EngineHttpError, "HTTP 400: .*the request does not fit"),
    "401": (EngineHttpError, "the API key is not this server's"),
    "500": (EngineHttpError, "HTTP 500: .*log"),
    "503": (EngineHttpError, "HTTP 503: .*overloaded"),
    "no_json": (EngineAnswerError, "no JSON"),
    "missing_logprob": (EngineAnswerError, "7 log-probs for 8 tokens"),
    "missing_token": (EngineAnswerError, "8 log-probs for 7 tokens"),
    "other_ids": (EngineAnswerError, "log-prob 0 is of token .*, not of token"),
    "nan": (EngineAnswerError, "if the log-prob is null, the served policy has diverged"),
    "positive": (EngineAnswerError, "is 0.5: the served policy has diverged"),
    "other_vocabulary": (EngineAnswerError, "vocabulary is 0..99: the server serves another model"),
    "unknown_reason": (EngineAnswerError, "unknown finish reason 'tired'"),
    "nan_stop": (EngineAnswerError, "stopped at 'NaN happened'"),
    "short": (EngineAnswerError, "at 2 tokens, 8 were requested"),
    "behind_stop": (EngineAnswerError, "continues after the stop ids"),
    "unsuccessful": (EngineAnswerError, "success: false: the loader refused"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_a_clear_error_in_time(fault: str, server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    kind, message = EXPECTED[fault]
    stop = server.expected(3, 11, 8)[0][2]
    request = replace(REQUEST, sampling=SamplingParams(max_new_tokens=8, stop_token_ids=(stop,)))
    server.faults["/generate"] = fault
    client = client_of(server, FAST)
    began = time.monotonic()
    with pytest.raises(kind, match=message) as caught:
        generate(client, request if fault == "behind_stop" else REQUEST)
    assert time.monotonic() - began < 30
    assert server.url in str(caught.value) and "POST /generate" in str(caught.value)
    assert server.paths().count("/generate") == 1, "a generation is never repeated by the client"
    assert KEY not in str(caught.value) + repr(client) + caplog.text


def test_a_dead_server_fails_immediately(server: FakeServer) -> None:
    client = client_of(server)
    client.health()
    server.kill()
    for call in (client.health, client.server_info, client.flush_cache, lambda: generate(client)):
        with pytest.raises(EngineGone, match="connection refused|connection lost"):
            call()


def test_idempotent_calls_survive_a_lost_connection_and_updates_are_never_repeated(server: FakeServer) -> None:
    client = client_of(server, FAST)
    server.faults = dict.fromkeys(("/pause_generation", "/update_weights_from_tensor"), "reset")
    with pytest.raises(EngineGone):
        client.pause()
    with pytest.raises(EngineGone):
        client.update_weights_from_tensor([b"payload"])
    assert server.paths().count("/pause_generation") > 1
    assert server.paths().count("/update_weights_from_tensor") == 1


def test_a_call_without_the_key_changes_nothing(server: FakeServer) -> None:
    stranger = SglangClient(server.url, "another key")
    for call in (lambda: stranger.update_weight_version(3), lambda: stranger.abort(), lambda: generate(stranger)):
        with pytest.raises(EngineHttpError, match="HTTP 401.*key file") as caught:
            call()
        assert caught.value.is_refusal
    assert server.weight_version == "default"


def test_flushing_waits_for_work_to_end_up_to_a_deadline(server: FakeServer) -> None:
    client = client_of(server, replace(FAST, flush_s=1.0))
    server.running["busy"] = "run"
    began = time.monotonic()
    with pytest.raises(EngineHttpError, match="Flush cache failed"):
        client.flush_cache()
    assert 0.2 < time.monotonic() - began < 30
    assert server.paths().count("/flush_cache") < 12
    server.running.clear()
    client.flush_cache()


def test_pause_and_versions(server: FakeServer) -> None:
    client = client_of(server)
    client.pause()
    assert server.is_paused
    client.resume()
    assert not server.is_paused
    assert client.weight_version == "default"
    client.update_weight_version(7)
    assert client.weight_version == "7"
    client.abort("some.")
    assert server.calls[-1] == ("/abort_request", {"rid": "some.", "abort_all": False})


def test_weights_are_sent_as_stock_sglang_takes_them(make_server) -> None:
    old, new = make_server(), make_server(needs_session=True)
    seen = []
    old.on_update = new.on_update = lambda path, body: seen.append((path, body))
    client_of(old).begin_weight_update()
    client_of(old).update_weights_from_tensor([b"\x00one", "dHdv"], "module.load")
    assert seen.pop()[1] == {
        "serialized_named_tensors": [base64.b64encode(b"\x00one").decode(), "dHdv"],
        "load_format": "module.load",
        "flush_cache": False,
    }
    client_of(old).update_weights_from_disk("/a/directory")
    assert seen.pop()[1]["model_path"] == "/a/directory"
    client = client_of(new, api_version=SimpleNamespace(needs_update_session=True))
    with pytest.raises(EngineHttpError, match="no weight update session is open"):
        client.update_weights_from_tensor([b"x"])
    client.begin_weight_update()
    client.update_weights_from_tensor([b"x"])
    client.end_weight_update()
    assert len(seen) == 1 and not new.in_session


def test_the_longest_sequence_that_is_not_cut(server: FakeServer) -> None:
    assert client_of(server).max_length() == server.context_length - 2


def test_prompt_logprobs_are_those_of_the_given_tokens(server: FakeServer) -> None:
    client = client_of(server)
    assert client.prompt_logprobs([4, 5, 6]) == [-0.005, -0.006]
    assert server.calls[-1][1]["logprob_start_len"] == 0


def test_highest_token_of_a_prompt_may_be_shown_as_zero() -> None:
    """SGLang 0.5.17 shows it as zero; any other token shown as another one is an error."""
    answer = {"meta_info": {"input_token_logprobs": [[None, 4, None], [-1.0, 0, None], [-2.0, 5, None]]}}
    assert parse_prompt_logprobs(answer, [4, 9, 5]) == [-1.0, -2.0]
    with pytest.raises(AnswerError, match="not one of token 3"):
        parse_prompt_logprobs(answer, [4, 3, 5])


def test_urls_are_checked() -> None:
    with pytest.raises(ValueError, match="http://host:port"):
        SglangClient("localhost:30000", None)
