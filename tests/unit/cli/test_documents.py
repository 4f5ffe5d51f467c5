"""Commands, keys and files that documents, recipes, scripts and the Makefile name exist."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from typer.main import get_command

from megatron_dapo.cli.main import app
from megatron_dapo.config.megatron_options import SECTIONS, settable
from megatron_dapo.config.schema import leaf_fields, section_types
from megatron_dapo.telemetry.metrics import EVALUATION_METRICS, STEP_METRICS

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[3]
DIRECTORIES = ("docs", "examples", "benchmarks", "tools", "checkpoint_converters")
KINDS = ("*.md", "*.sh", "*.toml")
DOCUMENTS = sorted(
    {ROOT / "README.md", ROOT / "Makefile", *(p for f in DIRECTORIES for k in KINDS for p in (ROOT / f).rglob(k))}
)
PAGES = [document for document in DOCUMENTS if document.suffix == ".md"]
TOP_LEVEL = {path for path in section_types() if path and "." not in path}


@functools.cache
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


def lines_in(find: Callable[[str], Iterable[T]], documents: Iterable[Path] = DOCUMENTS) -> Iterator[tuple[Path, T]]:
    """Yield (document, what is found in its text)."""
    for document in documents:
        yield from ((document.relative_to(ROOT), each) for each in find(text_of(document)))


def test_commands_and_their_options_exist() -> None:
    for document, line in lines_in(commands_in):
        words = line.split()
        options = {name for one in resolve(words).params for name in (*one.opts, *one.secondary_opts)}
        for word in words:
            name = word.strip("[]").partition("=")[0]
            assert not name.startswith("--") or name in options, f"{document}: {line!r}: no option {name}"


def test_documented_settings_exist() -> None:
    known = {*leaf_fields(), *(f"{section}.{name}" for section in SECTIONS for name in settable()), "a.b"}
    for document, path in lines_in(re.compile(r"--set [\"']?([a-z_.]+)=").findall):
        assert path in known, f"{document}: --set {path}: there is no such field"


def test_fields_and_metrics_that_are_named_exist() -> None:
    fields, sections, metrics = leaf_fields(), section_types(), {*STEP_METRICS, *EVALUATION_METRICS}
    groups = {name.split("/")[0] for name in STEP_METRICS}
    for document, quoted in lines_in(re.compile(r"`([^`\n]+)`").findall, PAGES):
        name = re.match(r"[a-z_0-9./]+", quoted)
        path = name.group(0) if name else ""
        if (
            path.split(".")[0] in TOP_LEVEL
            and re.fullmatch(r"[a-z_0-9.]+", path)
            and not path.endswith((".json", ".md", ".py"))
        ):
            assert path in fields or path in sections or "." not in path, f"{document}: `{quoted}`: no field {path}"
        if "/" in path and path.split("/")[0] in groups:
            known = path.endswith("/") or "." in path or path in metrics
            assert known, f"{document}: `{quoted}`: no metric {path}"


# Files of Megatron-LM that pages quote.
MEGATRON_FILES = {"dot_product_attention.py", "backends.py", "context_parallel.py", "theoretical_memory_usage.py"}


def test_python_files_that_are_named_exist() -> None:
    parts = ("megatron_dapo", "tests", "benchmarks", "tools", "examples", "checkpoint_converters")
    files = [ROOT / "setup.py", *(path for part in parts for path in (ROOT / part).rglob("*.py"))]
    known = {"/".join(path.parts[start:]) for path in files for start in range(1, len(path.parts))}
    for document, name in lines_in(re.compile(r"`([\w/.]+\.py)(?:`|:)").findall, PAGES):
        assert name in known | MEGATRON_FILES, f"{document}: `{name}`: there is no such file"


def test_links_lead_somewhere() -> None:
    for document, target in lines_in(re.compile(r"\]\(([^)#]+)").findall, PAGES):
        is_there = target.startswith("http") or (ROOT / document.parent / target).exists()
        assert is_there, f"{document}: {target} is not there"


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][a-z0-9/-]*)[a-z -]*:", makefile, re.MULTILINE))
    targets |= set(re.findall(r"[a-z][a-z-]+", re.search(r"^\.PHONY:(.*)", makefile, re.MULTILINE)[1]))
    for document, target in lines_in(re.compile(r"(?:`|^    |^# )make ([a-z][a-z0-9/-]*)", re.MULTILINE).findall):
        assert target in targets, f"{document}: make {target}: no such target"


SCRIPT = re.compile(
    r"(?:python3?|\$\(PYTHON\)) (?:-m )?((?:tools|benchmarks|checkpoint_converters)[\w./]*)([^`\n|;#]*)"
)
BENCHMARK = re.compile(r"`(benchmarks/[\w/]+\.py)([^`\n]*)`")


def test_programs_and_their_options_exist() -> None:
    for document, (name, rest) in (*lines_in(SCRIPT.findall), *lines_in(BENCHMARK.findall)):
        path = ROOT / (name if name.endswith(".py") else name.replace(".", "/") + ".py")
        if path.with_suffix("").is_dir():
            path = path.with_suffix("") / "__main__.py"
        assert path.is_file(), f"{document}: {name} is not there"
        source = "".join(one.read_text(encoding="utf-8") for one in (path, *siblings(path)))
        for option in re.findall(r"(--[a-z][a-z-]*)", rest):
            assert f'"{option}"' in source, f"{document}: {name} has no option {option}"


def siblings(path: Path) -> list[Path]:
    """Modules of its directory that a program shares options with."""
    imported = re.findall(r"(?m)^(?:from (?:benchmarks\.)?|import )([\w.]+)(?: import|$)", path.read_text(encoding="utf-8"))
    candidates = [ROOT / "benchmarks" / (name.replace(".", "/") + ".py") for name in imported]
    candidates += [path.parent / (name.rpartition(".")[2] + ".py") for name in imported]
    return [one for one in candidates if one.is_file()]


def test_the_checks_find_what_exists() -> None:
    assert {line.split()[0] for _, line in lines_in(commands_in)} >= {
        "train",
        "pretrain-value",
        "plan",
        "check-loss",
        "eval",
        "replay",
        "data",
    }
