"""Imports of optional modules."""

from __future__ import annotations

import importlib
from functools import cache


@cache
def import_failure(module: str) -> str | None:
    """Return the error of importing `module`, None if that works."""
    try:
        importlib.import_module(module)
    # A package that is installed and broken (another CUDA, a missing symbol) raises more than ImportError.
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return None


# Functions of Transformer Engine that say what it can compute here.
FP8, FP8_BLOCKS = "is_fp8_available", "is_fp8_block_scaling_available"


def transformer_engine_obstacle(support: str) -> str | None:
    """Return the reason why the installed Transformer Engine lacks `support`, FP8 or FP8_BLOCKS; None if it has it."""
    try:
        engine = importlib.import_module("transformer_engine.pytorch")
        available, reason = getattr(engine, support)(return_reason=True)
    except Exception as error:  # noqa: BLE001
        return f"Transformer Engine is installed and does not work: {type(error).__name__}: {error}"
    return None if available else f"Transformer Engine says: {reason}"
