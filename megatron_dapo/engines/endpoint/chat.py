"""OpenAI's Chat Completions; see `APIFormat`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from megatron_dapo.engines.endpoint.format import (
    Body,
    ChatAnswer,
    ChatRequest,
    Function,
    Ignoring,
    MODEL,
    Neutral,
    Sampling,
    checked,
    event,
)
from megatron_dapo.types import SamplingParams


class _Part(Ignoring):
    type: Literal["text"]
    text: str


class _CalledFunction(Ignoring):
    name: str
    arguments: str


class _Call(Ignoring):
    id: str = ""
    type: Literal["function"] = "function"
    function: _CalledFunction


class _Message(Ignoring):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Part] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None

    def plain(self) -> dict[str, Any]:
        """Return the message as chat templates take it, without fields that are not set."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        for name in ("name", "reasoning_content", "tool_call_id"):
            if getattr(self, name):
                message[name] = getattr(self, name)
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        return message


class _Tool(Ignoring):
    type: Literal["function"]
    function: Function


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False
    include_obfuscation: bool = False


class _Completion(Body):
    messages: list[_Message]
    tools: list[_Tool] | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stream_options: _StreamOptions | None = None


_NEUTRAL: Neutral = {
    "n": (1, None),
    "tool_choice": ("auto", None),
    "parallel_tool_calls": (True, None),
    "response_format": ({"type": "text"}, None),
    "logprobs": (False, None),
    "top_logprobs": (None, 0),
    "frequency_penalty": (0, None),
    "presence_penalty": (0, None),
    "logit_bias": ({}, None),
    "stop": (None, []),
    "seed": (None,),
    "modalities": (["text"], None),
    "user": None,
    "metadata": None,
    "store": None,
    "service_tier": None,
    "prompt_cache_key": None,
    "safety_identifier": None,
}


def parse(body: Any, sampling: SamplingParams, on_other_sampling: Sampling = "refuse") -> tuple[ChatRequest, list[str]]:
    parsed, ignored = checked(_Completion, body, _NEUTRAL, sampling, on_other_sampling)
    request = ChatRequest(
        tuple(message.plain() for message in parsed.messages),
        tuple(tool.function.model_dump() for tool in parsed.tools or ()),
        parsed.max_completion_tokens or parsed.max_tokens,
        bool(parsed.stream),
        parsed.stream_options is not None and parsed.stream_options.include_usage,
        parsed.model or MODEL,
    )
    return request, ignored


def answer_body(answer: ChatAnswer, turn: int, request: ChatRequest) -> dict[str, Any]:
    choice = {"index": 0, "message": answer.message(turn), "finish_reason": _finish_reason(answer), "logprobs": None}
    return _envelope("chat.completion", turn, request.model) | {"choices": [choice], "usage": _usage(answer)}


def answer_events(answer: ChatAnswer, turn: int, request: ChatRequest) -> Iterator[bytes]:
    message = answer.message(turn)
    calls = [call | {"index": index} for index, call in enumerate(message.pop("tool_calls", ()))]
    delta = message | ({"tool_calls": calls} if calls else {})
    chunk = _envelope("chat.completion.chunk", turn, request.model)
    usage = {"usage": None} if request.with_usage else {}
    for content, reason in ((delta, None), ({}, _finish_reason(answer))):
        yield event(chunk | {"choices": [{"index": 0, "delta": content, "finish_reason": reason}]} | usage)
    if request.with_usage:
        yield event(chunk | {"choices": [], "usage": _usage(answer)})
    yield b"data: [DONE]\n\n"


def error_body(message: str, kind: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def _envelope(kind: str, turn: int, model: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{turn}", "object": kind, "created": int(time.time()), "model": model}


def _usage(answer: ChatAnswer) -> dict[str, Any]:
    return {
        "prompt_tokens": answer.num_prompt_tokens,
        "completion_tokens": answer.num_tokens,
        "total_tokens": answer.num_prompt_tokens + answer.num_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.num_cached_tokens},
    }


def _finish_reason(answer: ChatAnswer) -> str:
    if answer.finish_reason != "stop":
        return "length"
    return "tool_calls" if answer.calls else "stop"
