"""Pages of the site that are generated from the code, and its navigation."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import yaml

import megatron_dapo
from megatron_dapo.cli.recipes import shipped_files
from megatron_dapo.config.schema import leaf_fields, section_types
from megatron_dapo.telemetry.metrics import EVALUATION_METRICS, STEP_METRICS
from tools import docs_site


def test_the_configuration_has_every_key_with_its_range_and_default() -> None:
    page = docs_site.configuration_page()
    for section in section_types():
        assert not section or f"\n## {section}\n" in page
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) == len(leaf_fields())
    assert not [row for row in rows if row.rstrip("| ").endswith("|") or "| |" in row], "a field without a docstring"
    assert re.search(r"\| `group_size` \| whole number, >= 1 \| `16` \|", page)
    assert re.search(r"\| `path` \| path \| required \|", page)
    assert "`embedded` or `sglang`" in page


def test_metrics_commands_and_recipes_are_all_there() -> None:
    metrics, commands, recipes = docs_site.metrics_page(), docs_site.commands_page(), docs_site.recipes_page()
    assert all(f"| `{name}` |" in metrics for name in (*STEP_METRICS, *EVALUATION_METRICS))
    for name in ("train", "quickstart", "convert hf-to-megatron", "checkpoint inspect", "recipes copy"):
        assert f"\n## {name}\n" in commands
    assert "megatron-dapo convert verify [OPTIONS] FIRST SECOND" in commands and "`--dry-run`" in commands
    for name in shipped_files():
        section = recipes.split(f"\n## {name}\n")[1].split("\n## ")[0]
        assert len(section.split()) > 2, f"{name} says nothing of itself"


def test_the_python_reference_has_every_public_name_with_its_docstring() -> None:
    page = docs_site.python_page()
    for name in megatron_dapo.__all__:
        if name == "__version__":
            continue
        first_line = inspect.getdoc(getattr(megatron_dapo, name)).splitlines()[0]
        assert first_line in page.split(f"\n## {name}\n")[1].split("\n## ")[0], name
    assert "train(recipe: Recipe, *, layout: str | None = None" in page
    assert 'source: str = \'\'' in page and " at 0x" not in page, "defaults are shown as one writes them"


def pages_of(entry: object) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    entries = entry.values() if isinstance(entry, dict) else entry
    return [page for one in entries for page in pages_of(one)]


def test_every_page_is_in_the_navigation(repository: Path) -> None:
    navigation = yaml.safe_load((repository / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    written = {path.relative_to(repository / "docs").as_posix() for path in (repository / "docs").rglob("*.md")}
    assert sorted(pages_of(docs_site.without_missing(navigation))) == sorted(written | set(docs_site.PAGES))
