"""Starting and ending servers, with a small script in place of the engine: it hangs, exits, lies, or will not die."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from stand_in_engine import running

from megatron_dapo.engines.sglang import server as server_module
from megatron_dapo.engines.sglang.ports import listen_address
from megatron_dapo.engines.sglang.server import (
    AttachedServer,
    EngineStartError,
    Expectation,
    SglangServer,
    first_cause,
)
from megatron_dapo.engines.sglang.server_settings import ServerSettings


@pytest.fixture
def start() -> Iterator[Callable[[ServerSettings], SglangServer]]:
    servers: list[SglangServer] = []

    def start_one(settings: ServerSettings, index: int = 0) -> SglangServer:
        servers.append(SglangServer.start(settings, index))
        return servers[-1]

    yield start_one
    for server in servers:
        server.kill()


def test_a_healthy_server_is_checked_used_and_ended(settings: Any, start: Any) -> None:
    server = start(settings())
    info = server.wait_until_healthy()
    assert (info.vocab_size, info.api_version.version, info.max_total_tokens) == (300, "0.5.17", 64)
    assert server.is_alive() and server.pid in server.pids()
    server.stop()
    assert not server.is_alive() and not running([server.pid])
    server.stop()  # a second time does nothing


@pytest.mark.parametrize("host", ["auto", "0.0.0.0"])
def test_servers_of_two_nodes_are_reached_at_their_own_addresses(settings: Any, start: Any, host: str) -> None:
    """Two loopback addresses stand in for two nodes: the second node's server must not be sought at the first's."""
    urls = []
    for index, own_address in enumerate(("127.0.0.1", "127.0.0.2")):
        address = listen_address(host, own_address)
        server = start(settings(host=address.bind, advertised_host=address.advertised), index)
        assert server.wait_until_healthy().vocab_size == 300
        urls.append(server.url)
        port = int(server.url.rpartition(":")[2])
        with socket.socket() as other:  # an address of neither node
            assert (other.connect_ex(("127.0.0.3", port)) == 0) == (host == "0.0.0.0")
    assert [url.split(":")[1] for url in urls] == ["//127.0.0.1", "//127.0.0.2"]


def test_leftovers_are_removed_and_every_start_has_its_log(settings: Any, start: Any) -> None:
    some = settings()
    logs = []
    for _ in range(2):
        server = start(some, 3)
        server.wait_until_healthy()
        scratch = Path(psutil.Process(server.pid).cwd())
        assert scratch.is_dir()
        server.kill()
        assert not scratch.exists()
        logs.append(server.log.name)
    assert logs == ["engine_3.log", "engine_3.1.log"]


def test_one_that_hangs_fails_at_the_deadline_and_is_ended(settings: Any, start: Any) -> None:
    server = start(settings({"hang": True}, start_timeout_s=1.5))
    began = time.monotonic()
    with pytest.raises(EngineStartError, match="not healthy after 1.5 s"):
        server.wait_until_healthy()
    assert time.monotonic() - began < 60
    assert not running([server.pid])


def test_one_that_is_never_healthy_fails_at_the_deadline(settings: Any, start: Any) -> None:
    server = start(settings({"health": 503}, start_timeout_s=3.0))
    with pytest.raises(EngineStartError, match="not healthy after 3 s"):
        server.wait_until_healthy()


def test_one_that_ends_is_reported_at_once_with_the_first_cause_last(settings: Any, start: Any) -> None:
    server = start(settings({"fail": True}))
    with pytest.raises(EngineStartError, match="ended with exit code 3") as caught:
        server.wait_until_healthy()
    assert str(caught.value).splitlines()[-1] == "first cause: ValueError: the first error"
    assert str(server.log) in str(caught.value)


@pytest.mark.parametrize(
    ("behavior", "message"),
    [
        ({"model": {"architectures": ["LlamaForCausalLM"]}}, "architecture LlamaForCausalLM, not Qwen2ForCausalLM"),
        ({"vocab_size": 512}, "vocab_size 512, not 300"),
        ({"server": {"dtype": "bfloat16"}}, "dtype bfloat16, not float32"),
        ({"server": {"tp_size": 2}}, "tensor_parallel 2, not 1"),
        ({"server": {"custom_weight_loader": []}}, "no way to update its weights"),
        ({"server": {"version": "0.5.16"}}, "0.5.16 is older than what is supported"),
        ({"server": {"version": "0.6.0"}}, "0.6.0 is newer than what is tested, .* fails the protocol probe: GET /openapi.json answers 404"),
        ({"server": {"version": None, "tp_size": None}}, "expected three numbers"),
        ({"server": {"tp_size": None}}, "does not answer like a SGLang server"),
        ({"key": "another"}, "refuses the key"),
    ],
)
def test_one_that_serves_something_else_is_refused_and_ended(
    settings: Any, start: Any, behavior: dict[str, Any], message: str
) -> None:
    server = start(settings(behavior))
    with pytest.raises(EngineStartError, match=message):
        server.wait_until_healthy()
    assert not running([server.pid])


def test_a_server_without_seeds_is_refused_if_seeds_are_required(settings: Any, start: Any) -> None:
    with pytest.raises(EngineStartError, match="no seeds per request"):
        start(settings(seeded=True)).wait_until_healthy()


def test_a_port_in_use_is_the_first_cause(settings: Any, start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that binds the port before the reservation makes it choose another; here it is forced not to."""
    with socket.socket() as rival:
        rival.bind(("127.0.0.1", 0))
        taken = server_module.ReservedPort("127.0.0.1", rival.getsockname()[1], socket.socket())
        monkeypatch.setattr(server_module, "reserve_port", lambda host: taken)
        with pytest.raises(EngineStartError, match="first cause: OSError: .*Address already in use"):
            start(settings({"health": 503})).wait_until_healthy()


def test_children_that_ignore_signals_or_left_the_session_are_ended(settings: Any, start: Any) -> None:
    server = start(settings({"children": True}))
    server.wait_until_healthy()
    pids = server.pids()
    assert len(pids) == 3
    began = time.monotonic()
    server.stop()
    assert time.monotonic() - began < 30
    assert not running(pids)


def test_orphans_of_a_killed_leader_are_ended(settings: Any, start: Any) -> None:
    server = start(settings({"children": True}))
    server.wait_until_healthy()
    pids = server.pids()
    os.kill(server.pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while server.is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not server.is_alive() and "ended with signal 9" in server.exit_reason()
    server.kill()
    assert not running(pids)


def test_a_missing_interpreter_is_refused(settings: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="engine python .*missing cannot be run"):
        SglangServer.start(settings(python=tmp_path / "missing"))


def test_a_directory_without_a_model(settings: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be a Hugging Face checkpoint directory"):
        SglangServer.start(settings(model_path=tmp_path))


def test_attaching_to_a_server_by_url(settings: Any, start: Any) -> None:
    server = start(settings())
    server.wait_until_healthy()
    right, wrong = Expectation.of(server.settings), Expectation("Qwen2ForCausalLM", 301, "float32", 1)
    attached = AttachedServer(server.url + "/", server.key_file, right)
    assert attached.wait_until_healthy() == server.info and attached.is_alive()
    with pytest.raises(EngineStartError, match="vocab_size 300, not 301"):
        AttachedServer(server.url, server.key_file, wrong).wait_until_healthy()
    attached.stop()
    assert server.is_alive()
    server.stop()
    assert not attached.is_alive()
    with pytest.raises(EngineStartError, match="not healthy after 0.3 s"):
        AttachedServer(server.url, server.key_file, right, timeout_s=0.3).wait_until_healthy()


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        (["[TP0] Traceback (most recent call last):", "  File a", "KeyError: 1", "RuntimeError: 2"], "KeyError: 1"),
        (["Ignore import error when loading x: Error", "[date] OSError: disk full", "x"], "OSError: disk full"),
        (["all well", "", "Killed"], "Killed"),
        (["", " "], "none in the log"),
    ],
)
def test_the_first_cause_of_a_log(lines: list[str], cause: str) -> None:
    assert first_cause(lines) == cause
