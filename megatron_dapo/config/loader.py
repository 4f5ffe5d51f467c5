"""From recipe files and --set overrides to one Config in which the origin of every value is known.

A recipe is a TOML file; `base = "other.toml"` (relative to the file) takes everything from another recipe and the file
then holds only what differs. Order: schema defaults < base < recipe < --set. Lists are replaced, never merged.
"""

from __future__ import annotations

import difflib
import json
import os
import sys
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from megatron_dapo.config.errors import ConfigError, Violation
from megatron_dapo.config.renamed import RENAMED, renamed_value
from megatron_dapo.config.schema import Config, leaf_fields, section_types
from megatron_dapo.config.section import RelativeToRecipe

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEFAULT_ORIGIN = "default"
SET_ORIGIN = "--set"


@dataclass(frozen=True)
class LoadedConfig:
    """A checked configuration and where each of its values came from."""

    config: Config
    origins: Mapping[str, str]  # dotted path -> "default", the recipe file's path, or "--set"


@dataclass(frozen=True)
class _Value:
    """A value before type checks, with its origin and the folder relative paths are taken from."""

    value: Any
    origin: str
    folder: Path


def load_config(recipe: str | Path, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Read a recipe, apply "a.b=value" overrides and check names and types (not yet ranges and relations: `validate`).

    Raises ConfigError with every unknown key, wrong type and unreadable value at once.
    """
    values = {**_recipe_values(Path(recipe), ()), **_override_values(overrides)}
    return _build(values, source=str(recipe))


def config_from_dict(tree: Mapping[str, Any], folder: str | Path = ".") -> Config:
    """A Config from nested plain values (lists for tuples, strings for paths), e.g. in tests. Relative inputs are from
    `folder`."""
    return _build(_flatten(tree, origin="dict", folder=Path(folder)), source="configuration").config


def write_resolved(loaded: LoadedConfig, path: str | Path) -> None:
    """Write every value with its origin as JSON; `read_resolved` gives back an equal LoadedConfig."""
    document = {"config": loaded.config.model_dump(mode="json"), "origins": dict(loaded.origins)}
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".tmp")
    partial.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, target)


def read_resolved(path: str | Path) -> LoadedConfig:
    """The configuration a run folder holds. Raises ConfigError if it does not fit this version's schema."""
    document = json.loads(Path(path).read_text(encoding="utf-8"))
    values = _flatten(document["config"], origin=str(path), folder=Path.cwd())
    built = _build(values, source=str(path))
    return LoadedConfig(config=built.config, origins=MappingProxyType(dict(document["origins"])))


def _recipe_values(recipe: Path, chain: tuple[Path, ...]) -> dict[str, _Value]:
    resolved = recipe.resolve()
    if resolved in chain:
        loop = " -> ".join(str(path) for path in (*chain, resolved))
        raise ConfigError(
            [_violation("base", "recipes that do not inherit from themselves", f"break the loop {loop}")], str(recipe)
        )
    tree = _read_toml(recipe)
    base = tree.pop("base", None)
    own = _flatten(tree, origin=str(recipe), folder=recipe.parent)
    if base is None:
        return own
    if not isinstance(base, str):
        raise ConfigError(
            [_violation("base", "the path of one recipe", 'write base = "other.toml"', base=base)], str(recipe)
        )
    return {**_recipe_values(recipe.parent / base, (*chain, resolved)), **own}


def _read_toml(recipe: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(recipe.read_text(encoding="utf-8"))
    except FileNotFoundError:
        near = difflib.get_close_matches(recipe.name, [p.name for p in recipe.parent.glob("*.toml")], n=1)
        hint = f"did you mean {recipe.parent / near[0]}?" if near else "check the path"
        raise ConfigError(
            [_violation("recipe", "a recipe file that exists", hint, file=str(recipe))], str(recipe)
        ) from None
    except IsADirectoryError:
        raise ConfigError(
            [_violation("recipe", "a recipe file", "name a .toml file", file=str(recipe))], str(recipe)
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError([_violation("recipe", "valid TOML", f"correct it: {error}")], str(recipe)) from None


def _flatten(tree: Mapping[str, Any], origin: str, folder: Path, prefix: str = "") -> dict[str, _Value]:
    flat: dict[str, _Value] = {}
    for name, value in tree.items():
        path = prefix + name
        if isinstance(value, Mapping) and path in section_types():
            flat.update(_flatten(value, origin, folder, f"{path}."))
        else:
            flat[path] = _Value(value, origin, folder)
    return flat


def _override_values(overrides: Sequence[str]) -> dict[str, _Value]:
    values: dict[str, _Value] = {}
    problems = []
    for override in overrides:
        path, separator, text = (part.strip() for part in override.partition("="))
        try:
            if not separator or not path:
                raise ValueError("no '=' with a name before it")
            values[path] = _Value(_parse_override(path, text), SET_ORIGIN, Path.cwd())
        except ValueError as error:
            rule = "an override as section.field=value, the value in TOML"
            problems.append(_violation(path or "--set", rule, f"rewrite --set {override!r} ({error})"))
    if problems:
        raise ConfigError(problems, SET_ORIGIN)
    return values


def _parse_override(path: str, text: str) -> Any:
    """TOML, except that a field of text takes the bare word: no shell double quoting, and no guessing of types
    either."""
    field = leaf_fields().get(path)
    if field is not None and _is_text(field.annotation) and text[:1] not in ("'", '"'):
        return text
    document = tomllib.loads(f"value = {text}")
    if set(document) != {"value"}:
        raise ValueError("one value, not several lines")
    return document["value"]


def _is_text(annotation: Any) -> bool:
    if typing.get_origin(annotation) is typing.Literal:
        return all(isinstance(choice, str) for choice in typing.get_args(annotation))
    return annotation in (str, Path)


def _build(values: Mapping[str, _Value], source: str) -> LoadedConfig:
    problems = [_unknown(path, value) for path, value in values.items() if path not in leaf_fields()]
    known = {path: value for path, value in values.items() if path in leaf_fields()}
    tree = _nest({path: _absolute_inputs(path, value) for path, value in known.items()})
    config = None
    try:
        # JSON mode: arrays become tuples and strings paths, and nothing else is converted.
        config = Config.model_validate_json(json.dumps(tree, default=_refuse))
    except ValidationError as error:
        problems += [_from_pydantic(entry, known) for entry in error.errors(include_url=False)]
    if problems or config is None:
        raise ConfigError(problems, source)
    origins = {path: known[path].origin if path in known else DEFAULT_ORIGIN for path in leaf_fields()}
    return LoadedConfig(config=config, origins=MappingProxyType(origins))


def _refuse(value: Any) -> str:
    """A TOML date is no value of any field: hand on its type's name so that the type check names the field."""
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
    return tree


def _absolute_inputs(path: str, value: _Value) -> Any:
    field = leaf_fields()[path]
    if any(isinstance(mark, RelativeToRecipe) for mark in field.metadata):
        return _absolute(value.value, value.folder)
    inner = typing.get_args(field.annotation)
    if inner and any(isinstance(mark, RelativeToRecipe) for mark in getattr(inner[0], "__metadata__", ())):
        return (
            [_absolute(item, value.folder) for item in value.value]
            if isinstance(value.value, (list, tuple))
            else value.value
        )
    return value.value


def _absolute(value: Any, folder: Path) -> Any:
    if not isinstance(value, str | os.PathLike):
        return value
    return os.path.abspath(folder / Path(value).expanduser())


def _unknown(path: str, value: _Value) -> Violation:
    if path in section_types():
        fields = ", ".join(section_types()[path].model_fields)
        return _violation(
            path,
            f"fields of the section {path}",
            f"set its fields ({fields}), e.g. in a table [{path}]",
            value=value.value,
        )
    if path in RENAMED:
        new = RENAMED[path]
        line = f"{new} = {_toml(renamed_value(new, value.value))}"
        return _violation(path, f"its present name, {new}", f"write {line} in {value.origin}", **{path: value.value})
    nearest = _nearest(path)
    rule = f"a known key (this one is given by {value.origin})"
    return _violation(path, rule, f"did you mean {nearest}?" if nearest else "remove it")


def _toml(value: Any) -> str:
    """A value as it is written in a recipe."""
    return json.dumps(value, default=str)


def _nearest(path: str) -> str | None:
    """The field the writer most likely meant: the same name in another section, else the closest spelling."""
    leaves = list(leaf_fields())
    name = path.rpartition(".")[2]
    for candidate in (*leaves, *RENAMED):
        if candidate.rpartition(".")[2] == name:
            return RENAMED.get(candidate, candidate)
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
    location = [str(part) for part in entry["loc"]]
    path = ".".join(location)
    while path not in leaf_fields() and path not in section_types() and len(location) > 1:
        location.pop()
        path = ".".join(location)
    if entry["type"] == "missing":
        return _violation(path, "a value (there is no default)", f"set {path} in the recipe or by --set {path}=...")
    given = known[path].value if path in known else entry.get("input")
    origin = known[path].origin if path in known else DEFAULT_ORIGIN
    rule = entry["msg"].removeprefix("Input should be ")
    return Violation(
        path=path, formula=rule, values={path: given}, suggestion=f"change it in {origin}{_close_choice(path, given)}"
    )


def _close_choice(path: str, given: Any) -> str:
    choices = typing.get_args(leaf_fields()[path].annotation) if path in leaf_fields() else ()
    close = difflib.get_close_matches(str(given), [c for c in choices if isinstance(c, str)], n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _violation(path: str, formula: str, suggestion: str, **values: Any) -> Violation:
    return Violation(path=path, formula=formula, suggestion=suggestion, values=values)
