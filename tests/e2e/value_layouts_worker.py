"""Runs in four processes: dumped rollout batches, each under one pair of layouts after another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_dapo.config.loader import load_config
from megatron_dapo.config.validator import require_valid
from megatron_dapo.models.config_json import read_architecture
from megatron_dapo.trainer.replay import replay


def run(arguments: list[dict[str, Any]]) -> list[dict[str, float]]:
    """The metrics of each case {"recipe", "overrides", "batch"}."""
    return [_step(**case) for case in arguments]


def _step(recipe: str, overrides: list[str], batch: str) -> dict[str, float]:
    config = load_config(Path(recipe), overrides).config
    require_valid(config, dist.get_world_size(), read_architecture(config.model.path))
    return replay(config, Path(batch))
