"""One conversation with a tool in each API: what a client reads, and that it is one stream of the tree."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.engines.endpoint.test_server import Post, Script, said, served

from megatron_dapo.engines.endpoint.server import ChatEndpoint

PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}}}
ADD = {"name": "add", "description": "Add.", "parameters": PARAMETERS}


class ChatClient:
    path = "/v1/chat/completions"

    def begin(self) -> dict[str, Any]:
        messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "1?"}]}]
        return {"messages": messages, "tools": [{"type": "function", "function": ADD}], "max_tokens": 9}

    def follow(self, body: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        message = answer["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "2"}
        return {**body, "messages": [*body["messages"], message, result]}

    def text(self, answer: dict[str, Any]) -> str:
        return answer["choices"][0]["message"]["content"]

    def streamed(self, events: list[dict[str, Any]]) -> tuple[str, str]:
        deltas = [event["choices"][0]["delta"] for event in events]
        return deltas[0]["content"], deltas[0]["tool_calls"][0]["function"]["arguments"]


class ResponsesClient:
    path = "/v1/responses"

    def begin(self) -> dict[str, Any]:
        tools = [{"type": "function", "strict": True, **ADD}]
        return {"input": "1?", "instructions": "Be brief.", "tools": tools, "max_output_tokens": 9, "store": False}

    def follow(self, body: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        call = next(item for item in answer["output"] if item["type"] == "function_call")
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "2"}
        return {**body, "input": [{"role": "user", "content": body["input"]}, *answer["output"], result]}

    def text(self, answer: dict[str, Any]) -> str:
        (message,) = (item for item in answer["output"] if item["type"] == "message")
        return message["content"][0]["text"]

    def streamed(self, events: list[dict[str, Any]]) -> tuple[str, str]:
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[-1]["type"] == "response.completed" and events[-1]["response"]["output"]
        text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
        return text, next(event["arguments"] for event in events if event["type"] == "response.function_call_arguments.done")


class MessagesClient:
    path = "/v1/messages"

    def begin(self) -> dict[str, Any]:
        tools = [{"name": "add", "description": "Add.", "input_schema": PARAMETERS}]
        system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
        return {"messages": [{"role": "user", "content": "1?"}], "system": system, "tools": tools, "max_tokens": 9}

    def follow(self, body: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        assert answer["stop_reason"] == "tool_use"
        use = next(block for block in answer["content"] if block["type"] == "tool_use")
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": [{"type": "text", "text": "2"}]}
        news = [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result]}]
        return {**body, "messages": [*body["messages"], *news]}

    def text(self, answer: dict[str, Any]) -> str:
        return "".join(block["text"] for block in answer["content"] if block["type"] == "text")

    def streamed(self, events: list[dict[str, Any]]) -> tuple[str, str]:
        assert (events[0]["type"], events[-1]["type"]) == ("message_start", "message_stop")
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        return "".join(delta.get("text", "") for delta in deltas), "".join(delta.get("partial_json", "") for delta in deltas)


CLIENTS = [ChatClient(), ResponsesClient(), MessagesClient()]
every_client = pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.path)


@every_client
@pytest.mark.parametrize("text", ["", "Well."])
def test_a_conversation_with_a_tool_is_one_stream(client: Any, text: str) -> None:
    script = Script(said(text, reasoning="so", calls=(("add", '{"x": 1}'),)), said("done", reasoning="then"), said("more"))

    async def body(_: ChatEndpoint, key: str, post: Post) -> None:
        request = client.begin()
        status, answer = await post(path=client.path, **request)
        assert status == 200, answer
        request = client.follow(request, answer)
        status, answer = await post(path=client.path, **request)
        assert status == 200 and client.text(answer) == "done", answer

    served(script, body)
    (_, first, most), (_, second, _) = script.turns
    assert [dict(message) for message in first.messages] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1?"},
    ]
    assert [dict(tool) for tool in first.tools] == [ADD] and most == 9
    assert second.parent is first and second.stream == 0
    assert [dict(message) for message in second.messages] == [{"role": "tool", "tool_call_id": "call_0_0", "content": "2"}]


@every_client
def test_a_stream_has_the_same_answer_in_events(client: Any) -> None:
    script = Script(said("hi", reasoning="so", calls=(("add", '{"x": 1}'),)))

    async def body(_: ChatEndpoint, key: str, post: Post) -> None:
        status, text = await post(path=client.path, stream=True, **client.begin())
        lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
        assert status == 200
        assert client.streamed([json.loads(line) for line in lines if line != "[DONE]"]) == ("hi", '{"x": 1}')

    served(script, body)


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("/v1/responses", {"input": [{"type": "web_search_call"}]}, "input.0: Input tag 'web_search_call'"),
        ("/v1/responses", {"previous_response_id": "resp_0"}, 'previous_response_id = "resp_0" is no response of this episode; send'),
        ("/v1/responses", {"reasoning": {"effort": "high"}}, 'reasoning = {"effort": "high"} is not supported'),
        ("/v1/responses", {"tools": [{"type": "web_search"}]}, "tools.0."),
        ("/v1/responses", {"frequency": 1}, "frequency is not a field that this endpoint knows"),
        ("/v1/responses", {"temperature": 0.2}, "temperature = 0.2, but the run samples its policy at 1"),
        ("/v1/messages", {"max_tokens": 0}, "max_tokens: Input should be greater than or equal to 1"),
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking = {"),
        ("/v1/messages", {"top_k": 5}, "top_k = 5 is not supported"),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0: Input tag 'image'"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "the last message is"),
    ],
)
def test_what_an_api_does_not_serve_is_named_in_its_form(path: str, fields: dict[str, Any], message: str) -> None:
    begin: Callable[[], dict[str, Any]] = next(client.begin for client in CLIENTS if client.path == path)

    async def body(_: ChatEndpoint, key: str, post: Post) -> None:
        status, answer = await post(path=path, **{**begin(), **fields})
        assert status == 400 and answer["error"]["message"].startswith(message), answer
        assert (answer.get("type") == "error") == (path == "/v1/messages")

    script = Script()
    served(script, body)
    assert not script.turns


def test_apis_share_a_conversation() -> None:
    """A conversation that one API began is continued by another; Anthropic's clients send their key in their own header."""
    script = Script(said("b"), said("d"))

    async def body(_: ChatEndpoint, key: str, post: Post) -> None:
        await post([{"role": "user", "content": "a"}])
        messages = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"))]
        status, _ = await post(messages, path="/v1/messages", max_tokens=5, key_in="x-api-key")
        assert status == 200

    served(script, body)
    assert [turn.stream for _, turn, _ in script.turns] == [0, 0]


def test_a_response_is_followed_by_its_id() -> None:
    """What was answered stands before the input; instructions are those of each request."""
    script = Script(said("", calls=(("add", '{"x": 1}'),)), said("done"), said("more"), said("plain"))

    async def body(_: ChatEndpoint, key: str, post: Post) -> None:
        begin = ResponsesClient().begin()
        _, answer = await post(path="/v1/responses", **begin)
        assert (answer["id"], answer["previous_response_id"]) == ("resp_0", None)
        result = {"type": "function_call_output", "call_id": answer["output"][0]["call_id"], "output": "2"}
        follow = {**begin, "previous_response_id": "resp_0", "input": [result]}
        status, answer = await post(path="/v1/responses", **follow)
        assert (status, answer["id"], answer["previous_response_id"]) == (200, "resp_1", "resp_0"), answer
        await post(path="/v1/responses", **{**begin, "previous_response_id": "resp_1", "input": "again"})
        bare = {name: value for name, value in begin.items() if name != "instructions"}
        await post(path="/v1/responses", **{**bare, "previous_response_id": "resp_1", "input": "other"})
        _, refused = await post(path="/v1/responses", **{**begin, "previous_response_id": "resp_9"})
        assert refused["error"]["message"].startswith('previous_response_id = "resp_9" is no response of this episode')

    served(script, body)
    first, second, third, bare = (turn for _, turn, _ in script.turns)
    assert (second.parent, third.parent) == (first, second) and third.stream == 0
    assert [dict(message) for message in second.messages] == [{"role": "tool", "tool_call_id": "call_0_0", "content": "2"}]
    assert [dict(message) for message in third.messages] == [{"role": "user", "content": "again"}]
    assert (bare.parent, bare.stream, bare.reason) == (None, 1, "the client changed message 1 of 5 (user)")
    assert [message["role"] for message in bare.messages] == ["user", "assistant", "tool", "assistant", "user"]


def test_an_id_means_one_of_answers_that_are_alike() -> None:
    script = Script(said("same"), said("same"), said("after the first"), said("after the second"))

    async def body(_: ChatEndpoint, key: str, post: Post) -> None:
        for _ in range(2):
            await post(path="/v1/responses", input="a")
        for previous in ("resp_0", "resp_1"):
            await post(path="/v1/responses", input="b", previous_response_id=previous)

    served(script, body)
    first, second, after_first, after_second = (turn for _, turn, _ in script.turns)
    assert (after_first.parent, after_second.parent) == (first, second)
    assert (after_first.stream, after_second.stream) == (0, 1)


def test_tokens_are_counted_without_a_turn() -> None:
    script = Script(said("b"))

    async def body(_: ChatEndpoint, key: str, post: Post) -> None:
        path, begin = "/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a"}]}
        assert await post(path=path, **begin) == (200, {"input_tokens": 7})
        await post(path="/v1/messages", max_tokens=9, **begin)
        said = [{"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
        tools = [{"name": "add", "input_schema": PARAMETERS}]
        assert await post(path=path, messages=[*begin["messages"], *said]) == (200, {"input_tokens": 7})
        assert (await post(path=path, tools=tools, **begin))[0] == 200
        counted = await post(path="/v1/responses/input_tokens", input="a")
        assert counted == (200, {"input_tokens": 7, "object": "response.input_tokens"})
        status, answer = await post(path=path, **begin, top_k=5)
        assert (status, answer["type"], answer["error"]["message"][:9]) == (400, "error", "top_k = 5")
        assert (await post(path=path, key_="wrong", **begin))[0] == 401

    served(script, body)
    first = [{"role": "user", "content": "a"}]
    assert script.counted == [
        (first, 0, None, True),
        ([{"role": "user", "content": "c"}], 0, "b", False),
        (first, 1, None, False),
        (first, 0, None, False),
    ]
    assert len(script.turns) == 1
