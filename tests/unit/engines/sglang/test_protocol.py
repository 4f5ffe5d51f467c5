"""The protocol probe: what it asks for is what the client sends, and an untested version is used or refused by it."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_server import ENDPOINTS, FakeServer, openapi_of

from megatron_dapo.engines.sglang import protocol, server as server_module
from megatron_dapo.engines.sglang.client import SglangClient
from megatron_dapo.engines.sglang.server import EngineStartError, Expectation, ServerInfo, checked, open_http
from megatron_dapo.engines.sglang.versions import ApiVersion
from megatron_dapo.types import GenerationRequest, RoutingShape, SamplingParams

EXPECTATION = Expectation("Qwen2ForCausalLM", 100, "float32", 1)
UNTESTED = "0.99.0"


@pytest.fixture(autouse=True)
def forget_warnings() -> None:
    server_module._warn_untested.cache_clear()


@pytest.fixture
def info_of(tmp_path: Path) -> Any:
    """info_of(server): what `checked` says of it."""

    def info(server: FakeServer) -> ServerInfo:
        key_file = tmp_path / "key"
        key_file.write_text(server.key)
        key_file.chmod(0o600)
        with open_http(server.url, key_file) as http:
            return checked(server.url, http, EXPECTATION)

    return info


def test_the_probe_asks_for_what_the_client_sends(make_server: Any) -> None:
    server = make_server(needs_session=True)
    client = SglangClient(server.url, server.key, api_version=ApiVersion("0.5.23", needs_update_session=True))
    request = GenerationRequest("a", (5, 6), SamplingParams(max_new_tokens=1), seed=1, with_routing=True)

    async def generate() -> None:
        async with client.open_async(1) as http:
            await client.probe(http)
            try:
                await client.generate(
                    http, request, "a.", vocab_size=100, routing=RoutingShape(1, 1, 8), cache_key="v1"
                )
            except RuntimeError:
                pass  # the fake has no experts to tell

    asyncio.run(generate())
    client.prompt_logprobs([4, 5])
    client.health()
    client.abort()
    client.abort("a.")
    client.pause()
    client.resume()
    client.flush_cache()
    client.release_memory(["weights"])
    client.resume_memory(["weights"])
    client.begin_weight_update()
    client.update_weights_from_tensor([b"x"], "module.load")
    client.end_weight_update()
    client.begin_weight_update()
    client.update_weights_from_disk("/a/directory")
    client.end_weight_update()
    client.update_weight_version(1)
    client.max_length()
    client.model_info()
    sent: dict[str, set[str]] = {}
    for path, body in server.calls:
        sent.setdefault(path, set()).update(body)
    assert sent == {endpoint.split()[1]: set(fields) for endpoint, fields in protocol.ENDPOINTS.items()}


def test_nothing_is_missing_from_a_description_of_the_newest_tested_version() -> None:
    assert protocol.missing_from(openapi_of(ENDPOINTS)) == []


def test_missing_endpoints_and_fields_are_named() -> None:
    endpoints = {**ENDPOINTS, "POST /update_weight_version": ["version"], "POST /abort_request": ["rid"]}
    del endpoints["POST /flush_cache"]  # GET remains
    del endpoints["POST /end_weight_update"]
    assert protocol.missing_from(openapi_of(endpoints)) == [
        "POST /abort_request does not take abort_all",
        "no POST /flush_cache",
        "no POST /end_weight_update",
        "POST /update_weight_version does not take new_version, abort_all_requests",
    ]


def test_an_untested_version_that_passes_is_used_with_one_warning(
    make_server: Any, info_of: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        infos = [info_of(make_server(version=UNTESTED)) for _ in range(2)]
    assert all(info.api_version.needs_update_session and not info.api_version.is_tested for info in infos)
    (warning,) = [record.getMessage() for record in caplog.records if record.name == server_module.__name__]
    assert UNTESTED in warning and "0.5.17 to 0.5.23" in warning and "\n" not in warning


def test_a_tested_version_is_not_probed(
    server: FakeServer, info_of: Any, caplog: pytest.LogCaptureFixture
) -> None:
    server.endpoints.clear()
    assert info_of(server).api_version.version == "0.5.17"
    assert not caplog.records and "/openapi.json" not in server.paths()


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        (lambda server: server.endpoints.pop("POST /begin_weight_update"), "no POST /begin_weight_update"),
        (lambda server: server.faults.update({"/openapi.json": "503"}), "GET /openapi.json answers 503"),
        (lambda server: server.faults.update({"/generate": "nan"}), "log-prob 0 is no"),
        (lambda server: setattr(server, "context_length", 2), "POST /generate answers 400"),
        (lambda server: setattr(server, "vocab_size", 3), ""),
    ],
)
def test_an_untested_version_that_fails_is_refused_in_one_line(
    make_server: Any, info_of: Any, change: Any, missed: str
) -> None:
    server = make_server(version=UNTESTED)
    change(server)
    with pytest.raises(EngineStartError) as caught:
        info_of(server)
    text = str(caught.value)
    if missed:
        for word in (f"SGLang {UNTESTED} is newer", "0.5.17 to 0.5.23", "install sglang==0.5.23", missed):
            assert word in text, text
        assert "\n" not in text
    else:  # another model is no question of the protocol
        assert "vocab_size 3, not 100" in text and "protocol" not in text


def test_a_server_that_does_not_answer_the_probe_is_refused(make_server: Any, info_of: Any) -> None:
    server = make_server(version=UNTESTED)
    server.faults["/openapi.json"] = "reset"
    with pytest.raises(EngineStartError, match=f"SGLang {UNTESTED} is newer than what is tested"):
        info_of(server)


def test_sizes_are_asked_for(make_server: Any) -> None:
    server = make_server()
    server._serve_server_info = lambda body: (200, {"max_total_num_tokens": "many"})
    with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {server.key}"}) as http:
        assert protocol.problems(http, 100) == [
            "max_req_input_len of /server_info is None",
            "max_total_num_tokens of /server_info is many",
        ]
