"""Anthropic's Messages; see `APIFormat`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from megatron_dapo.engines.endpoint.format import (
    Body,
    ChatAnswer,
    ChatRequest,
    Function,
    Ignoring,
    MODEL,
    Neutral,
    Sampling,
    assistant,
    checked,
    event,
)
from megatron_dapo.types import SamplingParams


class _Text(Ignoring):
    type: Literal["text"]
    text: str


class _Thinking(Ignoring):
    type: Literal["thinking"]
    thinking: str


class _ToolUse(Ignoring):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class _ToolResult(Ignoring):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[_Text] = ""


_Block = Annotated[_Text | _Thinking | _ToolUse | _ToolResult, Field(discriminator="type")]


class _Message(Ignoring):
    role: Literal["user", "assistant"]
    content: str | list[_Block]

    def plain(self) -> Iterator[dict[str, Any]]:
        """Yield the messages of Chat Completions that it stands for: a result of a tool is a message there."""
        blocks = [_Text(type="text", text=self.content)] if isinstance(self.content, str) else self.content
        if self.role == "assistant":
            thoughts = [block.thinking for block in blocks if isinstance(block, _Thinking)]
            uses = [block for block in blocks if isinstance(block, _ToolUse)]
            calls = [(use.id, use.name, json.dumps(use.input)) for use in uses]
            yield assistant(_text(blocks), "\n".join(thoughts), calls)
            return
        for block in blocks:
            if isinstance(block, _ToolResult):
                content = block.content if isinstance(block.content, str) else _text(block.content)
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
        if any(isinstance(block, _Text) for block in blocks):
            yield {"role": "user", "content": _text(blocks)}


def _text(blocks: Any) -> str:
    return "\n".join(block.text for block in blocks if isinstance(block, _Text))


class _Tool(Ignoring):
    type: Literal["custom"] | None = None
    name: str
    description: str = ""
    input_schema: dict[str, Any]


class _Request(Body):
    messages: list[_Message]
    max_tokens: int = Field(ge=1)
    system: str | list[_Text] | None = None
    tools: list[_Tool] | None = None


_NEUTRAL: Neutral = {
    "tool_choice": ({"type": "auto"}, {"type": "auto", "disable_parallel_tool_use": False}, None),
    "thinking": ({"type": "disabled"}, None),
    "stop_sequences": ([], None),
    "top_k": (None,),
    "mcp_servers": ([], None),
    "container": (None,),
    "cache_control": None,
    "metadata": None,
    "service_tier": None,
}


def parse(body: Any, sampling: SamplingParams, on_other_sampling: Sampling = "refuse") -> tuple[ChatRequest, list[str]]:
    parsed, ignored = checked(_Request, body, _NEUTRAL, sampling, on_other_sampling)
    system = parsed.system if isinstance(parsed.system, str) else _text(parsed.system or ())
    request = ChatRequest(
        (
            *([{"role": "system", "content": system}] if system else ()),
            *(plain for message in parsed.messages for plain in message.plain()),
        ),
        tuple(
            Function(name=tool.name, description=tool.description, parameters=tool.input_schema).model_dump()
            for tool in parsed.tools or ()
        ),
        parsed.max_tokens,
        bool(parsed.stream),
        model=parsed.model or MODEL,
    )
    return request, ignored


def answer_body(answer: ChatAnswer, turn: int, request: ChatRequest) -> dict[str, Any]:
    return _message(turn, request) | {
        "content": _blocks(answer, turn),
        "stop_reason": _stop_reason(answer),
        "usage": _usage(answer),
    }


def answer_events(answer: ChatAnswer, turn: int, request: ChatRequest) -> Iterator[bytes]:
    yield _event("message_start", message=_message(turn, request) | {"usage": _usage(answer) | {"output_tokens": 0}})
    for index, block in enumerate(_blocks(answer, turn)):
        start, deltas = _DELTAS[block["type"]](block)
        yield _event("content_block_start", index=index, content_block=start)
        for delta in deltas:
            yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    delta = {"stop_reason": _stop_reason(answer), "stop_sequence": None}
    yield _event("message_delta", delta=delta, usage={"output_tokens": answer.num_tokens})
    yield _event("message_stop")


# The begin of a block of a type and the deltas that complete it.
_DELTAS = {
    "text": lambda block: (block | {"text": ""}, [{"type": "text_delta", "text": block["text"]}]),
    "thinking": lambda block: (
        block | {"thinking": ""},
        [
            {"type": "thinking_delta", "thinking": block["thinking"]},
            {"type": "signature_delta", "signature": block["signature"]},
        ],
    ),
    "tool_use": lambda block: (
        block | {"input": {}},
        [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}],
    ),
}


def error_body(message: str, kind: str) -> dict[str, Any]:
    return {"type": "error", "error": {"type": kind, "message": message}}


def _event(name: str, **fields: Any) -> bytes:
    return event({"type": name, **fields}, name)


def _message(turn: int, request: ChatRequest) -> dict[str, Any]:
    return {
        "id": f"msg_{turn}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _blocks(answer: ChatAnswer, turn: int) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if answer.reasoning:
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": f"turn {turn}"})
    if answer.content or not answer.calls:
        blocks.append({"type": "text", "text": answer.content})
    blocks += [
        {"type": "tool_use", "id": call_id, "name": name, "input": json.loads(arguments)}
        for call_id, name, arguments in answer.numbered_calls(turn)
    ]
    return blocks


def _usage(answer: ChatAnswer) -> dict[str, int]:
    return {
        "input_tokens": answer.num_prompt_tokens - answer.num_cached_tokens,
        "cache_read_input_tokens": answer.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": answer.num_tokens,
    }


def _stop_reason(answer: ChatAnswer) -> str:
    if answer.finish_reason != "stop":
        return "max_tokens"
    return "tool_use" if answer.calls else "end_turn"
