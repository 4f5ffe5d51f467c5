"""OpenAI's Responses; see `APIFormat`. With `previous_response_id`, `input` is only what is new."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from megatron_dapo.engines.endpoint import chat
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


class _Part(Ignoring):
    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str


class _Message(Ignoring):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[_Part]


class _Reasoning(Ignoring):
    type: Literal["reasoning"]
    content: list[_Part] | None = None


class _Call(Ignoring):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class _CallOutput(Ignoring):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[_Part]


_Item = _Message | _Reasoning | _Call | _CallOutput
_TaggedItem = Annotated[
    Annotated[_Message, Tag("message")]
    | Annotated[_Reasoning, Tag("reasoning")]
    | Annotated[_Call, Tag("function_call")]
    | Annotated[_CallOutput, Tag("function_call_output")],
    Discriminator(lambda item: item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)),
]
error_body = chat.error_body


class _Tool(Function):
    type: Literal["function"]


class _Request(Body):
    input: str | list[_TaggedItem]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[_Tool] | None = None
    max_output_tokens: int | None = Field(None, ge=1)


_NEUTRAL: Neutral = {
    "tool_choice": ("auto", None),
    "parallel_tool_calls": (True, None),
    "text": ({"format": {"type": "text"}}, {}, None),
    "reasoning": ({}, {"effort": None}, {"effort": None, "summary": None}, None),
    "include": ([], ["reasoning.encrypted_content"], None),  # thoughts are not encrypted, and come as they are
    "truncation": ("disabled", None),
    "background": (False, None),
    "top_logprobs": (0, None),
    "max_tool_calls": (None,),
    "conversation": (None,),
    "prompt": (None,),
    "stream_options": ({}, {"include_obfuscation": False}, None),
    "user": None,
    "metadata": None,
    "store": None,
    "service_tier": None,
    "prompt_cache_key": None,
    "prompt_cache_retention": None,
    "safety_identifier": None,
}


def parse(body: Any, sampling: SamplingParams, on_other_sampling: Sampling = "refuse") -> tuple[ChatRequest, list[str]]:
    parsed, ignored = checked(_Request, body, _NEUTRAL, sampling, on_other_sampling)
    system = [{"role": "system", "content": parsed.instructions}] if parsed.instructions else []
    said = [{"role": "user", "content": parsed.input}] if isinstance(parsed.input, str) else _messages(parsed.input)
    request = ChatRequest(
        (*system, *said),
        tuple(tool.model_dump(exclude={"type"}) for tool in parsed.tools or ()),
        parsed.max_output_tokens,
        bool(parsed.stream),
        model=parsed.model or MODEL,
        num_instructions=len(system),
        follows=parsed.previous_response_id,
    )
    return request, ignored


def _messages(items: Iterable[_Item]) -> Iterator[dict[str, Any]]:
    """Yield messages of Chat Completions: the items of an answer, its thoughts, text and calls, are one there."""
    thoughts: list[str] = []
    text: str | None = None
    calls: list[tuple[str, str, str]] = []

    def answer() -> Iterator[dict[str, Any]]:
        nonlocal text
        if thoughts or text is not None or calls:
            yield assistant(text or "", "\n".join(thoughts), list(calls))
        thoughts.clear()
        calls.clear()
        text = None

    for item in items:
        if isinstance(item, _Reasoning):
            if text is not None or calls:
                yield from answer()
            thoughts += [part.text for part in item.content or ()]
        elif isinstance(item, _Call):
            calls.append((item.call_id, item.name, item.arguments))
        elif isinstance(item, _Message) and item.role == "assistant":
            if text is not None or calls:
                yield from answer()
            text = _text(item.content)
        else:
            yield from answer()
            if isinstance(item, _CallOutput):
                yield {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
            else:
                yield {"role": "system" if item.role == "developer" else item.role, "content": _text(item.content)}
    yield from answer()


def _text(content: str | list[_Part]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def answer_body(answer: ChatAnswer, turn: int, request: ChatRequest) -> dict[str, Any]:
    is_cut = answer.finish_reason != "stop"
    return _response(turn, request) | {
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": _items(answer, turn),
        "usage": {
            "input_tokens": answer.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": answer.num_cached_tokens},
            "output_tokens": answer.num_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.num_prompt_tokens + answer.num_tokens,
        },
    }


def answer_events(answer: ChatAnswer, turn: int, request: ChatRequest) -> Iterator[bytes]:
    for number, (name, fields) in enumerate(_events(answer, turn, request)):
        yield event({"type": name, "sequence_number": number, **fields}, name)


def _events(answer: ChatAnswer, turn: int, request: ChatRequest) -> Iterator[tuple[str, dict[str, Any]]]:
    body = answer_body(answer, turn, request)
    yield "response.created", {"response": _response(turn, request)}
    yield "response.in_progress", {"response": _response(turn, request)}
    for index, item in enumerate(body["output"]):
        place = {"item_id": item["id"], "output_index": index}
        is_call = item["type"] == "function_call"
        empty: dict[str, Any] = {"arguments": ""} if is_call else {"content": []}
        begun = item | {"status": "in_progress"} | empty
        yield "response.output_item.added", {"output_index": index, "item": begun}
        if is_call:
            yield "response.function_call_arguments.delta", place | {"delta": item["arguments"]}
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield "response.function_call_arguments.done", place | done
        else:
            yield from _part_events(place | {"content_index": 0}, item["content"][0])
        yield "response.output_item.done", {"output_index": index, "item": item}
    yield f"response.{body['status']}", {"response": body}


def _part_events(place: dict[str, Any], part: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    kind = f"response.{part['type']}"
    yield "response.content_part.added", place | {"part": part | {"text": ""}}
    yield f"{kind}.delta", place | {"delta": part["text"], "logprobs": []}
    yield f"{kind}.done", place | {"text": part["text"], "logprobs": []}
    yield "response.content_part.done", place | {"part": part}


def response_id(turn: int) -> str:
    """Return what `previous_response_id` calls the answer of a turn."""
    return f"resp_{turn}"


def _response(turn: int, request: ChatRequest) -> dict[str, Any]:
    return {
        "id": response_id(turn),
        "previous_response_id": request.follows,
        "object": "response",
        "created_at": int(time.time()),
        "model": request.model,
        "status": "in_progress",
        "output": [],
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [{"type": "function", "strict": False, **tool} for tool in request.tools],
        "max_output_tokens": request.max_tokens,
        "usage": None,
    }


def _items(answer: ChatAnswer, turn: int) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if answer.reasoning:
        thought = {"type": "reasoning_text", "text": answer.reasoning}
        items.append({"type": "reasoning", "id": f"rs_{turn}", "summary": [], "content": [thought]})
    if answer.content or not answer.calls:
        text = {"type": "output_text", "text": answer.content, "annotations": []}
        items.append({"type": "message", "id": f"msg_{turn}", "role": "assistant", "content": [text]})
    items += [
        {"type": "function_call", "id": f"fc_{call_id}", "call_id": call_id, "name": name, "arguments": arguments}
        for call_id, name, arguments in answer.numbered_calls(turn)
    ]
    return [item | {"status": "completed"} for item in items]
