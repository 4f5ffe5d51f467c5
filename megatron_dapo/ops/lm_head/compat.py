"""Imports of optional modules."""

from __future__ import annotations

import importlib
from functools import cache


@cache
def import_failure(module: str) -> str | None:
    """Return the error of importing `module`, None where that works."""
    try:
        importlib.import_module(module)
    # A package that is installed and broken (another CUDA, a missing symbol) raises more than ImportError.
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return None
