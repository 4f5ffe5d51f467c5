"""SGLang's own router in front of fake servers, where the engine's environment has it; the client's part always."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_server import FakeServer

from megatron_dapo.engines.sglang.client import EngineHttpError, SglangClient, Timeouts
from megatron_dapo.engines.sglang.engine import AllEnginesGone, SglangEngine, SglangEngineSettings
from megatron_dapo.engines.sglang.keys import create_key, read_key
from megatron_dapo.engines.sglang.router import (
    RoutedClient,
    RouterSettings,
    RouterStartError,
    SglangRouter,
    is_installed,
)
from megatron_dapo.types import GenerationRequest, SamplingParams

TIMEOUTS = Timeouts(connect_s=5, generate_s=60, control_s=10, health_s=10)


@pytest.fixture(scope="session")
def engine_python(repository: Path) -> Path:
    """The engine environment's interpreter, if it has the router."""
    python = Path(os.environ.get("MEGATRON_DAPO_ENGINE_PYTHON", repository / ".venv-sglang/bin/python"))
    if not python.exists() or not is_installed(python):
        pytest.skip(f"sglang_router is not installed for {python} (make test-engine does that)")
    return python


@pytest.fixture
def servers(make_server, tmp_path: Path) -> list[FakeServer]:
    key = read_key(create_key(tmp_path))
    return [make_server(key=key, weight_version="0") for _ in range(3)]


@pytest.fixture
def router(servers: list[FakeServer], engine_python: Path, tmp_path: Path) -> Iterator[SglangRouter]:
    settings = RouterSettings(engine_python, tmp_path / "engine.key", tmp_path / "logs")
    router = SglangRouter.start(settings, [server.url for server in servers])
    router.wait_until_healthy(3)
    yield router
    router.stop()


@pytest.fixture
def engine(router: SglangRouter, servers: list[FakeServer]) -> Iterator[SglangEngine]:
    workers = [SglangClient(server.url, server.key, TIMEOUTS) for server in servers]
    client = RoutedClient(router.url, servers[0].key, workers, TIMEOUTS)
    settings = SglangEngineSettings(max_length=512, vocab_size=100, poll_wait_s=0.1, abort_s=20, max_tries=50)
    with SglangEngine([client], settings) as engine:
        engine.set_policy_version(0)
        yield engine


def make_requests(count: int) -> list[GenerationRequest]:
    return [GenerationRequest(f"{i}", (3, 4, i), SamplingParams(max_new_tokens=20), seed=i) for i in range(count)]


def drain(engine: SglangEngine) -> dict[str, tuple[int, ...]]:
    done: dict[str, tuple[int, ...]] = {}
    end = time.monotonic() + 60
    while engine.num_unfinished:
        assert time.monotonic() < end, f"{engine.num_unfinished} requests never came back"
        for completion in engine.poll():
            assert completion.request_id not in done
            done[completion.request_id] = tuple(completion.token_ids)
    return done


def expected(requests: list[GenerationRequest], server: FakeServer) -> dict[str, tuple[int, ...]]:
    return {r.request_id: tuple(server.expected(3, r.seed, 20)[0]) for r in requests}


def test_requests_go_through_and_a_killed_server_costs_nothing(
    engine: SglangEngine, router: SglangRouter, servers: list[FakeServer]
) -> None:
    requests = make_requests(40)
    engine.submit(requests)
    assert drain(engine) == expected(requests, servers[0])
    assert sum("/generate" in server.paths() for server in servers) > 1

    for server in servers:
        server.freeze_after = 2
    engine.submit(requests)
    busy = max(servers, key=lambda server: len(server.running))
    busy.wait_until_running(1)
    busy.kill()
    for server in servers:
        server.thaw()
    assert drain(engine) == expected(requests, servers[0])
    assert not engine.failed_servers
    end = time.monotonic() + 60
    while router.workers()[busy.url] and time.monotonic() < end:
        time.sleep(0.1)
    assert router.workers()[busy.url] is False

    router.remove_worker(busy.url)
    busy.start()
    router.add_worker(busy.url)
    while not router.workers().get(busy.url) and time.monotonic() < end:
        time.sleep(0.1)
    assert router.workers()[busy.url] is True
    with pytest.raises(ValueError, match="has no server http://nowhere"):
        router.remove_worker("http://nowhere")


def test_aborts_go_straight_to_the_servers(engine: SglangEngine, servers: list[FakeServer]) -> None:
    for server in servers:
        server.freeze_after = 4
    requests = make_requests(12)
    engine.submit(requests)
    end = time.monotonic() + 60
    while sum(len(server.running) for server in servers) < 12 and time.monotonic() < end:
        time.sleep(0.02)
    partial = engine.abort()
    whole = expected(requests, servers[0])
    assert len(partial) == 12 and engine.num_unfinished == 0
    assert all(tuple(done.token_ids) == whole[done.request_id][:4] for done in partial)


def test_without_any_server_the_run_stops_with_the_reason(
    engine: SglangEngine, router: SglangRouter, servers: list[FakeServer]
) -> None:
    for server in servers:
        server.kill()
    end = time.monotonic() + 60
    while any(router.workers().values()) and time.monotonic() < end:
        time.sleep(0.1)
    engine.submit(make_requests(3))
    with pytest.raises(AllEnginesGone, match="none of its 3 servers is healthy"):
        drain(engine)
    assert engine.num_unfinished == 3


def test_strangers_are_refused(router: SglangRouter) -> None:
    async def generate(client: SglangClient) -> None:
        async with client.open_async(1) as http:
            await client.generate(http, make_requests(1)[0], "a.", vocab_size=100)

    for key in ("another key", None):
        with pytest.raises(EngineHttpError, match="HTTP 401"):
            asyncio.run(generate(SglangClient(router.url, key, TIMEOUTS)))


def test_missing_servers_are_named_in_time(engine_python: Path, tmp_path: Path) -> None:
    settings = RouterSettings(engine_python, create_key(tmp_path), tmp_path / "logs", start_timeout_s=3)
    router = SglangRouter.start(settings, ["http://127.0.0.1:9", "http://127.0.0.1:10"])
    with pytest.raises(RouterStartError, match="only 0 of 2 servers in its rotation after 3 s"):
        router.wait_until_healthy(2)
    assert not router.is_alive()


def test_an_environment_without_the_router_is_named(tmp_path: Path, repository: Path) -> None:
    settings = RouterSettings(Path(sys.executable), create_key(tmp_path), tmp_path)
    if is_installed(settings.python):
        pytest.skip("this environment has the router")
    with pytest.raises(ValueError, match="sglang_router is not installed .* or leave the router out"):
        SglangRouter.start(settings, ["http://127.0.0.1:9", "http://127.0.0.1:10"])
    with pytest.raises(ValueError, match="1 servers to choose from, it needs at least 2"):
        SglangRouter.start(settings, ["http://127.0.0.1:9"])
