"""The arithmetic of the comparison with TRL, and that both sides get the recipe's values."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dapo_vs_trl", ROOT / "benchmarks" / "dapo_vs_trl.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_peer_gets_the_recipe(benchmark: ModuleType, tmp_path: Path) -> None:
    config = benchmark.load_config(benchmark.RECIPE).config
    settings = {"processes": 2, "rows_per_pass": 32, "cache_implementation": "static"}
    specification = benchmark.peer_specification(config, tmp_path, settings, train_steps=3)
    assert specification["optimizer"]["learning_rate"] == config.optimizer.learning_rate
    assert (
        specification["optimizer_steps_per_batch"] * config.training.mini_batch_prompts
        == config.rollout.prompts_per_step
    )
    assert specification["settings"] == {"rows_per_pass": 32, "cache_implementation": "static"}
    assert (specification["threads"], specification["train_steps"], specification["stop_ids"]) == (1, 3, [2])
    changed = benchmark.load_config(benchmark.RECIPE, ["optimizer.schedule=cosine"]).config
    with pytest.raises(ValueError, match="constant learning rate"):
        benchmark.peer_specification(changed, tmp_path, settings)
