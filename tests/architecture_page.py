"""Lists in docs/architecture.md that tests compare with what a traced run does."""

from __future__ import annotations

import re
from pathlib import Path

_PAGE = Path(__file__).resolve().parents[1] / "docs" / "architecture.md"


def listed(section: str) -> list[str]:
    """Return the numbered items of a section, in order, each as its line."""
    body = _PAGE.read_text(encoding="utf-8").split(f"## {section}")[1].split("\n## ")[0]
    return re.findall(r"^\d+\. .*$", body, re.MULTILINE)


def listed_files(section: str) -> list[str]:
    """Return the file that each numbered item of a section begins with."""
    return [re.match(r"\d+\. `([\w/]+\.py)`", item)[1] for item in listed(section)]
