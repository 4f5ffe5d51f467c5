"""Documents that stay true: configuration keys, files and links they name exist; the glossary is short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_dapo.config.schema import leaf_fields, section_types

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    path for pattern in ("*.md", "docs/*.md", "benchmarks/*.md", "examples/**/*.md") for path in ROOT.glob(pattern)
)
KEY = re.compile(r"(?<![\w./-])([a-z_]+(?:\.[a-z0-9_]+)+)(?![\w/(]|\.\w)")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
FILE = re.compile(r"`((?:megatron_dapo|tests|benchmarks|examples|tools|docs|checkpoint_converters)/[\w./-]+\.\w+)")
SUFFIXES = ("py", "md", "toml", "json", "jsonl", "sh", "svg", "safetensors", "key", "log", "conf", "txt")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_configuration_keys_exist(path: Path) -> None:
    top = {section.split(".")[0] for section in section_types() if section}
    known = {*leaf_fields(), *section_types()}
    named = {
        key
        for key in KEY.findall(path.read_text(encoding="utf-8"))
        if key.split(".")[0] in top and key.rsplit(".", 1)[1] not in SUFFIXES
    }
    assert named <= known, f"{name(path)} names keys that do not exist: {sorted(named - known)}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_links_and_files_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    links = {link for link in LINK.findall(text) if "://" not in link}
    missing = [link for link in links if not (path.parent / link).exists()]
    missing += [file for file in FILE.findall(text) if not (ROOT / file).exists()]
    assert not missing, f"{name(path)} points at files that do not exist: {sorted(missing)}"


def test_glossary_has_at_most_thirty_words() -> None:
    rows = [line for line in (ROOT / "docs" / "glossary.md").read_text().splitlines() if line.startswith("| ")]
    assert len(rows) - 1 <= 30
