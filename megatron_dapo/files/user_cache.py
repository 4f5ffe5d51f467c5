"""The directory of what the package keeps for a user between runs, $XDG_CACHE_HOME/megatron_dapo or ~/.cache/megatron_dapo."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """Return the directory, which may be missing. RuntimeError if the user has no home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron_dapo"
