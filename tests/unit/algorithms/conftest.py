"""The golden vectors, and a reader that knows which of them a test has looked at."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

GOLDEN_PATH = Path(__file__).parents[2] / "golden" / "golden.json"


class Section:
    """A section of golden.json. `unread()` lists the leaves that no check has read, except notes."""

    def __init__(self, content: dict[str, Any], path: str) -> None:
        self.content = content
        self.path = path
        self.read: set[str] = set()
        self.children: dict[str, Section] = {}

    def __getitem__(self, key: str) -> Any:
        value = self.content[key]
        if isinstance(value, dict):
            return self.children.setdefault(key, Section(value, f"{self.path}.{key}"))
        self.read.add(key)
        return value

    def __contains__(self, key: str) -> bool:
        return key in self.content

    def keys(self) -> list[str]:
        return list(self.content)

    def unread(self) -> list[str]:
        missing = []
        for key, value in self.content.items():
            if isinstance(value, dict):
                child = self.children.get(key)
                missing += child.unread() if child else [f"{self.path}.{key}"]
            elif key not in self.read and key != "note":
                missing.append(f"{self.path}.{key}")
        return missing


@pytest.fixture(scope="session")
def golden_file() -> dict[str, Any]:
    return json.loads(GOLDEN_PATH.read_text(encoding="utf-8"))


@pytest.fixture
def golden_section() -> type[Section]:
    return Section
