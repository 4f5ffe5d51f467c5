"""The protocol probe: whether a server of an untested version of SGLang has the interface that this package uses.

The server's own OpenAPI document has its endpoints and the fields of their bodies; one generated token shows the
sampling parameters and the form of answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from megatron_dapo.engines.sglang.wire import AnswerError, generate_body, parse_generation, parse_prompt_logprobs
from megatron_dapo.types import GenerationRequest, SamplingParams

# Endpoint -> fields of its body that `SglangClient` sends.
ENDPOINTS: Mapping[str, Sequence[str]] = {
    "GET /health": (),
    "GET /server_info": (),
    "GET /model_info": (),
    "POST /generate": (
        "rid",
        "input_ids",
        "sampling_params",
        "return_logprob",
        "logprob_start_len",
        "stream",
        "extra_key",
        "return_routed_experts",
        "routed_experts_start_len",
    ),
    "POST /abort_request": ("rid", "abort_all"),
    "POST /pause_generation": ("mode",),
    "POST /continue_generation": (),
    "POST /flush_cache": (),
    "POST /release_memory_occupation": ("tags",),
    "POST /resume_memory_occupation": ("tags",),
    "POST /begin_weight_update": (),
    "POST /update_weights_from_tensor": ("serialized_named_tensors", "load_format", "flush_cache"),
    "POST /update_weights_from_disk": ("model_path", "load_format", "flush_cache", "abort_all_requests"),
    "POST /end_weight_update": (),
    "POST /update_weight_version": ("new_version", "abort_all_requests"),
}
# Sizes in /server_info that `SglangClient.max_length` computes with.
SIZES = ("max_req_input_len", "max_total_num_tokens")
_REQUEST = GenerationRequest("probe", (0, 1, 2), SamplingParams(max_new_tokens=1), seed=1)


def problems(http: httpx.Client, vocab_size: int) -> list[str]:
    """Return what a server lacks, one text each; none if it can be used. Generates one token."""
    return [*_description_problems(http), *_answer_problems(http, vocab_size)]


def missing_from(document: Mapping[str, Any]) -> list[str]:
    """Return the endpoints, and the fields of their bodies, that an OpenAPI document lacks."""
    missing = []
    for endpoint, fields in ENDPOINTS.items():
        method, path = endpoint.split()
        operation = document["paths"].get(path, {}).get(method.lower())
        if operation is None:
            missing.append(f"no {endpoint}")
        elif unknown := [field for field in fields if field not in _body_fields(document, operation)]:
            missing.append(f"{endpoint} does not take {', '.join(unknown)}")
    return missing


def _description_problems(http: httpx.Client) -> list[str]:
    document, sizes = http.get("/openapi.json"), http.get("/server_info").json()
    if document.status_code != 200:
        return [f"GET /openapi.json answers {document.status_code}: start the server without DISABLE_OPENAPI_DOC"]
    wrong = [f"{name} of /server_info is {sizes.get(name)}" for name in SIZES if not isinstance(sizes.get(name), int)]
    return missing_from(document.json()) + wrong


def _answer_problems(http: httpx.Client, vocab_size: int) -> list[str]:
    answer = http.post("/generate", json={**generate_body(_REQUEST, "probe."), "logprob_start_len": 0})
    if answer.status_code != 200:
        return [f"POST /generate answers {answer.status_code} {answer.text[:200]!r}"]
    try:
        parse_generation(answer.content, _REQUEST, vocab_size=vocab_size)
        parse_prompt_logprobs(answer.json(), _REQUEST.prompt_ids)
    except AnswerError as error:
        return [f"the answer of POST /generate: {error}"]
    return []


def _body_fields(document: Mapping[str, Any], operation: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields that the JSON body of an operation may have."""
    content = operation.get("requestBody", {}).get("content", {})
    schema = content.get("application/json", {}).get("schema", {})
    while "$ref" in schema:
        *_, name = schema["$ref"].split("/")
        schema = document["components"]["schemas"][name]
    return schema.get("properties", {})
