"""Servers that release their memory: the order of requests, and the check that the memory is free."""

from __future__ import annotations

from typing import Any

import pytest
from fake_server import FakeServer

from megatron_dapo.engines.sglang.client import ColocatedClient, EngineError, SglangClient
from megatron_dapo.engines.sglang.cluster import SharedDevice


class Recorded(ColocatedClient):
    """Records the calls instead of making them."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:1", None)
        self.calls: list[Any] = []

    def _call(self, endpoint: str, body: Any, deadline: float, retries: int = 0) -> Any:
        self.calls.append((endpoint.removeprefix("POST "), *(body or {}).get("tags", ())))


def test_weights_are_resumed_before_and_the_cache_after_the_sync() -> None:
    client = Recorded()
    client.sleep()
    client.sleep()  # nothing more to release
    client.pause()
    client.flush_cache()
    client.begin_weight_update()
    client.calls.append("sync")
    client.resume()
    assert client.calls == [
        ("/pause_generation",),
        ("/flush_cache",),
        ("/release_memory_occupation", "kv_cache", "weights"),
        ("/pause_generation",),
        ("/flush_cache",),
        ("/resume_memory_occupation", "weights"),
        "sync",
        ("/resume_memory_occupation", "kv_cache"),
        ("/continue_generation",),
    ]
    client.calls.clear()
    client.begin_weight_update()
    client.resume()
    assert client.calls == [("/continue_generation",)]  # awake: nothing to resume


def test_a_repeated_update_resumes_no_memory_twice() -> None:
    """SGLang's scheduler dies of a KeyError when memory is resumed that was not released."""
    client = Recorded()
    client.sleep()
    client.begin_weight_update()
    client.begin_weight_update()  # the session could not be opened, or the sync failed
    client.sleep()
    client.begin_weight_update()
    client.resume()
    assert client.calls == [
        ("/pause_generation",),
        ("/flush_cache",),
        ("/release_memory_occupation", "kv_cache", "weights"),
        ("/resume_memory_occupation", "weights"),
        ("/pause_generation",),
        ("/flush_cache",),
        ("/release_memory_occupation", "weights"),
        ("/resume_memory_occupation", "weights"),
        ("/resume_memory_occupation", "kv_cache"),
        ("/continue_generation",),
    ]


def test_a_health_check_of_a_sleeping_server_runs_no_forward(server: FakeServer) -> None:
    """SGLang generates a token for it unless generation is paused, and its scheduler dies on memory that is gone."""
    client, monitor = (kind(server.url, server.key) for kind in (ColocatedClient, SglangClient))
    monitor.health()
    client.sleep()
    with pytest.raises(EngineError, match="503"):
        monitor.health()
    client.begin_weight_update()
    with pytest.raises(EngineError, match="503"):
        monitor.health()
    client.resume()
    monitor.health()
    assert server.forwards == ["", ""], "released memory at each forward"
    assert [body["mode"] for path, body in server.calls if path == "/pause_generation"] == ["abort"]


def test_the_release_ends_when_the_device_reports_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([100, 100, 350, 420])
    monkeypatch.setattr(SharedDevice, "free_bytes", lambda device: next(readings))
    assert SharedDevice(expected_bytes=300, timeout_s=5.0).wait_for_memory(before=100) == 320


def test_memory_that_is_not_released_is_an_error_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SharedDevice, "free_bytes", lambda device: 150)
    with pytest.raises(MemoryError, match="released 50 bytes within 0.1 s, their weights alone are 300"):
        SharedDevice(expected_bytes=300, timeout_s=0.1).wait_for_memory(before=100)
