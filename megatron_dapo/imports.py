"""Imports of heavy packages, without the garbage collector: torch with megatron-core, or SGLang, makes a million objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def heavy_imports() -> Iterator[None]:
    """Import in this block without the garbage collector, and let no later collection traverse what exists at its end.

    Modules stay, so that a collection finds nothing to free. During the imports collections take a fifth of their time, and
    later each full one would take 0.2 s.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
