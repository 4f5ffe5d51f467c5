"""Pages of the documentation's site that are generated from the code, as hooks of mkdocs (mkdocs.yml, `make docs`).

configuration  every field with type, range, default and docstring
metrics        every metric with unit and meaning
commands       every command with its arguments and options
recipes        every recipe, layout, grid and script with the comment that it begins with
python         every public name of the package with its signature and docstring

Links out of docs/ become plain text, because the site has no copy of the sources; pages of the navigation that nobody has
written yet are left out of it.
"""

from __future__ import annotations

import inspect
import itertools
import json
import os
import re
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from typer.main import get_command

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
sys.path.insert(0, str(ROOT))  # mkdocs loads only this file

import megatron_dapo  # noqa: E402
from megatron_dapo.cli.main import app  # noqa: E402
from megatron_dapo.cli.recipes import shipped_files  # noqa: E402
from megatron_dapo.config.schema import leaf_fields, section_types, union_names  # noqa: E402
from megatron_dapo.config.section import Bounds  # noqa: E402
from megatron_dapo.telemetry.metrics import EVALUATION_METRICS, STEP_METRICS  # noqa: E402

_TYPES = {int: "whole number", float: "number", bool: "true or false", str: "text", Path: "path"}


def configuration_page() -> str:
    """Return the reference of the configuration as Markdown: a heading per section, a table of its fields."""
    lines = [
        "# Configuration",
        "",
        "Every key of a recipe, in the order of the schema. `--set section.key=value` overrides one on the command line; "
        "relations between keys are checked by `--dry-run`, which lists all that is wrong at once.",
    ]
    of_section: dict[str, list[str]] = {path: [] for path in section_types()}
    for path in leaf_fields():
        of_section[path.rpartition(".")[0]].append(path)
    for section, paths in of_section.items():
        if section:
            lines += ["", f"## {section}", "", _words(section_types()[section][0].__doc__)]
        if names := union_names(section):
            lines += ["", f"One of {', '.join(f'`{name}`' for name in names)}; the keys depend on it."]
        if paths:
            lines += ["", "| key | type and range | default | meaning |", "|---|---|---|---|"]
        lines += [_field_row(path) for path in paths]
    return "\n".join(lines) + "\n"


def _field_row(path: str) -> str:
    field = leaf_fields()[path]
    default = "required" if field.is_required() else f"`{_value(field.get_default(call_default_factory=True))}`"
    kind = _type(field.annotation)
    bounds = "; ".join(str(mark) for mark in _bounds(field.annotation, field.metadata))
    if union_names(path.removesuffix(".name")):
        default = f"`{union_names(path.removesuffix('.name'))[0]}`"
    cells = (
        f"`{path.rpartition('.')[2]}`",
        f"{kind}{', ' if bounds else ''}{bounds}",
        default,
        _words(field.description),
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _type(annotation: Any) -> str:
    origin, items = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in _TYPES:
        return _TYPES[annotation]
    if origin is typing.Annotated:
        return _type(items[0])
    if origin is typing.Literal:
        return " or ".join(f"`{item}`" for item in items)
    if origin is tuple:
        return f"list of: {_type(items[0])}"
    if items:
        return " or ".join(_type(item) for item in items if item is not type(None))
    return getattr(annotation, "__name__", str(annotation))


def _bounds(annotation: Any, marks: Any) -> Iterator[Bounds]:
    """Yield the ranges of a field: on the field itself, or on the types that it is made of."""
    yield from (mark for mark in marks if isinstance(mark, Bounds))
    for item in typing.get_args(annotation):
        yield from _bounds(item, getattr(item, "__metadata__", ()))


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_value, value))}]"
    return f'"{value}"' if isinstance(value, str | Path) else "none" if value is None else str(value)


def _words(text: str | None) -> str:
    return " ".join((text or "").split())


def metrics_page() -> str:
    """Return the reference of the metrics as Markdown."""
    lines = ["# Metrics", "", "Names, units and meanings of `metrics.jsonl` and TensorBoard, one row a train step."]
    lines += _metric_tables(STEP_METRICS)
    lines += ["", "# Metrics of an evaluation", "", "In `evaluations.jsonl` and, by the same names, in TensorBoard."]
    return "\n".join(lines + _metric_tables(EVALUATION_METRICS)) + "\n"


def _metric_tables(metrics: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    sections = dict.fromkeys(name.split("/")[0] for name in metrics)
    for section in sections:
        lines += ["", f"## {section}", "", "| metric | unit | meaning |", "|---|---|---|"]
        for name, metric in metrics.items():
            if name.split("/")[0] == section:
                lines.append(f"| `{name}` | {metric.unit} | {metric.meaning.replace('|', chr(92) + '|')} |")
    return lines


def commands_page() -> str:
    """Return the reference of the command line as Markdown."""
    command = get_command(app)
    lines = ["# Commands", "", "`megatron-dapo --install-completion` makes the shell complete commands and options."]
    for name, one in _leaves(command, "megatron-dapo"):
        lines += ["", f"## {name.removeprefix('megatron-dapo ')}", "", *_help_paragraphs(one.help), ""]
        arguments = (one for one in one.params if one.param_type_name == "argument")
        shown = (_name(one) if one.required else f"[{_name(one)}]" for one in arguments)
        lines += ["```text", " ".join([name, "[OPTIONS]", *shown]), "```"]
        rows = [row for parameter in one.params if (row := _parameter_row(parameter))]
        if rows:
            lines += ["", "| argument or option | meaning |", "|---|---|", *rows]
    return "\n".join(lines) + "\n"


def _leaves(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    commands = getattr(command, "commands", None)
    if commands is None:
        yield name, command
        return
    for word, one in sorted(commands.items()):
        is_default = word == getattr(command, "default_command", None)  # its name is not written
        yield from _leaves(one, name if is_default else f"{name} {word}")


def _help_paragraphs(text: str | None) -> list[str]:
    paragraphs = (text or "").replace("\f", "").split("\n\n")
    return [line for paragraph in paragraphs for line in (_words(paragraph), "")][:-1]


def _name(argument: Any) -> str:
    return (argument.name or "").upper() + ("..." if argument.nargs < 0 else "")


def _parameter_row(parameter: Any) -> str:
    meaning = _words(getattr(parameter, "help", ""))
    if parameter.param_type_name == "argument":
        name = f"`{_name(parameter)}`"
    else:
        if parameter.name == "help":
            return ""
        name = ", ".join(f"`{option}`" for option in (*parameter.opts, *parameter.secondary_opts))
        shown = parameter.default
        if shown is not None and not callable(shown) and shown is not False and "default" not in meaning:
            shown = "on" if shown is True else getattr(shown, "value", shown)
            meaning = f"{meaning} (default: {shown})"
    return f"| {name} | {meaning.replace('|', chr(92) + '|')} |"


def recipes_page() -> str:
    """Return the list of the recipes as Markdown: what each says of itself, and what it builds on."""
    lines = ["# Every recipe", "", "`megatron-dapo recipes copy NAME` writes one with all that it needs."]
    for name, path in shipped_files().items():
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            meaning = json.loads(text).get("source", "A reference curve.")
        else:
            said = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
            meaning = _words(" ".join(line.lstrip("#! ") for line in said if not line.startswith(("#!", "#SBATCH"))))
        lines += ["", f"## {name}", "", meaning.replace("<", "&lt;")]
        if below := re.search(r'^(?:base|recipe) = "(.+)"', text, re.MULTILINE):
            lines += ["", f"Builds on `{below[1]}`."]
    return "\n".join(lines) + "\n"


def python_page() -> str:
    """Return the reference of the Python interface as Markdown: signature and docstring of every public name."""
    lines = ["# Python API", "", "What `from megatron_dapo import ...` offers; [Python](../python.md) shows it in use."]
    for name in megatron_dapo.__all__:
        public = getattr(megatron_dapo, name)
        if not callable(public):
            continue
        lines += ["", f"## {name}", *_signature(name, public), *_docstring(public)]
        if inspect.isclass(public):
            for method, member in vars(public).items():
                if method.startswith("_") or not (inspect.isfunction(member) or isinstance(member, property)):
                    continue
                lines += ["", f"### {name}.{method}"]
                lines += _signature(method, member) if inspect.isfunction(member) else []
                lines += _docstring(member)
    return "\n".join(lines) + "\n"


def _signature(name: str, public: Any) -> list[str]:
    if inspect.isclass(public) and issubclass(public, Exception):
        return []
    signature = inspect.signature(public)
    parameters = [
        parameter.replace(annotation=_shown(parameter.annotation), default=_shown(parameter.default, repr))
        for parameter in signature.parameters.values()
    ]
    text = str(signature.replace(parameters=parameters, return_annotation=_shown(signature.return_annotation)))
    return ["", "```python", f"{name}{text.replace('megatron_dapo.', '').replace('~', '')}", "```"]


class _Verbatim:
    """A part of a signature that has its text as its repr."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _shown(part: Any, written: Callable[[Any], str] = str) -> Any:
    """Return a part of a signature as a reader would write it: an annotation without quotes, a function's name for its address."""
    return part if part is inspect.Signature.empty else _Verbatim(getattr(part, "__name__", None) or written(part))


def _docstring(public: Any) -> list[str]:
    text = inspect.getdoc(public)
    return ["", text] if text else []


PAGES: Mapping[str, Callable[[], str]] = {
    "reference/configuration.md": configuration_page,
    "reference/metrics.md": metrics_page,
    "reference/commands.md": commands_page,
    "reference/recipes.md": recipes_page,
    "reference/python.md": python_page,
}


def without_missing(nav: Any) -> Any:
    """Return a navigation without the pages that do not exist, and without sections that are empty then."""
    if isinstance(nav, list):
        return [one for one in map(without_missing, nav) if one]
    if isinstance(nav, dict):
        kept = {title: without_missing(entry) for title, entry in nav.items()}
        return {title: entry for title, entry in kept.items() if entry}
    return nav if nav in PAGES or (DOCS / nav).is_file() else None


def inside_the_site(markdown: str, page: str) -> str:
    """Return a page whose links lead to pages and pictures of docs/; others keep their text."""

    def replace(match: re.Match[str]) -> str:
        text, target = match[1], match[2]
        if target.startswith(("http", "#", "mailto:")):
            return match[0]
        path = os.path.normpath((DOCS / page).parent / target.partition("#")[0])
        if path == str(ROOT / "README.md"):
            return f"[{text}]({os.path.relpath(DOCS / 'index.md', (DOCS / page).parent)})"
        if Path(path).is_relative_to(DOCS) and not Path(path).is_dir():
            return match[0]
        return text if text.startswith("`") else f"`{text}`"

    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)]+)\)", replace, markdown)


def on_config(config: Any) -> Any:
    """mkdocs: drop pages of the navigation that are not written."""
    config["nav"] = without_missing(config["nav"])
    return config


def on_files(files: Any, config: Any) -> Any:
    """mkdocs: add the generated pages."""
    from mkdocs.structure.files import File

    for path, page in PAGES.items():
        files.append(File.generated(config, path, content=page()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """mkdocs: links that lead out of docs/."""
    return inside_the_site(markdown, page.file.src_uri)
