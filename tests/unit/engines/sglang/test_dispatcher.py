"""Deadlines of requests count from a server's last answer, and connections stay within the limit of open files."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Sequence

import pytest

from megatron_dapo.engines.sglang import engine as engine_module
from megatron_dapo.engines.sglang.client import EngineTimeout, SglangClient, Timeouts
from megatron_dapo.engines.sglang.dispatcher import HttpDispatcher, Outcome
from megatron_dapo.engines.sglang.engine import SglangEngine, SglangEngineSettings
from megatron_dapo.engines.sglang.wire import Generation
from megatron_dapo.types import GenerationRequest, SamplingParams


class OneAtATime(SglangClient):
    """A server whose cache holds one response: the others wait in its queue. `decode_s` of each, 0: never."""

    def __init__(self, decode_s: float) -> None:
        super().__init__("http://127.0.0.1:1", None, Timeouts(generate_s=1.0))
        self.decode_s = decode_s
        self.turn: asyncio.Lock | None = None

    async def generate(self, http: object, request: GenerationRequest, rid: str, **model: object) -> Generation:
        self.turn = self.turn or asyncio.Lock()
        async with self.turn:
            await asyncio.sleep(self.decode_s or 3600)
        return Generation((1,), (-0.5,), "stop", "0")


def outcomes(client: SglangClient, count: int) -> Sequence[Outcome]:
    dispatcher, arrived = HttpDispatcher(10, 8), []
    try:
        request = GenerationRequest("r", (1,), SamplingParams(), seed=0)
        dispatcher.send([(number, client, request, "") for number in range(count)])
        end = time.monotonic() + 60
        while len(arrived) < count and time.monotonic() < end:
            arrived += dispatcher.receive(0.1)
    finally:
        dispatcher.close()
    return arrived


def test_time_in_the_queue_does_not_count_while_others_finish() -> None:
    """The last of six decodes after 2 s, twice the limit."""
    found = outcomes(OneAtATime(0.4), 6)
    assert [outcome.number for outcome in found] == list(range(6))
    assert all(isinstance(outcome.result, Generation) for outcome in found)


def test_a_server_without_any_answer_times_out() -> None:
    found = outcomes(OneAtATime(0.0), 3)
    assert len(found) == 3 and all(isinstance(outcome.result, EngineTimeout) for outcome in found)
    assert "no answer to any request for 1.0 s" in str(found[0].result)


def test_servers_are_busy_while_they_have_attempts() -> None:
    """Attempts next to each other count once, a time without any does not count, a dropped attempt ends."""
    request, quick, silent = GenerationRequest("r", (1,), SamplingParams(), seed=0), OneAtATime(0.3), OneAtATime(0.0)
    dispatcher = HttpDispatcher(10, 8)
    try:
        dispatcher.send([(number, quick, request, "") for number in range(2)])
        arrived: list[Outcome] = []
        while len(arrived) < 2:
            arrived += dispatcher.receive(5.0)
        once = dispatcher.busy_s
        assert 0.6 <= once, "two attempts of 0.3 s, one after the other"
        time.sleep(0.5)
        assert dispatcher.busy_s == once
        begin = time.monotonic()
        dispatcher.send([(2, silent, request, ""), (3, silent, request, "")])
        time.sleep(0.3)
        dispatcher.give_up([2])
        time.sleep(0.3)
        dispatcher.give_up([3])
        time.sleep(0.3)
        busy, passed = dispatcher.busy_s - once, time.monotonic() - begin
        assert 0.5 < busy < passed - 0.2
        assert dispatcher.busy_s - once == busy
    finally:
        dispatcher.close()


def test_connections_stay_within_the_limit_of_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 servers of 128 requests would take 8,192 connections of rank 0."""
    monkeypatch.setattr(engine_module.resource, "getrlimit", lambda kind: (1024, 1024))
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (1024, 1024)
    clients = [SglangClient(f"http://127.0.0.1:{port}", None) for port in range(1, 65)]
    with SglangEngine(clients, SglangEngineSettings(max_length=64, vocab_size=10, max_in_flight=128)) as engine:
        per_server = engine._dispatcher._max_connections
        assert 1 <= engine._max_in_flight < per_server and 64 * per_server <= 1024
    with SglangEngine(clients[:1], SglangEngineSettings(max_length=64, vocab_size=10, max_in_flight=128)) as engine:
        assert engine._max_in_flight == 128
