"""A grid on a recipe whose model is four facts of shape, and a command in the place of training that ends within a second."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_dapo.ablation.grid import Grid, read_grid
from megatron_dapo.ablation.runs import Run, plan_runs
from megatron_dapo.run.plan import ONE_NODE_OF_CPUS
from tests.unit.cli.conftest import recipe  # noqa: F401

GRID = """
recipe = "recipe.toml"
seeds = [1, 2]
set.run.total_steps = 4
[[variants]]
name = "GRPO"
set.algorithm.loss.clip_ratio_high = 0.2
[[variants]]
name = "+ clip-higher"
after = "GRPO"
set.algorithm.loss.clip_ratio_high = 0.3
"""
COMMAND = (sys.executable, str(Path(__file__).with_name("short_command.py")))


@pytest.fixture
def write_grid(tmp_path: Path, recipe: Path) -> Callable[[str], Path]:  # noqa: F811
    def write(text: str = GRID) -> Path:
        path = tmp_path / "grid.toml"
        path.write_text(f'output_dir = "{tmp_path}/runs"\n{text}')
        return path

    return write


def planned(path: Path, commit: str = "abc") -> tuple[Grid, list[Run]]:
    grid = read_grid(path)
    return grid, plan_runs(grid, ONE_NODE_OF_CPUS, commit)
