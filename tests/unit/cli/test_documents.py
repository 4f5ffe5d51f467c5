"""Commands, keys and files that documents, recipes, scripts and the Makefile name exist."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from megatron_dapo.cli.main import app
from megatron_dapo.config.megatron_options import SECTIONS, settable
from megatron_dapo.config.schema import leaf_fields, section_types
from megatron_dapo.telemetry.metrics import EVALUATION_METRICS, STEP_METRICS

ROOT = Path(__file__).resolve().parents[3]
DIRECTORIES = ("docs", "examples", "benchmarks", "tools", "checkpoint_converters")
KINDS = ("*.md", "*.sh", "*.toml")
DOCUMENTS = sorted(
    {ROOT / "README.md", ROOT / "Makefile", *(p for f in DIRECTORIES for k in KINDS for p in (ROOT / f).rglob(k))}
)
TOP_LEVEL = {path for path in section_types() if path and "." not in path}


def text_of(document: Path) -> str:
    """Lines that a backslash continues are one."""
    return re.sub(r"\\\n\s*", " ", document.read_text(encoding="utf-8"))


def commands_in(text: str) -> Iterator[str]:
    """Return the arguments of each `megatron-dapo` command in a text."""
    for match in re.finditer(r"(?:megatron-dapo|megatron_dapo\.cli\.main) ([a-z][^`\n|;]*)", text):
        yield match.group(1).split("  ")[0].split(" #")[0]


@functools.cache
def program() -> Any:
    """The tree of commands, which takes a moment to build."""
    return get_command(app)


def resolve(words: list[str]) -> Any:
    command = program()
    while words and hasattr(command, "commands"):
        names = words.pop(0).strip("{}").split(",")  # {hf-to-megatron,verify}: each of them
        default = getattr(command, "default_command", "")
        for name in names:
            known = name in command.commands or default
            assert known, f"no command {name!r}; there are {', '.join(command.commands)}"
        command = command.commands.get(names[0]) or command.commands[default]
    return command


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_and_their_options_exist(document: Path) -> None:
    for line in commands_in(text_of(document)):
        words = line.split()
        options = {name for one in resolve(words).params for name in (*one.opts, *one.secondary_opts)}
        for word in words:
            name = word.strip("[]").partition("=")[0]
            assert not name.startswith("--") or name in options, f"{line!r}: no option {name}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documented_settings_exist(document: Path) -> None:
    known = {*leaf_fields(), *(f"{section}.{name}" for section in SECTIONS for name in settable()), "a.b"}
    for path in re.findall(r"--set [\"']?([a-z_.]+)=", text_of(document)):
        assert path in known, f"--set {path}: there is no such field"


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if d.suffix == ".md"], ids=lambda path: path.name)
def test_fields_and_metrics_that_are_named_exist(document: Path) -> None:
    for quoted in re.findall(r"`([^`\n]+)`", document.read_text(encoding="utf-8")):
        name = re.match(r"[a-z_0-9./]+", quoted)
        path = name.group(0) if name else ""
        if (
            path.split(".")[0] in TOP_LEVEL
            and re.fullmatch(r"[a-z_0-9.]+", path)
            and not path.endswith((".json", ".md"))
        ):
            assert path in leaf_fields() or path in section_types() or "." not in path, f"`{quoted}`: no field {path}"
        if "/" in path and f"{path.split('/')[0]}/" in {f"{one.split('/')[0]}/" for one in STEP_METRICS}:
            known = {*STEP_METRICS, *EVALUATION_METRICS}
            assert path.endswith("/") or "." in path or path in known, f"`{quoted}`: no metric {path}"


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if d.suffix == ".md"], ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", document.read_text(encoding="utf-8")):
        assert target.startswith("http") or (document.parent / target).exists(), f"{target} is not there"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_make_targets_exist(document: Path) -> None:
    targets = set(
        re.findall(r"^([a-z][a-z0-9/-]*)[a-z -]*:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    )
    targets |= set(re.findall(r"[a-z][a-z-]+", re.search(r"^\.PHONY:(.*)", (ROOT / "Makefile").read_text(), re.M)[1]))
    for target in re.findall(r"(?:`|^    |^# )make ([a-z][a-z0-9/-]*)", text_of(document), re.MULTILINE):
        assert target in targets, f"make {target}: no such target"


SCRIPT = re.compile(
    r"(?:python3?|\$\(PYTHON\)) (?:-m )?((?:tools|benchmarks|checkpoint_converters)[\w./]*)([^`\n|;#]*)"
)
BENCHMARK = re.compile(r"`(benchmarks/[\w/]+\.py)([^`\n]*)`")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_programs_and_their_options_exist(document: Path) -> None:
    for name, rest in [*SCRIPT.findall(text_of(document)), *BENCHMARK.findall(text_of(document))]:
        path = ROOT / (name if name.endswith(".py") else name.replace(".", "/") + ".py")
        assert path.is_file(), f"{name} is not there"
        source = "".join(one.read_text(encoding="utf-8") for one in (path, *siblings(path)))
        for option in re.findall(r"(--[a-z][a-z-]*)", rest):
            assert f'"{option}"' in source, f"{name} has no option {option}"


def siblings(path: Path) -> list[Path]:
    """Modules of its directory that a program shares options with."""
    imported = re.findall(r"from (?:benchmarks\.)?([\w.]+) import", path.read_text(encoding="utf-8"))
    candidates = [ROOT / "benchmarks" / (name.replace(".", "/") + ".py") for name in imported]
    candidates += [path.parent / (name.rpartition(".")[2] + ".py") for name in imported]
    return [one for one in candidates if one.is_file()]


def test_the_checks_find_what_exists() -> None:
    lines = [line for document in DOCUMENTS for line in commands_in(text_of(document))]
    assert {line.split()[0] for line in lines} >= {
        "train",
        "pretrain-value",
        "plan",
        "check-loss",
        "eval",
        "replay",
        "data",
    }
