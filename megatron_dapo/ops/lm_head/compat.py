"""Whether an optional module can be imported."""

from __future__ import annotations

import importlib
from functools import cache


@cache
def import_failure(module: str) -> str | None:
    """What importing it says, None where that works. A package that is there and broken fails with more than
    ImportError."""
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return None
