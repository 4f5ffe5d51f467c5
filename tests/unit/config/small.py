"""A small configuration that is valid, and changes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_dapo.config import Config, load_config
from megatron_dapo.config.derive import derive

SMALL = Path(__file__).with_name("small.toml")


def make(overrides: str = "", **values: Any) -> Config:
    """A valid small configuration with overrides "a.b=value ...", or with `section__field` values replaced."""
    config = load_config(SMALL, overrides.split()).config
    return derive(config, {name.replace("__", "."): value for name, value in values.items()}) if values else config
