"""Shipped recipes: each is parsed and validated; the AIME recipe is compared with the published values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_dapo.config import ArchitectureFacts, load_config, validate

ROOT = Path(__file__).resolve().parents[3]
RECIPES = sorted((ROOT / "examples").rglob("*.toml"))
QWEN_32B = ArchitectureFacts(
    num_layers=64,
    num_attention_heads=40,
    num_key_value_heads=8,
    hidden_size=5120,
    intermediate_size=27648,
    max_position_embeddings=131072,
)

# From the paper (arXiv 2503.14476) and, where it is silent, from the published script of the reproduction.
AIME_50: dict[str, Any] = {
    "algorithm.name": "dapo",
    "algorithm.advantage.name": "grpo",
    "algorithm.loss.name": "ppo_clip",
    "algorithm.loss.clip_ratio_low": 0.2,
    "algorithm.loss.clip_ratio_high": 0.28,
    "algorithm.loss.dual_clip": 10.0,
    "algorithm.loss.aggregation": "token_mean",
    "algorithm.entropy_coefficient": 0.0,
    "algorithm.kl_loss_coefficient": 0.0,
    "optimizer.clip_grad": 1.0,
    "optimizer.learning_rate": 1e-6,
    "optimizer.schedule": "constant",
    "optimizer.warmup_steps": 10,
    "optimizer.warmup_unit": "train_step",
    "optimizer.weight_decay": 0.1,
    "rollout.prompts_per_step": 512,
    "rollout.group_size": 16,
    "rollout.filter_groups": True,
    "rollout.accuracy_min": 0.0,
    "rollout.accuracy_max": 1.0,
    "rollout.temperature": 1.0,
    "rollout.top_p": 1.0,
    "rollout.top_k": 0,
    "rollout.max_response_tokens": 20480,
    "data.max_prompt_tokens": 2048,
    "data.deduplicate": True,
    "training.mini_batch_prompts": 32,
    "training.epochs": 1,
    "reward.verifier": "dapo",
    "reward.correct": 1.0,
    "reward.incorrect": -1.0,
    "reward.overlong_filter": False,
    "reward.overlong_punishment.enabled": True,
    "reward.overlong_punishment.max_length": 20480,
    "reward.overlong_punishment.cache_length": 4096,
    "reward.overlong_punishment.factor": 1.0,
    "evaluation.temperature": 1.0,
    "evaluation.top_p": 0.7,
    "evaluation.num_samples": 32,
}


# algorithms.md's values of the papers (arXiv 2504.05118, 2506.15050) and of T-PPO's public scripts.
VAPO: dict[str, Any] = {
    "algorithm.name": "vapo",
    "algorithm.loss.clip_ratio_low": 0.2,
    "algorithm.loss.clip_ratio_high": 0.28,
    "algorithm.loss.aggregation": "token_mean",
    "algorithm.positive_example_coefficient": 0.1,
    "advantage_estimation.gamma": 1.0,
    "advantage_estimation.lambda_rule": "length_adaptive",
    "advantage_estimation.lambda_alpha": 0.05,
    "advantage_estimation.critic_lambda": 1.0,
    "optimizer.learning_rate": 1e-6,
    "critic.optimizer.learning_rate": 2e-6,
    "rollout.prompts_per_step": 512,
    "rollout.group_size": 16,
    "rollout.filter_groups": False,
    "training.mini_batch_prompts": 32,
    "value_pretraining.max_steps": 50,
}
TPPO: dict[str, Any] = {
    "algorithm.name": "tppo",
    "algorithm.loss.clip_ratio_low": 0.2,
    "algorithm.loss.clip_ratio_high": 0.28,
    "algorithm.loss.dual_clip": 10.0,
    "algorithm.loss.aggregation": "rollout_token_mean",
    "algorithm.positive_example_coefficient": 0.1,
    "advantage_estimation.lambda_rule": "window",
    "advantage_estimation.lambda_alpha": 0.05,
    "advantage_estimation.lambda_floor": 0.95,
    "advantage_estimation.critic_lambda": 1.0,
    "advantage_estimation.clip": 10.0,
    "window.tokens": 8192,
    "window.ignored_tail_tokens": 8,
    "rollout.max_response_tokens": 24576,
    "rollout.group_size": 16,
    "optimizer.learning_rate": 8e-7,
    "optimizer.warmup_steps": 20,
    "optimizer.weight_decay": 0.1,
    "critic.optimizer.learning_rate": 2e-6,
    "critic.warmup_train_steps": 10,
    "critic.clip_value_low": 0.5,
    "critic.clip_value_high": 0.6,
    "critic.aggregation": "sample_mean",
    "training.epochs": 1,
}
PUBLISHED = [
    (name, path, expected) for name, table in (("vapo", VAPO), ("tppo", TPPO)) for path, expected in table.items()
]


def value(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = getattr(config, name)
    return config


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe_is_valid(recipe: Path) -> None:
    assert validate(load_config(recipe).config) == []


def test_there_are_recipes() -> None:
    assert {"quickstart", "dapo_qwen2.5_32b"} <= {path.stem for path in RECIPES}


@pytest.mark.parametrize("path", list(AIME_50))
def test_aime_value_is_published_one_and_stated_in_the_recipe(path: str) -> None:
    recipe = ROOT / "examples" / "recipes" / "dapo_qwen2.5_32b.toml"
    loaded = load_config(recipe)
    assert value(loaded.config, path) == AIME_50[path]
    assert loaded.origins[path] == str(recipe), f"{path} rests on a default that may change"


def test_aime_recipe_fits_its_model_and_nodes() -> None:
    config = load_config(ROOT / "examples" / "recipes" / "dapo_qwen2.5_32b.toml").config
    assert validate(config, world_size=128, architecture=QWEN_32B) == []
    optimizer_steps = config.rollout.prompts_per_step // config.training.mini_batch_prompts
    assert optimizer_steps == 16 and config.training.mini_batch_prompts * config.rollout.group_size == 512
    limit = config.rollout.max_num_gen_batches * config.rollout.prompts_per_step * config.rollout.oversample
    assert limit == 10 * 1536, "as many prompts a step as the published script allows"


@pytest.mark.parametrize(("name", "path", "expected"), PUBLISHED)
def test_value_of_a_critics_recipe_is_the_published_one_and_stated_in_it(name: str, path: str, expected: Any) -> None:
    recipe = ROOT / "examples" / "recipes" / f"{name}_qwen2.5_32b.toml"
    loaded = load_config(recipe)
    assert value(loaded.config, path) == expected
    assert loaded.origins[path] == str(recipe), f"{path} rests on a default, or on a recipe below, that may change"


@pytest.mark.parametrize("name", ["vapo", "tppo"])
def test_recipe_with_a_critic_fits_its_model_and_nodes(name: str) -> None:
    config = load_config(ROOT / "examples" / "recipes" / f"{name}_qwen2.5_32b.toml").config
    assert validate(config, world_size=128, architecture=QWEN_32B) == []


def test_quickstart_inputs_stand_beside_the_recipe() -> None:
    directory = ROOT / "examples" / "quickstart"
    config = load_config(directory / "quickstart.toml").config
    assert config.model.path == directory / "base_model"
    assert config.data.train_paths == (directory / "train.jsonl",) and config.data.eval_paths == (
        directory / "heldout.jsonl",
    )
    assert config.parallel.tp_size == 2 and config.num_processes == 2
