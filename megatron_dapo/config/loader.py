"""Loads recipe files and --set overrides into one Config and records the origin of every value.

A recipe is a TOML file. With `base = "other.toml"` (relative to the file) it inherits everything from another recipe
and holds only what differs. Precedence: schema defaults < base < recipe < --set. Lists are replaced, never merged.
"""

from __future__ import annotations

import difflib
import functools
import json
import os
import re
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from glob import glob
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from megatron_dapo.config.data_schema import TASK_PREFIX
from megatron_dapo.config.foreign_names import VALUES, counterpart
from megatron_dapo.config.megatron_options import SECTIONS, problem_with
from megatron_dapo.config.rules import ConfigError, UnusableInput, Violation, value_of
from megatron_dapo.config.schema import Config, leaf_fields, section_types, union_names
from megatron_dapo.config.section import FunctionOfRecipe, RelativeToRecipe, Section, WordOfCommand, is_function_path
from megatron_dapo.hooks import FAMILY
from megatron_dapo.models.families import add_family

if sys.version_info >= (3, 11):  # tomllib is in the standard library from here on
    import tomllib
else:
    import tomli as tomllib

DEFAULT_ORIGIN = "default"
SET_ORIGIN = "--set"
VERSION = 1  # format of a run directory's config.json

@dataclass(frozen=True)
class LoadedConfig:
    """A checked configuration and the origin of each of its values."""

    config: Config
    origins: Mapping[str, str]  # dotted path -> "default", the recipe file's path, or "--set"


@dataclass(frozen=True)
class _Value:
    """A value before type checks, with its origin and the directory that relative paths start from."""

    value: Any
    origin: str
    directory: Path


def load_config(recipe: str | Path, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Read a recipe, apply "a.b=value" overrides and check names and types (not yet ranges and relations: `validate`).

    Raises ConfigError with every unknown key, wrong type and unreadable value at once.
    """
    values = _layered(recipe_values(Path(recipe)), _override_values(overrides))
    return _build(values, source=str(recipe))


def config_from_dict(tree: Mapping[str, Any], directory: str | Path = ".") -> Config:
    """A Config from nested plain values (lists for tuples, strings for paths), e.g. in tests. Relative inputs are from
    `directory`."""
    return _build(_flatten(tree, origin="dict", directory=Path(directory)), source="configuration").config


def overrides_of(tree: Mapping[str, Any], directory: str | Path = ".") -> tuple[str, ...]:
    """Return nested plain values as overrides "a.b=value"; relative inputs are from `directory`. Unknown keys are left
    to `load_config`, which names them."""
    flat = _flatten(tree, origin="", directory=Path(directory))
    values = {
        path: _absolute_inputs(path, value) if path in leaf_fields() else value.value for path, value in flat.items()
    }
    return tuple(f"{path}={toml_value(value)}" for path, value in values.items())


def toml_value(value: Any) -> str:
    """Return a value as TOML in one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(name)} = {toml_value(part)}" for name, part in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return json.dumps(value, default=_refuse)  # JSON writes scalars as TOML does


def write_resolved(loaded: LoadedConfig, path: str | Path) -> None:
    """Write every value with its origin as JSON; `read_resolved` gives back an equal LoadedConfig."""
    document = {"version": VERSION, "config": loaded.config.model_dump(mode="json"), "origins": dict(loaded.origins)}
    target = Path(path)
    # Replaced atomically: a reader never sees half a file, and a crash leaves the old one.
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".tmp")
    partial.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, target)


def read_resolved(path: str | Path) -> LoadedConfig:
    """Return the configuration that a run directory holds. Raises ConfigError if it does not fit this version's schema."""
    document = json.loads(Path(path).read_text(encoding="utf-8"))
    if (version := document.get("version")) != VERSION:
        fix = "use the release that wrote it, or start the run in another directory"
        raise ConfigError([Violation("version", f"version {VERSION}", fix, {"version": version})], str(path))
    # Input paths became absolute when the recipe was read, so the directory does not matter.
    values = _flatten(document["config"], origin=str(path), directory=Path.cwd())
    built = _build(values, source=str(path))
    return LoadedConfig(config=built.config, origins=MappingProxyType(dict(document["origins"])))


def recipe_values(recipe: Path, chain: tuple[Path, ...] = ()) -> dict[str, _Value]:
    """Return the values of a recipe and of those that it is based on (`chain`: recipes based on it), not yet checked."""
    # Symbolic links may give one recipe two names, so loops are detected among real paths.
    resolved = recipe.resolve()
    if resolved in chain:
        loop = " -> ".join(str(path) for path in (*chain, resolved))
        problem = Violation("base", "recipes that do not inherit from themselves", f"break the loop {loop}")
        raise ConfigError([problem], str(recipe))
    tree = read_toml(recipe)
    # Flattened before merging, so that a child can change one key of a table while lists are replaced as a whole.
    base = tree.pop("base", None)
    own = _flatten(tree, origin=str(recipe), directory=recipe.parent)
    if base is None:
        return own
    if not isinstance(base, str) or _has_null(base):
        problem = Violation("base", "the path of one recipe", 'write base = "other.toml"', {"base": base})
        raise ConfigError([problem], str(recipe))
    if not (recipe.parent / base).is_file():
        raise ConfigError([_absent("base", recipe.parent / base, but=recipe.name)], str(recipe))
    return _layered(recipe_values(recipe.parent / base, (*chain, resolved)), own)


def _layered(lower: dict[str, _Value], upper: dict[str, _Value]) -> dict[str, _Value]:
    """Merge `upper` over `lower`. If `upper` gives a union another name, the values of `lower` in it are dropped: the
    bounds of one loss mean nothing to another."""
    for path in section_types():
        names, key = union_names(path), f"{path}.name"
        if names and key in upper and upper[key].value != (lower[key].value if key in lower else names[0]):
            lower = {other: value for other, value in lower.items() if not other.startswith(f"{path}.")}
    return {**lower, **upper}


def read_toml(recipe: Path) -> dict[str, Any]:
    """Read a TOML file. Raises ConfigError if it is missing or broken."""
    try:
        return tomllib.loads(recipe.read_text(encoding="utf-8"))
    except FileNotFoundError:
        problem = _absent("recipe", recipe)
    except IsADirectoryError:
        problem = Violation("recipe", "a recipe file", "name a .toml file", {"file": str(recipe)})
    except (ValueError, RecursionError) as error:
        problem = Violation("recipe", "valid TOML", f"correct it: {error}")
    raise ConfigError([problem], str(recipe))


def _absent(key: str, recipe: Path, but: str = "") -> Violation:
    """Return the violation for a recipe that is not there. `but`: a name that is not meant."""
    names = [path.name for path in recipe.parent.glob("*.toml") if path.name != but]
    near = difflib.get_close_matches(recipe.name, names, n=1)
    hint = f"did you mean {recipe.parent / near[0]}?" if near else "check the path"
    return Violation(key, "a recipe file that exists", hint, {"file": str(recipe)})


def _flatten(tree: Mapping[str, Any], origin: str, directory: Path, prefix: str = "") -> dict[str, _Value]:
    flat: dict[str, _Value] = {}
    for name, value in tree.items():
        path = prefix + name
        if isinstance(value, Mapping) and (path in section_types() or path in SECTIONS):
            flat.update(_flatten(value, origin, directory, f"{path}."))
        else:
            flat.update(_entries(path, _Value(value, origin, directory)))
    return flat


def _entries(path: str, value: _Value) -> dict[str, _Value]:
    """Return the fields that a value sets: loss = "gspo" is loss.name = "gspo", and loss.name = "my.py:loss" names a function."""
    if isinstance(value.value, str) and union_names(path):
        path = f"{path}.name"
    section, _, name = path.rpartition(".")
    is_function = name == "name" and isinstance(value.value, str) and ":" in value.value
    if is_function and f"{section}.function" in leaf_fields():
        return {path: replace(value, value="function"), f"{section}.function": value}
    return {path: value}


def _override_values(overrides: Sequence[str]) -> dict[str, _Value]:
    values: dict[str, _Value] = {}
    problems = []
    for override in overrides:
        path, separator, text = (part.strip() for part in override.partition("="))
        path = f"{path}.name" if union_names(path) else path
        try:
            if not separator or not path:
                rule = "an override as section.field=value, the value in TOML"
                problems.append(Violation(path or "--set", rule, f"rewrite --set {override!r}"))
            else:
                # Typed in a shell, so relative paths start from the current directory, not the recipe's.
                values.update(_entries(path, _Value(_parse_override(path, text), SET_ORIGIN, Path.cwd())))
        except ValueError:
            kind, example = _written(path)
            rewrite = f"write {example}" if example else f"rewrite --set {override!r} as section.field=value"
            problems.append(Violation(path, kind, rewrite, {path: text}))
    if problems:
        raise ConfigError(problems, SET_ORIGIN)
    return values


def _parse_override(path: str, text: str) -> Any:
    """Parse a value as TOML, except that a text field takes the bare word: this needs no double quoting in shells and
    guesses no types."""
    field = leaf_fields().get(path)
    if field is not None and text[:1] not in ("'", '"'):
        choices = typing.get_args(field.annotation) if typing.get_origin(field.annotation) is typing.Literal else ()
        is_choice = bool(choices) and all(isinstance(choice, str) for choice in choices)
        if is_choice or field.annotation in (str, Path) or text in _words(field):
            return text
    try:
        document = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        if field is None and text:
            return text  # the key is refused, not its value
        raise
    if set(document) != {"value"}:
        raise ValueError("one value, not several lines")
    return document["value"]


def _words(field: FieldInfo) -> tuple[str, ...]:
    """Return the words that a field accepts, e.g. "off" in addition to numbers; empty for a field that accepts none or
    any."""
    kinds = (field.annotation, *typing.get_args(field.annotation))
    choices = [
        choice for kind in kinds if typing.get_origin(kind) is typing.Literal for choice in typing.get_args(kind)
    ]
    return tuple(choice for choice in choices if isinstance(choice, str))


def _either(words: Sequence[str]) -> str:
    """a, b or c."""
    return " or ".join(part for part in (", ".join(words[:-1]), words[-1]) if part)


# A type in words, and an example of its values.
_KINDS = {
    int: ("a whole number", "8"),
    float: ("a number", "0.5"),
    bool: ("true or false", "true"),
    str: ("text", "name"),
    Path: ("a path", "name"),
}


def _written(path: str) -> tuple[str, str]:
    """Return the type of the field `path` in words, and how to set it on the command line; ("", "") for an unknown
    field."""
    field = leaf_fields().get(path)
    if field is None:
        return 'a value in TOML: 3, 1e-6, true, "text" or a list of these', ""
    items = typing.get_args(field.annotation)
    if typing.get_origin(field.annotation) is dict:
        return "a table", f"--set '{path}={{enable_thinking = false}}'"
    choices = union_names(path.removesuffix(".name")) or _words(field)
    if _table_of(field):
        return f"a list of tables [[{path}]]", f"--set '{path}=[{{...}}]'"
    if typing.get_origin(field.annotation) is tuple:
        numbers = items[0] in (int, float)
        value = "[0.9, 0.95]" if numbers else '["a.jsonl"]' if path.endswith("_paths") else '["a", "b"]'
        return f"a list of {'numbers' if numbers else 'texts'}", f"--set '{path}={value}'"
    kinds = [words for kind, words in _KINDS.items() if kind in (field.annotation, *items)]
    example = choices[0] if choices else kinds[0][1]
    return _either([*(words for words, _ in kinds), *map(repr, choices)]), f"--set {path}={example}"


def _build(values: Mapping[str, _Value], source: str) -> LoadedConfig:
    options = {path: value for path, value in values.items() if path.rpartition(".")[0] in SECTIONS}
    unknown = [path for path in values if path not in options and (path not in leaf_fields() or path in SECTIONS)]
    problems = [_unknown(path, values[path]) for path in unknown]
    for path, value in options.items():
        rule, fix = problem_with(path.rpartition(".")[2], value.value)
        if rule:
            problems.append(Violation(path, rule, f"{fix} (in {value.origin})", {path: value.value}))
    if with_null := [path for path, value in values.items() if _has_null(value.value)]:
        for path in with_null:
            fix = f"change it in {values[path].origin}"
            problems.append(Violation(path, "text without the character NUL", fix, {path: values[path].value}))
        raise ConfigError(problems, source)  # no path can be made of them
    # Unknown keys are kept from the schema's check, which would report each again without the nearest name.
    known = {path: value for path, value in values.items() if path not in unknown}
    tree = _nest({path: _absolute_inputs(path, value) for path, value in known.items()})
    config = None
    try:
        # JSON mode: arrays become tuples and strings paths, and nothing else is converted.
        config = Config.model_validate_json(json.dumps(tree, default=_refuse))
    except ValidationError as error:
        # A field of several types has an error for each type; one is enough.
        by_path = {one.path: one for one in (_from_pydantic(entry, known) for entry in error.errors(include_url=False))}
        problems += by_path.values()
    if config is not None and config.model.family and (config.model.path / "config.json").is_file():
        # Done here because every process of a run loads its configuration before it reads a model.
        try:
            add_family(config.model.family, config.model.path)
        except ValueError as error:
            problems.append(UnusableInput(FAMILY, str(error).removeprefix(f"{FAMILY} = ")))
    if problems or config is None:
        raise ConfigError(problems, source)
    # The keys of a union's other members are also leaves, but not of this configuration.
    origins = {
        path: known[path].origin if path in known else DEFAULT_ORIGIN
        for path in leaf_fields()
        if path.rpartition(".")[2] in type(value_of(config, path.rpartition(".")[0])).model_fields
    } | {path: value.origin for path, value in options.items()}
    return LoadedConfig(config=config, origins=MappingProxyType(origins))


def _has_null(value: Any) -> bool:
    return "\0" in value if isinstance(value, str) else isinstance(value, list) and any(map(_has_null, value))


def _refuse(value: Any) -> str:
    """Replace a TOML date, which no field accepts, with its type's name, so that the type check reports the field."""
    return f"<{type(value).__name__} {value}>"


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *sections, name = path.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    # A required section that no value names must still be looked into, so that the missing field itself is reported.
    for section in section_types():
        if section and "." not in section:
            tree.setdefault(section, {})
    _name_unions(tree)
    return tree


def _name_unions(tree: dict[str, Any]) -> None:
    """Give a union without a name its default name: [algorithm.loss] with only clip_ratio_high is ppo_clip."""
    for path in section_types():
        if names := union_names(path):
            node = tree
            for section in path.split("."):
                node = node.get(section, {})
            if node:
                node.setdefault("name", names[0])


def _absolute_inputs(path: str, value: _Value) -> Any:
    given, directory = value.value, value.directory
    if path == "data.sources" and isinstance(given, list):
        return [_absolute_source(table, directory) for table in given]
    if path == "distillation.teachers" and isinstance(given, list):
        return [
            {**table, "path": _absolute(table["path"], directory)} if isinstance(table, dict) and table.get("path") else table
            for table in given
        ]
    if path == "reward.mix" and isinstance(given, list):
        return [
            {**table, "verifier": _absolute_function(table["verifier"], directory)}
            if isinstance(table, dict) and "verifier" in table
            else table
            for table in given
        ]
    if path not in leaf_fields():
        return given
    if _has_mark(path, FunctionOfRecipe):
        if isinstance(given, list | tuple):
            return [_absolute_function(item, directory) for item in given]
        return _absolute_function(given, directory)
    if _has_mark(path, WordOfCommand) and isinstance(given, list | tuple):
        return [_absolute_word(word, directory) for word in given]
    if not is_input(path):
        return given
    if isinstance(given, list | tuple):
        return [file for item in given for file in _matches(_absolute(item, directory))]
    return _absolute(given, directory)


def _absolute_source(table: Any, directory: Path) -> Any:
    """Return a table of data.sources with its file path made absolute; a task's name is unchanged."""
    path = table.get("path") if isinstance(table, dict) else None
    if not isinstance(path, str) or path.startswith(TASK_PREFIX):
        return table
    return {**table, "path": _absolute(path, directory)}


def is_input(path: str) -> bool:
    """Return True if the field `path` holds files that a run reads, relative to its recipe."""
    return _has_mark(path, RelativeToRecipe)


@functools.cache
def _has_mark(path: str, kind: type) -> bool:
    field = leaf_fields()[path]
    # pydantic removes the marker from a single path's annotation, but leaves it on the items of a list.
    items = [getattr(item, "__metadata__", ()) for item in typing.get_args(field.annotation)]
    return any(isinstance(mark, kind) for marks in (field.metadata, *items) for mark in marks)


def _absolute(value: Any, directory: Path) -> Any:
    """Return a path from the recipe's directory, or, if there is nothing, from the current one if it is there."""
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        return value
    # abspath, not resolve: a symbolic link to a model or data set stays as the recipe names it.
    places = [os.path.abspath(base / Path(value).expanduser()) for base in (directory, Path.cwd())]
    return places[1] if os.path.lexists(places[1]) and not os.path.lexists(places[0]) else places[0]


def _absolute_function(value: Any, directory: Path) -> Any:
    """Return path/to/file.py:name with the file's place if it is there; other names of functions are unchanged."""
    if not isinstance(value, str) or not is_function_path(value):
        return value
    file, _, name = value.rpartition(":")
    place = _absolute(file, directory) if file.endswith(".py") else ""
    return f"{place}:{name}" if place and os.path.lexists(place) else value


def _absolute_word(word: Any, directory: Path) -> Any:
    """Return the place of a file, such as agent.py or bin/agent; other words of a command are unchanged."""
    place = _absolute(word, directory) if isinstance(word, str) and ("." in word or "/" in word) else ""
    return place if place and os.path.isfile(place) else word


def _matches(file: Any) -> list[Any]:
    """Return the files that a pattern such as train-*.parquet matches, in order; any other name as it is."""
    is_pattern = isinstance(file, str) and not os.path.lexists(file) and any(sign in file for sign in "*?[")
    return sorted(glob(file)) or [file] if is_pattern else [file]


def _unknown(path: str, value: _Value) -> Violation:
    if path in SECTIONS:
        return Violation(
            path, f"a table [{path}]", "set fields of megatron-core's configuration in it", {path: value.value}
        )
    if path in section_types():
        fields = ", ".join(dict.fromkeys(name for model in section_types()[path] for name in model.model_fields))
        fix = f"set its fields ({fields}), e.g. in a table [{path}]"
        return Violation(path, f"fields of the section {path}", fix, {"value": value.value})
    rule = f"a known key (this one is given by {value.origin})"
    if isinstance(value.value, Mapping):  # a section of another system
        leaves = _leaves(value.value, f"{path}.")
        if known := [f"{leaf} is {meant}" for leaf in leaves if (meant := counterpart(leaf))]:
            return Violation(path, rule, "; ".join(known))
    if meant := counterpart(path):
        is_field = meant.split()[0].strip(",:") in {*leaf_fields(), *section_types()}
        return Violation(path, rule, f"did you mean {meant}?" if is_field else meant)
    nearest = _nearest(path)
    return Violation(path, rule, f"did you mean {nearest}?" if nearest else "remove it")


def _leaves(tree: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name


def _nearest(path: str) -> str | None:
    """Return the field most likely meant: the same name in another section, otherwise the closest spelling."""
    # A right name in the wrong section is the most common slip, so it is tried before misspellings.
    leaves = list(leaf_fields())
    name = path.rpartition(".")[2]
    for candidate in leaves:
        if candidate.rpartition(".")[2] == name:
            return candidate
    parent = path.rpartition(".")[0]
    siblings = {leaf.rpartition(".")[2]: leaf for leaf in leaves if leaf.rpartition(".")[0] == parent}
    by_name = {leaf.rpartition(".")[2]: leaf for leaf in leaves}
    for names in (siblings, by_name):
        close = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
        if close:
            return names[close[0]]
    close = difflib.get_close_matches(path, [*leaves, *section_types()], n=1, cutoff=0.5)
    return close[0] if close else None


def _from_pydantic(entry: Mapping[str, Any], known: Mapping[str, _Value]) -> Violation:
    path = _path_of(entry["loc"])
    # For a list with too few items, pydantic also says "missing", about the item.
    if entry["type"] == "missing" and path == ".".join(map(str, entry["loc"])):
        return Violation(path, "a value (there is no default)", f"set {path} in the recipe or by --set {path}=...")
    if entry["type"] == "union_tag_invalid":
        path = f"{path}.name"
    given = known[path].value if path in known else entry.get("input")
    origin = known[path].origin if path in known else DEFAULT_ORIGIN
    if path in leaf_fields() and (table := _table_of(leaf_fields()[path])):
        name = str(entry["loc"][-1])
        rule = f"tables [[{path}]] with the keys {', '.join(table.model_fields)}"
        nearest = difflib.get_close_matches(name, table.model_fields, n=1)
        hint = f" (did you mean {nearest[0]}?)" if nearest and name not in table.model_fields else ""
        return Violation(
            path, rule, f"change {name if len(entry['loc']) > 2 else path} in {origin}{hint}", {path: given}
        )
    if entry["type"] == "extra_forbidden":
        return _of_another_member(path, given, origin, known)
    kind, example = _written(path)
    close = _close_choice(path, given)
    if isinstance(given, float) and given.is_integer() and kind == _KINDS[int][0]:  # 1e3
        example, origin = f"{path} = {int(given)}", f"{origin}: {path} = {int(given)}"
    hint = f", e.g. {example}" if origin == SET_ORIGIN and example and not close else ""
    rule = kind or entry["msg"].removeprefix("Input should be ")
    return Violation(path=path, formula=rule, values={path: given}, suggestion=f"change it in {origin}{hint}{close}")


def _table_of(field: FieldInfo) -> type[Section] | None:
    """Return the class of the tables that a field is a list of; None for any other field."""
    items = typing.get_args(field.annotation) if typing.get_origin(field.annotation) is tuple else ()
    return items[0] if items and isinstance(items[0], type) and issubclass(items[0], Section) else None


def _path_of(location: Sequence[str | int]) -> str:
    """Return the field or section of a pydantic error, whose location also names union members and list items."""
    path = ""
    for part in map(str, location):
        longer = f"{path}.{part}" if path else part
        if part in union_names(path):
            continue
        if longer not in leaf_fields() and longer not in section_types():
            break
        path = longer
    return path


def _of_another_member(path: str, given: Any, origin: str, known: Mapping[str, _Value]) -> Violation:
    """Return the violation for a key of another member of the union, e.g. dual_clip of ppo_clip when the loss is
    gspo."""
    section, _, name = path.rpartition(".")
    key = f"{section}.name"
    chosen = known[key].value if key in known else union_names(section)[0]
    [own] = [model for model in section_types()[section] if model.model_fields["name"].default == chosen]
    owners = [model.model_fields["name"].default for model in section_types()[section] if name in model.model_fields]
    return Violation(
        path=path,
        formula=f"one of the keys of {section} = {chosen!r}: {', '.join(own.model_fields)}",
        values={path: given},
        suggestion=f"remove it from {origin}, or set {key} to {' or '.join(owners)}",
    )


def _close_choice(path: str, given: Any) -> str:
    if path not in leaf_fields():
        return ""
    if note := VALUES.get(path, {}).get(str(given)):
        return f" ({given} is {note})"
    choices = union_names(path.removesuffix(".name")) or _words(leaf_fields()[path])
    close = difflib.get_close_matches(str(given), choices, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


_AXES = {
    "tp": "tp_size",
    "pp": "pp_size",
    "vpp": "vpp_size",
    "cp": "cp_size",
    "ep": "ep_size",
    "etp": "etp_size",
    "dp": "data",
}
_TOKEN = re.compile(r"(vpp|etp|tp|pp|cp|ep|dp)(\d+)|(sp)")


def layout_overrides(text: str) -> list[str]:
    """Return overrides for the layout in `text`: sizes of tp, pp, vpp, cp, ep, etp, dp in any order, and sp. Omitted
    sizes are 1, sp is off, and etp is tp.

    "tp2pp1" starts 2 processes, "tp2dp2sp" 4. Raises ValueError for anything else.
    """
    # As people write it: tp2-pp1, "TP2 PP1", tp2xpp1.
    compact = re.sub(r"[\s,_x-]+", "", text.lower())
    tokens = list(_TOKEN.finditer(compact))
    if not tokens or "".join(token.group(0) for token in tokens) != compact:
        raise ValueError(f"layout {text!r}: write sizes like tp2pp1 or tp2dp2sp, from {', '.join(_AXES)} and sp")
    names = [token.group(1) or token.group(3) for token in tokens]
    if len(set(names)) != len(names):
        raise ValueError(f"layout {text!r}: an axis stands in it twice; write each once")
    sizes = {**dict.fromkeys(_AXES.values(), 1), "etp_size": 0}
    sizes.update({_AXES[token.group(1)]: int(token.group(2)) for token in tokens if token.group(1)})
    data = sizes.pop("data")
    num_processes = sizes["tp_size"] * sizes["pp_size"] * sizes["cp_size"] * data
    overrides = [f"parallel.{axis}={size}" for axis, size in sizes.items()]
    return [
        *overrides,
        f"parallel.sequence_parallel={str('sp' in names).lower()}",
        f"parallel.num_processes={num_processes}",
    ]
