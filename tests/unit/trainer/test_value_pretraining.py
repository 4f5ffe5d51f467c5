"""Every shipped recipe with a critic can be pretrained with as it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_dapo.config import load_config, validate
from megatron_dapo.trainer.value_pretraining import pretraining_config, weights_digest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
RECIPES = [path for path in sorted(EXAMPLES.rglob("*.toml")) if "vapo" in path.stem or "tppo" in path.stem]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_its_pretraining_is_a_valid_configuration(recipe: Path) -> None:
    config = load_config(recipe).config
    pretraining = pretraining_config(config)
    assert validate(pretraining) == []
    assert pretraining.run.total_steps == config.value_pretraining.max_steps
    assert not pretraining.rollout.filter_groups and pretraining.algorithm.name == "vapo"


def test_there_are_recipes_of_both() -> None:
    assert {path.stem.split("_")[0] for path in RECIPES} >= {"quickstart", "vapo", "tppo"} and len(RECIPES) == 4


def test_prompts_are_its_own_where_they_are_named() -> None:
    config = load_config(EXAMPLES / "quickstart" / "quickstart_vapo.toml").config
    assert [path.name for path in pretraining_config(config).data.train_paths] == ["spread.jsonl"]
    plain = load_config(EXAMPLES / "recipes" / "vapo_qwen2.5_32b.toml").config
    assert pretraining_config(plain).data.train_paths == plain.data.train_paths


def test_a_digest_sees_one_changed_bit() -> None:
    weights = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}
    before = weights_digest(weights)
    assert before == weights_digest({name: tensor.clone() for name, tensor in reversed(weights.items())})
    weights["b"][1] = 1.0078125
    assert weights_digest(weights) != before
