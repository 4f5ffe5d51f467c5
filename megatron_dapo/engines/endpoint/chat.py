"""OpenAI's Chat Completions as requests and answers of a conversation.

Fields that change nothing at the value they have are taken. Any other one is refused by its name: an agent that believes
it was sampled at another temperature, or that an image was read, is a wrong experiment.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megatron_dapo.data.template import Messages
from megatron_dapo.engines.endpoint.tree import RequestError
from megatron_dapo.types import FinishReason, SamplingParams

Sampling = Literal["refuse", "ignore"]  # what happens to a request for other sampling than the run's


@dataclass(frozen=True)
class ChatRequest:
    """What a request asks for, whatever API it came by."""

    messages: Messages  # content as text; arguments of calls as JSON text
    tools: tuple[Mapping[str, Any], ...] = ()  # {"name", "description", "parameters"}
    max_tokens: int | None = None  # None: what is left of the episode
    is_streamed: bool = False
    with_usage: bool = False  # a stream ends with its usage
    model: str = ""


@dataclass(frozen=True)
class ChatAnswer:
    """A sampled turn as a client is given it."""

    content: str
    finish_reason: FinishReason
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()  # name and arguments (JSON text) of each
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    num_cached_tokens: int = 0

    def message(self, turn: int) -> dict[str, Any]:
        """Return the assistant's message; `turn` numbers its calls within the episode."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content or (None if self.calls else "")}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {"id": f"call_{turn}_{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
                for index, (name, arguments) in enumerate(self.calls)
            ]
        return message


# ---- request


class _Ignoring(BaseModel):
    model_config = ConfigDict(extra="ignore")


class _Part(_Ignoring):
    type: Literal["text"]
    text: str


class _Function(_Ignoring):
    name: str
    arguments: str


class _Call(_Ignoring):
    id: str = ""
    type: Literal["function"] = "function"
    function: _Function


class _Message(_Ignoring):
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


class _ToolFunction(_Ignoring):
    name: str
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})


class _Tool(_Ignoring):
    type: Literal["function"]
    function: _ToolFunction


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False
    include_obfuscation: bool = False


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow")
    model: str
    messages: list[_Message]
    tools: list[_Tool] | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None


# Fields that change nothing, with the values at which they do not; None: at any value.
_NEUTRAL: Mapping[str, tuple[Any, ...] | None] = {
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
    """Return a request, and the fields of it that are ignored because the run samples otherwise.

    `sampling` is the run's. RequestError in one line that names the field.
    """
    try:
        parsed = _Body.model_validate(body)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = ".".join(str(part) for part in problem["loc"]) or "the body"
        raise RequestError(f"{place}: {problem['msg']}") from None
    ignored = list(_other_sampling(parsed, sampling))
    for name, value in (parsed.model_extra or {}).items():
        if name not in _NEUTRAL:
            raise RequestError(f"{name} is not a field that this endpoint knows; leave it out")
        neutral = _NEUTRAL[name]
        if neutral is None or value in neutral:
            continue
        if name == "seed":
            ignored.append("seed: the run gives each episode its own")
            continue
        raise RequestError(f"{name} = {json.dumps(value)} is not supported; leave it out")
    if ignored and on_other_sampling == "refuse":
        raise RequestError(f"{ignored[0]}; leave it out, or set endpoint.sampling = \"ignore\"")
    request = ChatRequest(
        tuple(message.plain() for message in parsed.messages),
        tuple(tool.function.model_dump() for tool in parsed.tools or ()),
        parsed.max_completion_tokens or parsed.max_tokens,
        bool(parsed.stream),
        parsed.stream_options is not None and parsed.stream_options.include_usage,
        parsed.model,
    )
    return request, ignored


def _other_sampling(body: _Body, sampling: SamplingParams) -> Iterator[str]:
    for name in ("temperature", "top_p"):
        wanted, is_now = getattr(body, name), getattr(sampling, name)
        if wanted is not None and wanted != is_now:
            yield f"{name} = {wanted:g}, but the run samples its policy at {is_now:g}, which is what it trains"


# ---- answer


def answer_body(answer: ChatAnswer, turn: int, model: str) -> dict[str, Any]:
    """Return the body of a response that is not streamed."""
    choice = {"index": 0, "message": answer.message(turn), "finish_reason": _finish_reason(answer), "logprobs": None}
    return _envelope("chat.completion", turn, model) | {"choices": [choice], "usage": _usage(answer)}


def answer_events(answer: ChatAnswer, turn: int, request: ChatRequest) -> Iterator[bytes]:
    """Yield the server-sent events of a streamed response: a turn is served whole, in one delta, once it has been sampled."""
    message = answer.message(turn)
    calls = [call | {"index": index} for index, call in enumerate(message.pop("tool_calls", ()))]
    delta = message | ({"tool_calls": calls} if calls else {})
    chunk = _envelope("chat.completion.chunk", turn, request.model)
    usage = {"usage": None} if request.with_usage else {}
    for content, reason in ((delta, None), ({}, _finish_reason(answer))):
        yield _event(chunk | {"choices": [{"index": 0, "delta": content, "finish_reason": reason}]} | usage)
    if request.with_usage:
        yield _event(chunk | {"choices": [], "usage": _usage(answer)})
    yield b"data: [DONE]\n\n"


def error_body(message: str, kind: str, code: str | None = None) -> dict[str, Any]:
    """Return the body of an error as OpenAI's clients read it."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


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


def _event(body: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"
