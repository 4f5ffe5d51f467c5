"""Choosing an algorithm by name: tables of callables, and errors that list what exists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

Entry = TypeVar("Entry")


def lookup(table: Mapping[str, Entry], kind: str, name: str) -> Entry:
    """The entry called `name`; ValueError listing the known names where there is none."""
    if name not in table:
        raise ValueError(f"unknown {kind} {name!r}; choose one of: {', '.join(sorted(table))}")
    return table[name]


def build(table: Mapping[str, type[Entry]], kind: str, name: str, settings: Mapping[str, Any]) -> Entry:
    """An instance of the dataclass called `name`, made from `settings`; ValueError for an unknown name or setting."""
    chosen = lookup(table, kind, name)
    known = [field.name for field in fields(chosen)]  # type: ignore[arg-type]
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise ValueError(f"{kind} {name!r} has no setting {', '.join(unknown)}; it has: {', '.join(known) or 'none'}")
    return chosen(**settings)
