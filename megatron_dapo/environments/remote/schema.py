"""JSON schemas of tools, from a function's annotations and docstring, in the form of `transformers.utils.get_json_schema`."""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union

_TYPES: Mapping[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
}
_ENTRY = re.compile(r"^\s*(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")
_SECTION = re.compile(r"^\s*(Args|Arguments|Parameters|Returns|Raises|Example|Examples):\s*$")


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return {"name", "description", "parameters"}. ValueError in one line if a type or the docstring is missing."""
    place = f"tool {getattr(function, '__name__', function)!r}"
    description, entries = _described(inspect.getdoc(function) or "")
    if not description:
        raise ValueError(f"{place} has no docstring, from which the model learns what it does")
    try:
        hints = typing.get_type_hints(function)
    except Exception as error:  # a name in an annotation that does not exist
        raise ValueError(f"{place}: its annotations cannot be read ({type(error).__name__}: {error})") from error
    properties, required = {}, []
    for name, parameter in inspect.signature(function).parameters.items():
        if name == "self":
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ValueError(f"{place}: parameter {parameter} cannot be passed by its name")
        if name not in hints:
            raise ValueError(f'{place}: parameter {name!r} has no type; write for example "{name}: str"')
        properties[name] = _schema_of_type(hints[name], f"{place}: parameter {name!r}")
        if name in entries:
            properties[name]["description"] = entries[name]
        if parameter.default is parameter.empty:
            required.append(name)
    parameters = {"type": "object", "properties": properties} | ({"required": required} if required else {})
    return {"name": function.__name__, "description": description, "parameters": parameters}


def _described(docstring: str) -> tuple[str, dict[str, str]]:
    """Split a docstring in Google's style into its description and its parameters'."""
    description, entries, section, name = [], {}, "", ""
    for line in docstring.splitlines():
        if match := _SECTION.match(line):
            section, name = match[1], ""
        elif not section:
            description.append(line)
        elif section in ("Args", "Arguments", "Parameters"):
            if match := _ENTRY.match(line):
                name = match[1]
                entries[name] = match[2].strip()
            elif name and line.strip():
                entries[name] += f" {line.strip()}"
    return "\n".join(description).strip(), entries


def _schema_of_type(hint: Any, place: str) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return {}
    if hint in _TYPES:
        return {"type": _TYPES[hint]}
    if origin is Literal:
        kinds = sorted({_TYPES.get(type(value), "") for value in arguments})
        if "" in kinds:
            raise ValueError(f"{place}: {hint} has values that are not JSON")
        return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": list(arguments)}
    if origin is list:
        return {"type": "array", "items": _schema_of_type(arguments[0], place)}
    if origin is dict:
        if arguments[0] is not str:
            raise ValueError(f"{place}: the keys of {hint} must be strings")
        return {"type": "object", "additionalProperties": _schema_of_type(arguments[1], place)}
    if origin in (Union, getattr(types, "UnionType", Union)):
        return _schema_of_union(arguments, place)
    raise ValueError(f"{place}: {hint} is no type of JSON; use str, int, float, bool, list, dict, Literal or Optional")


def _schema_of_union(arguments: tuple[Any, ...], place: str) -> dict[str, Any]:
    options = [_schema_of_type(option, place) for option in arguments if option is not type(None)]
    if len(options) == 1:
        schema = options[0]
    elif all(set(option) == {"type"} for option in options):
        schema = {"type": sorted(option["type"] for option in options)}
    else:
        schema = {"anyOf": options}
    return {**schema, "nullable": True} if type(None) in arguments else schema
