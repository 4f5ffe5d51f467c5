"""Code blocks of the README and docs/, fenced or indented: Python runs, TOML loads as a recipe, commands parse.

A block that cannot be checked stands after a line `<!-- not run: reason -->`. An indented block has the language of its first
line; one that is none of the three (output, a diagram) is text.
"""

from __future__ import annotations

import re
import shlex
import sys
import textwrap
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from megatron_dapo import Recipe
from megatron_dapo.ablation.grid import read_grid
from megatron_dapo.cli.main import app
from megatron_dapo.config import load_config
from megatron_dapo.config.loader import tomllib
from megatron_dapo.data.hub import hub_reference
from megatron_dapo.telemetry.summary import RunSummary

SUMMARY = RunSummary("run", "TP1", "finished", 7, 28, 0.1, 0.9, 60.0, 70.0, 5.0, 100.0)
ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"(?:<!-- not run: (.+?) -->\n)?^```(\w*)[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"(?:<!-- not run: (.+?) -->\n)?(?:^\n)((?:    .*\n|\n)+)", re.MULTILINE)
FIRST_LINES = (
    ("toml", r"\[[a-z_.]+\]$|[a-z_.]+ = [\"\[{\d tf-]"),
    ("python", r"import |from \w+(\.\w+)* import |def |async def "),
    ("bash", r"([A-Z_]+=\S+ )*(megatron-dapo|make|pip|sbatch|python|examples/|\.venv/)"),
)
# Programs besides our own that commands may name; `make` and scripts of tools/ and benchmarks/ are checked by test_documents.py.
OTHERS = ("make", "pip", "python", "docker", "sbatch", "cd", "export", "git", "srun", "torchrun", "tensorboard")


MODELS = re.compile(
    r"""(?:\bmodel\.path ?= ?["']?|^\[model\]\n(?:[^\[\n].*\n)*?path = ["']|\bRecipe\(\s*["'])([^\s"'`,)]+)""",
    re.MULTILINE,
)
PLANNED = re.compile(r"megatron-dapo plan .*")  # takes names of published models, without a directory


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    kind: str
    text: str
    reason: str  # reason not to run it; "" for one that runs


def blocks() -> Iterator[Block]:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            line = text.count("\n", 0, match.start(2)) + 1
            yield Block(page, line, match[2], match[3], match[1] or "")
        outside = FENCE.sub(lambda match: re.sub(r"[^\n]+", "", match[0]), text)  # lines keep their numbers
        for match in INDENTED.finditer(outside):
            code = textwrap.dedent(match[2]).strip("\n") + "\n"
            kind = next((kind for kind, first in FIRST_LINES if re.match(first, code.split("\n")[0])), "text")
            yield Block(page, outside.count("\n", 0, match.start(2)) + 1, kind, code, match[1] or "")


def of_kind(*kinds: str) -> list[object]:
    found = [one for one in blocks() if one.kind in kinds and not one.reason]
    return [pytest.param(one, id=f"{one.page.name}:{one.line}") for one in found]


def test_every_block_says_its_language_or_its_reason() -> None:
    known = ("python", "toml", "bash", "text", "json", "csv")
    wrong = [f"{one.page.name}:{one.line}" for one in blocks() if one.kind not in known and not one.reason]
    assert not wrong, f"no checked language: {', '.join(wrong)}"
    assert all(len(one.reason.split()) > 2 for one in blocks() if one.reason)
    assert len([one for one in blocks() if not one.reason and one.kind != "text"]) >= 15


def write_alone(recipe: Recipe) -> types.SimpleNamespace:
    """Write and load the recipe as `train` does, without the model that it names; return a result in the form of a run's."""
    load_config(recipe.write())
    return types.SimpleNamespace(summary=SUMMARY, metrics=({"reward/mean": 1.0},), model=Path("huggingface"))


@pytest.mark.parametrize("block", of_kind("python"))
def test_python_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a module of its own in an empty directory: imports hold, definitions stand, a recipe is written and loads. Rewards are
    scored by tests/unit/rewards, and runs from Python are made by tests/e2e/test_python.py."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("megatron_dapo.train", write_alone)
    monkeypatch.setitem(sys.modules, "documented", type(sys)("documented"))
    exec(compile(block.text, f"{block.page.name}:{block.line}", "exec"), sys.modules["documented"].__dict__)


@pytest.mark.parametrize("block", of_kind("toml"))
def test_toml_loads(block: Block, tmp_path: Path) -> None:
    """Names and types are checked as a recipe's; what a fragment leaves out is taken from the smallest recipe."""
    (tmp_path / "smallest.toml").write_text('[model]\npath = "model"\n[data]\ntrain_paths = ["train.jsonl"]\n')
    tree = tomllib.loads(block.text)
    text = block.text
    if "variants" in tree:
        (tmp_path / "grid.toml").write_text(text)
        assert read_grid(tmp_path / "grid.toml").variants
        return
    if "base" in tree:
        assert (ROOT / "examples" / tree["base"]).is_file()
        text = text.replace(f'"{tree["base"]}"', f'"{ROOT / "examples" / tree["base"]}"')
    else:
        text = f'base = "smallest.toml"\n{text}'
    (tmp_path / "own.toml").write_text(text)
    load_config(tmp_path / "own.toml")


def models_of(text: str) -> list[str]:
    """Return the models that a page's recipes, calls and settings name, except those of `megatron-dapo plan`."""
    return MODELS.findall(PLANNED.sub("", text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_models_of_recipes_can_be_had(page: Path) -> None:
    """A model is a repository of the Hub, a directory of this checkout (after `make`), or a placeholder."""
    for name in models_of(page.read_text(encoding="utf-8")):
        absolute = ROOT / name.replace("hf://", "hf:/").replace("@REVISION", "@main")
        is_made = name.startswith("runs/models/") and f"\n{name}:" in (ROOT / "Makefile").read_text()
        is_had = absolute.exists() or is_made or hub_reference(absolute, ROOT, is_model=True)
        assert is_had or is_placeholder(name), f"{name}: no OWNER/NAME of the Hub, no directory, no placeholder"


def is_placeholder(name: str) -> bool:
    return (
        re.fullmatch(r"/models/[\w.-]+", name) is not None or re.match(r"(?:[A-Z]+_)*[A-Z]+(?:/|$)", name) is not None
    )


def test_models_of_a_page_are_found() -> None:
    toml = '[model]\ndtype = "bfloat16"\npath = "a"\n[data]\ntrain_paths = ["x"]\n'
    text = toml + 'Recipe("b", rows)\nRecipe(\n    "c",\n)\n--set model.path=d --layout\n`model.path = "e/f"`\n'
    assert models_of(text + "megatron-dapo plan x --set model.path=g\n") == ["a", "b", "c", "d", "e/f"]
    assert not is_placeholder("SmolLM2-135M-Instruct") and is_placeholder("OUTPUT_DIR/sft") and is_placeholder("MODEL")


def commands_of(block: Block) -> Iterator[list[str]]:
    for line in re.sub(r"\\\n\s*", " ", block.text).splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)  # a variable for this command
        if words:
            yield words


@pytest.mark.parametrize("block", of_kind("bash", "sh", "console"))
def test_commands_parse(block: Block) -> None:
    for words in commands_of(block):
        program, arguments = words[0].rpartition("/")[2], words[1:]
        if program == "megatron-dapo":
            parse(arguments)
        else:
            assert program in OTHERS or (ROOT / words[0]).is_file(), f"{words[0]} is no program that is known here"


def parse(arguments: list[str]) -> None:
    """Parse a command as the program does, without running it: names, required arguments and types of values."""
    command, parent = get_command(app), None
    while hasattr(command, "commands"):
        assert arguments, "a command is missing"
        if arguments[0] not in command.commands and (default := getattr(command, "default_command", "")):
            arguments = [default, *arguments]
        assert arguments[0] in command.commands, f"no command {arguments[0]!r}"
        parent = command.context_class(command, info_name=arguments[0], parent=parent)
        command = command.commands[arguments[0]]
        arguments = arguments[1:]
        if getattr(command, "invoke_without_command", False) and not arguments:
            return
    command.make_context(parent.info_name if parent else None, list(arguments), parent=parent)


@pytest.mark.parametrize(
    "line", ["tran own.toml", "train", "train own.toml --layuot tp2", "train own.toml --restarts few", "recipes cpy x"]
)
def test_a_wrong_command_is_found(line: str) -> None:
    with pytest.raises((AssertionError, typer.BadParameter.__base__)):  # every error of usage
        parse(line.split())
