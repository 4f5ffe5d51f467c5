"""NeMo-Gym's calls of a model server: each is answered, or refused with the name of what it asks for.

Its package needs Python 3.12 and newer, so these are its requests and not its programs: an agent's, which takes the endpoint
for its model server (`responses_api_models`), and those that its `vllm_model` sends to an engine.
"""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.engines.endpoint.test_server import Post, Script, said, served

from megatron_dapo.engines.endpoint.server import ChatEndpoint

TOOL = {"type": "function", "name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}, "strict": True}
# NeMo-Gym's agents may send every field of a request, unset ones as null, and name no model.
UNSET = dict.fromkeys(
    "background include instructions max_output_tokens max_tool_calls metadata model previous_response_id prompt reasoning "
    "service_tier store stream temperature text top_logprobs top_p truncation user".split()
)
BEGIN = {
    "input": [
        {"role": "developer", "content": "Be brief.", "type": "message"},
        {"role": "user", "content": [{"type": "input_text", "text": "1?"}], "type": "message"},
    ],
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [TOOL],
}
TOKENS = {"prompt_token_ids": [1, 2], "generation_token_ids": [3], "generation_log_probs": [-0.5], "routed_experts": None}


@pytest.mark.parametrize("unset", [{}, UNSET], ids=["set fields", "all fields"])
@pytest.mark.parametrize("tokens", [{}, TOKENS], ids=["without ids", "with ids"])
def test_an_agent_s_tool_loop_is_one_stream(unset: dict[str, Any], tokens: dict[str, Any]) -> None:
    """It sends all items of the answers again, and those of its trainer's server have the ids and log-probs of their tokens."""
    script = Script(said("See.", reasoning="so", calls=(("add", "{}"), ("add", '{"x": 1}'))), said("2"))

    async def body(_: ChatEndpoint, key: str, post: Post) -> None:
        status, answer = await post(path="/v1/responses", **{**unset, **BEGIN})
        assert status == 200, answer
        assert {"id", "created_at", "model", "object", "output", "parallel_tool_calls", "tool_choice", "tools"} <= answer.keys()
        assert [item["type"] for item in answer["output"]] == ["reasoning", "message", "function_call", "function_call"]
        assert answer["usage"]["input_tokens_details"] == {"cached_tokens": 0}
        *items, last = answer["output"]
        outputs = [
            {"type": "function_call_output", "call_id": call["call_id"], "output": '{"sum": 2}'} for call in answer["output"][2:]
        ]
        follow = {**unset, **BEGIN, "input": [*BEGIN["input"], *items, {**last, **tokens}, *outputs]}
        status, answer = await post(path="/v1/responses", **follow)
        assert status == 200 and answer["output"][0]["content"][0]["text"] == "2", answer

    served(script, body)
    (_, first, most), (_, second, _) = script.turns
    assert (second.parent, second.stream, most) == (first, 0, None)
    assert [message["role"] for message in second.messages] == ["tool", "tool"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 0.6}, "temperature = 0.6, but the run samples its policy at 1"),
        ({"top_logprobs": 5}, "top_logprobs = 5 is not supported"),
        ({"truncation": "auto"}, 'truncation = "auto" is not supported'),
        ({"background": True}, "background = true is not supported"),
        ({"max_tool_calls": 3}, "max_tool_calls = 3 is not supported"),
        ({"text": {"format": {"type": "json_object"}}}, "text = {"),
        ({"reasoning": {"effort": "high"}}, 'reasoning = {"effort": "high"} is not supported'),
        ({"tool_choice": "required"}, 'tool_choice = "required" is not supported'),
        ({"prompt": {"id": "pmpt_1"}}, "prompt = {"),
        ({"previous_response_id": "resp_7"}, 'previous_response_id = "resp_7" is no response of this episode'),
        ({"tools": [{"type": "code_interpreter", "container": {"type": "auto"}}]}, "tools.0."),
        ({"input": [{"type": "mcp_call", "name": "a", "arguments": "{}"}]}, "input.0: Input tag 'mcp_call'"),
        ({"input": [{"type": "custom_tool_call_output", "call_id": "a", "output": "b"}]}, "input.0: Input tag 'custom_tool_call_output'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]}, "input.0.message.content"),
    ],
)
def test_what_an_agent_is_not_served_is_named(fields: dict[str, Any], message: str) -> None:
    async def body(_: ChatEndpoint, key: str, post: Post) -> None:
        status, answer = await post(path="/v1/responses", **{**BEGIN, **fields})
        assert status == 400 and answer["error"]["message"].startswith(message), answer

    served(Script(), body)


CHAT = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "1?"}]},
        {"role": "assistant", "content": "See.", "reasoning_content": "so", "reasoning": "so", **TOKENS},
        {"role": "user", "content": "And?"},
    ],
    "tools": [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {}}}],
    "parallel_tool_calls": True,
}


@pytest.mark.parametrize(
    ("path", "fields", "status", "message"),
    [
        ("/v1/chat/completions", {}, 200, ""),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 0, "return_tokens_as_token_ids": True}, 400, "logprobs = true"),
        ("/v1/chat/completions", {"return_token_ids": True}, 400, "return_token_ids is not a field"),
        ("/v1/chat/completions", {"required_prefix_token_ids": [1]}, 400, "required_prefix_token_ids is not a field"),
        ("/v1/chat/completions", {"chat_template_kwargs": {"enable_thinking": False}}, 400, "chat_template_kwargs is not a field"),
        ("/v1/chat/completions", {"continue_final_message": True}, 400, "continue_final_message is not a field"),
        ("/tokenize", {}, 404, "POST /tokenize is not served"),
        ("/v1/completions", {}, 404, "POST /v1/completions is not served"),
    ],
)
def test_what_its_vllm_model_asks_an_engine_is_answered_or_named(path: str, fields: dict[str, Any], status: int, message: str) -> None:
    script = Script(said("2"))

    async def body(_: ChatEndpoint, key: str, post: Post) -> None:
        got, answer = await post(path=path, **CHAT, **fields)
        assert got == status, answer
        assert answer.get("error", {}).get("message", "").startswith(message), answer

    served(script, body)
    assert len(script.turns) == (status == 200)
