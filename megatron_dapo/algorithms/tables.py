"""Choosing an algorithm by name: tables of callables, and errors that list what exists."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

Entry = TypeVar("Entry")


def lookup(table: Mapping[str, Entry], kind: str, name: str) -> Entry:
    """Return the entry called `name`. Raise ValueError, listing the known names, if there is none."""
    if name not in table:
        raise ValueError(f"unknown {kind} {name!r}; choose one of: {', '.join(sorted(table))}")
    return table[name]
