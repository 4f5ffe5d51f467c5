"""What the endpoint's APIs have in common: requests and answers in one form, and what of a body is refused.

Every API is a module with the functions of `APIFormat`. It makes requests into messages of Chat Completions, in which
conversations are compared and chat templates are given them, and answers into its own form.

Fields that change nothing at the value they have are taken. Any other one is refused by its name: an agent that
believes it was sampled at another temperature, or that an image was read, is a wrong experiment.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megatron_dapo.data.template import Messages
from megatron_dapo.engines.endpoint.tree import RequestError
from megatron_dapo.types import FinishReason, SamplingParams

# "refuse": a request for another temperature or top_p than the run's is an error. "ignore": it gets the run's.
Sampling = Literal["refuse", "ignore"]
Neutral = Mapping[str, tuple[Any, ...] | None]  # fields that change nothing at these values; None: at any value


MODEL = "policy"


@dataclass(frozen=True)
class ChatRequest:
    """What a request asks for, whatever API it came by."""

    messages: Messages  # content as text; arguments of calls as JSON text
    tools: tuple[Mapping[str, Any], ...] = ()  # {"name", "description", "parameters"}
    max_tokens: int | None = None  # None: what is left of the episode
    is_streamed: bool = False
    with_usage: bool = False  # a stream of Chat Completions ends with its usage
    model: str = MODEL  # the client's name for it
    num_instructions: int = 0  # first messages, which a request that follows this one does not inherit
    follows: str | None = None  # id of the response whose conversation comes before the messages


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
        return assistant(self.content or (None if self.calls else ""), self.reasoning, self.numbered_calls(turn))

    def numbered_calls(self, turn: int) -> list[tuple[str, str, str]]:
        """Return id, name and arguments (JSON text) of each call."""
        return [(f"call_{turn}_{index}", name, arguments) for index, (name, arguments) in enumerate(self.calls)]


def assistant(content: str | None, reasoning: str, calls: list[tuple[str, str, str]]) -> dict[str, Any]:
    """Return an assistant's message, whose calls have an id, a name and arguments (JSON text)."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for call_id, name, arguments in calls
        ]
    return message


class APIFormat(Protocol):
    """An API: a module with these functions."""

    def parse(
        self, body: Any, sampling: SamplingParams, on_other_sampling: Sampling = "refuse"
    ) -> tuple[ChatRequest, list[str]]:
        """Return a request, and the fields of it that are ignored because the run samples otherwise.

        `sampling` is the run's. RequestError in one line that names the field.
        """

    def answer_body(self, answer: ChatAnswer, turn: int, request: ChatRequest) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""

    def answer_events(self, answer: ChatAnswer, turn: int, request: ChatRequest) -> Iterator[bytes]:
        """Yield the server-sent events of a streamed response: a turn is served whole, once it has been sampled."""

    def error_body(self, message: str, kind: str) -> dict[str, Any]:
        """Return the body of an error as the API's clients read it."""


# ---- bodies


class Ignoring(BaseModel):
    """A part of a body; a field that it does not have is ignored."""

    model_config = ConfigDict(extra="ignore")


class Body(BaseModel):
    """A body; `checked` refuses fields that it does not have."""

    model_config = ConfigDict(extra="allow")
    model: str | None = None  # there is one
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None


class Function(Ignoring):
    """A tool."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})


SomeBody = TypeVar("SomeBody", bound=Body)


def checked(
    form: type[SomeBody], body: Any, neutral: Neutral, sampling: SamplingParams, on_other_sampling: Sampling
) -> tuple[SomeBody, list[str]]:
    """Return a body in its form, and the fields of it that are ignored because the run samples otherwise."""
    try:
        parsed = form.model_validate(body)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False, include_context=False)
        # Pydantic reports each member of a union, such as a text or a list of parts: the longest place is the closest. It names
        # the member's type, too.
        deepest = max(problems, key=lambda problem: len(problem["loc"]))
        place = ".".join(str(part) for part in deepest["loc"] if "[" not in str(part)) or "the body"
        raise RequestError(f"{place}: {deepest['msg']}") from None
    ignored = []
    for name in ("temperature", "top_p"):
        wanted, is_now = getattr(parsed, name), getattr(sampling, name)
        if wanted is not None and wanted != is_now:
            ignored.append(f"{name} = {wanted:g}, but the run samples its policy at {is_now:g}, and trains that")
    for name, value in (parsed.model_extra or {}).items():
        if name not in neutral:
            raise RequestError(f"{name} is not a field that this endpoint knows; leave it out")
        values = neutral[name]
        if values is None or value in values:
            continue
        if name == "seed":
            ignored.append("seed: the run gives each episode its own")
            continue
        raise RequestError(f"{name} = {json.dumps(value)} is not supported; leave it out")
    if ignored and on_other_sampling == "refuse":
        raise RequestError(f'{ignored[0]}; leave it out, or set environment.other_sampling = "ignore"')
    return parsed, ignored


def event(body: Mapping[str, Any], name: str = "") -> bytes:
    """Return a server-sent event."""
    data = b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"
    return f"event: {name}\n".encode() + data if name else data
