"""Tool calls in a sampled turn: from its ids to validated arguments, or to a failure that the model is told.

    ids -> text -> reasoning | content | calls, each with a status and, if it was not accepted, a message for the model

A parser reads a turn that ended at a stop token; a turn that was cut has no calls, so that half of one is never run.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Union

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from megatron_dapo.data.turns import PROBE, TEMPLATE_ERRORS, TurnTemplate
from megatron_dapo.types import CallStatus, FinishReason
from megatron_dapo.untrusted import one_line

_LONGEST_NAME = 64  # characters of a name or a reason that the model is shown again


# ---- tools


@dataclass(frozen=True)
class Tool:
    """A tool as the model sees it: a JSON schema of the form {"name", "description", "parameters"}."""

    schema: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(self.schema["name"])

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        return tuple(self.schema.get("parameters", {}).get("properties", ()))

    @cached_property
    def required(self) -> tuple[str, ...]:
        return tuple(self.schema.get("parameters", {}).get("required", ()))

    @cached_property
    def _arguments(self) -> type[BaseModel]:
        return _model_of(self.name, self.schema.get("parameters", {}))

    def validate(self, arguments: Any) -> dict[str, Any]:
        """Return the arguments with the schema's types. ValueError in one line that names each wrong one.

        A number or a boolean in quotes is taken as what it says.
        """
        try:
            parsed = self._arguments.model_validate(arguments)
        except ValidationError as error:
            raise ValueError("; ".join(_problems(error))) from None
        return parsed.model_dump(by_alias=True, exclude_unset=True)


def _problems(error: ValidationError) -> Iterator[str]:
    for problem in error.errors(include_url=False, include_input=False, include_context=False)[:3]:
        place = ".".join(str(part) for part in problem["loc"]) or "arguments"
        yield f"{one_line(place, _LONGEST_NAME)}: {problem['msg']}"


_TYPES: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "object": dict[str, Any],
    "array": list[Any],
    "null": None,
}
_CONFIG = ConfigDict(extra="forbid", allow_inf_nan=False, protected_namespaces=())


def _model_of(name: str, schema: Mapping[str, Any]) -> type[BaseModel]:
    """Return a pydantic model of an object's schema. ValueError for a type that JSON does not have."""
    required = schema.get("required", ())
    fields: dict[str, Any] = {
        # Parameters may have names that a model does not allow, such as "schema" or "_x".
        f"field{index}": (_type_of(part), Field(... if parameter in required else None, alias=parameter))
        for index, (parameter, part) in enumerate(schema.get("properties", {}).items())
    }
    return create_model(name, __config__=_CONFIG, **fields)


def _type_of(schema: Mapping[str, Any]) -> Any:
    if "enum" in schema:
        annotation: Any = Literal[tuple(schema["enum"])]
    elif "anyOf" in schema:
        annotation = Union[tuple(_type_of(part) for part in schema["anyOf"])]  # noqa: UP007
    elif isinstance(kind := schema.get("type"), list):
        annotation = Union[tuple(_type_of({**schema, "type": each}) for each in kind)]  # noqa: UP007
    elif kind == "object" and schema.get("properties"):
        annotation = _model_of("object", schema)
    elif kind == "object" and isinstance(schema.get("additionalProperties"), Mapping):
        annotation = dict[str, _type_of(schema["additionalProperties"])]  # type: ignore[misc]
    elif kind == "array" and schema.get("items"):
        annotation = list[_type_of(schema["items"])]  # type: ignore[misc]
    elif kind is None:
        annotation = Any
    elif kind in _TYPES:
        annotation = _TYPES[kind]
    else:
        raise ValueError(f"{kind!r} is no type of a JSON schema: {', '.join(_TYPES)} are")
    return Union[annotation, None] if schema.get("nullable") else annotation  # noqa: UP007


# ---- calls


@dataclass(frozen=True)
class ToolCall:
    """A call that a turn makes. Only one with status "ok" is run; of any other, `message` is what the model is told."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    status: CallStatus = "ok"
    message: str = ""

    def failed(self, status: CallStatus, reason: str) -> ToolCall:
        """Return this call as one that failed, with the message for the model."""
        return ToolCall(self.name, self.arguments, status, _MESSAGES[status].format(name=self.name, reason=reason))


_MESSAGES: dict[CallStatus, str] = {  # failures of a running call are in environments/remote/api.py
    "unparsable": "Error: this is no tool call: {reason}.",
    "unknown_tool": "Error: there is no tool {name!r}. {reason}.",
    "bad_arguments": "Error: {name} was not called, its arguments are wrong: {reason}.",
    "refused": "Error: {name} was not called: {reason}.",
}


@dataclass(frozen=True)
class ParsedTurn:
    """A sampled turn for people, environments and the template; its ids stay as they are."""

    content: str  # text only: no reasoning, calls or stop token
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    is_cut: bool = False  # not ended by a stop token: it makes no calls
    text: str = ""  # all of it but the stop token


class TurnParser:
    """Parser of the turns of a model that is shown `tools`."""

    def __init__(self, name: str, turns: TurnTemplate, tools: Sequence[Tool] = ()) -> None:
        """`name`: a key of `PARSERS`, or "auto": the one that reads the calls that the chat template writes, else "none"."""
        if name != "auto" and name not in PARSERS:
            raise ValueError(f"turns.parser {name!r} is not one of auto, {', '.join(PARSERS)}")
        self._tokenizer, self._stops = turns.template.tokenizer, frozenset(turns.stop_token_ids)
        self._prompt = "" if turns.template.name == "plain" else turns.template.text(PROBE)
        self._prompt_opens_thought = self._prompt.rstrip().endswith("<think>")
        self.tools = {tool.name: tool for tool in tools}
        if len(self.tools) < len(tools):
            raise ValueError(f"two tools have the same name: {', '.join(tool.name for tool in tools)}")
        self.name = self._fitting(turns) if name == "auto" else name
        self._split = PARSERS[self.name]

    def parse(self, token_ids: Sequence[int], finish_reason: FinishReason) -> ParsedTurn:
        """Return what a turn says. `token_ids` are the sampled ones, including the stop token."""
        ids = [int(token) for token in token_ids]
        if ids and ids[-1] in self._stops:
            ids.pop()
        text = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        whole = text
        reasoning, text = self._without_thought(whole)
        content, raw_calls = self._split(text, self.tools)
        if finish_reason != "stop":
            reason = "the answer was cut before its end"
            calls = [ToolCall("").failed("unparsable", reason)] if raw_calls else []
            return ParsedTurn(text, reasoning, tuple(calls), is_cut=True, text=whole)
        return ParsedTurn(content, reasoning, tuple(self._accepted(*call) for call in raw_calls), text=whole)

    def _without_thought(self, text: str) -> tuple[str, str]:
        """Return the thinking at the begin of a turn, in which calls are not made, and the rest."""
        start = text.lstrip()
        if not self._prompt_opens_thought and not start.startswith("<think>"):
            return "", text
        thought, _, rest = start.removeprefix("<think>").partition("</think>")
        return thought.strip(), rest

    def _accepted(self, name: str, arguments: Any, problem: str) -> ToolCall:
        call = ToolCall(one_line(name, _LONGEST_NAME))
        if problem:
            return call.failed("unparsable", problem)
        tool = self.tools.get(name)
        if tool is None:
            known = f"The tools are {', '.join(self.tools)}" if self.tools else "There are no tools"
            return call.failed("unknown_tool", known)
        try:
            return ToolCall(name, tool.validate(arguments))
        except ValueError as error:
            return call.failed("bad_arguments", one_line(error, 300))

    def _fitting(self, turns: TurnTemplate) -> str:
        """Return the parser that reads back a call as the chat template renders it; "none" if none does."""
        if not self.tools or turns.template.name == "plain":
            return "none"
        arguments = {"value": 1}
        call = {"type": "function", "id": "call00001", "function": {"name": "zqToolqz", "arguments": arguments}}
        try:
            text = turns.template.text([*PROBE, {"role": "assistant", "content": "", "tool_calls": [call]}], False)
        except TEMPLATE_ERRORS:
            return "none"
        turn = text[
            len(os.path.commonprefix([self._prompt, text])) :
        ]  # the prompt describes the format, which is no call
        fits = (name for name, split in PARSERS.items() if split(turn, self.tools)[1] == [("zqToolqz", arguments, "")])
        return next(fits, "none")


# ---- parsers: text -> the text besides the calls, and each call's name, arguments and, if it is none, the problem

_RawCall = tuple[str, Any, str]
_HERMES = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)


def _hermes(text: str, tools: Mapping[str, Tool]) -> tuple[str, list[_RawCall]]:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of them."""
    return _HERMES.sub("", text).strip(), [_hermes_call(*match.groups()) for match in _HERMES.finditer(text)]


def _hermes_call(body: str, end: str) -> _RawCall:
    if not end:
        return "", None, "</tool_call> is missing"
    try:
        call = json.loads(body, parse_constant=_no_constant)
        body.encode()  # half of a surrogate pair, which no text has
        json.dumps(call, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        return "", None, one_line(f"not JSON: {error}", 200)
    if not isinstance(call, dict) or set(call) != {"name", "arguments"} or not isinstance(call["name"], str):
        return "", None, 'it must be {"name": ..., "arguments": {...}}'
    return call["name"], call["arguments"], ""


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _line(text: str, tools: Mapping[str, Tool]) -> tuple[str, list[_RawCall]]:
    """`name: argument` in a line: a JSON object of arguments, or the text of the one that the tool needs."""
    names = "|".join(re.escape(name) for name in tools)
    pattern = re.compile(rf"^[ \t]*({names}):[ \t]*(.*?)[ \t]*$", re.MULTILINE) if tools else re.compile(r"(?!)")
    return pattern.sub("", text).strip(), [_line_call(tools[match[1]], match[2]) for match in pattern.finditer(text)]


def _line_call(tool: Tool, argument: str) -> _RawCall:
    if not argument:
        return tool.name, {}, ""
    if len(tool.parameters) == 1 or (len(tool.required) == 1 and not argument.startswith("{")):
        return tool.name, {(tool.required or tool.parameters)[0]: argument}, ""
    try:
        return tool.name, json.loads(argument, parse_constant=_no_constant), ""
    except (ValueError, RecursionError) as error:
        return tool.name, None, one_line(f"not a JSON object of {', '.join(tool.required)}: {error}", 200)


def _none(text: str, tools: Mapping[str, Tool]) -> tuple[str, list[_RawCall]]:
    return text, []


PARSERS: dict[str, Callable[[str, Mapping[str, Tool]], tuple[str, list[_RawCall]]]] = {
    "hermes": _hermes,
    "line": _line,
    "none": _none,
}
