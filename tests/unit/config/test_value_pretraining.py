"""Configuration of value pretraining: differences from its recipe, and its overrides."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_dapo.config import load_config, validate
from megatron_dapo.run.derive import pretraining_config

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
RECIPES = [
    path
    for path in sorted(EXAMPLES.rglob("*.toml"))
    if ("vapo" in path.stem or "tppo" in path.stem) and path.parent.name != "grids"
]
VAPO = EXAMPLES / "quickstart" / "quickstart_vapo.toml"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_its_pretraining_is_a_valid_configuration(recipe: Path) -> None:
    config = load_config(recipe).config
    pretraining = pretraining_config(config)
    assert validate(pretraining) == []
    assert pretraining.run.total_steps == config.value_pretraining.max_steps
    assert not pretraining.rollout.filter_groups and pretraining.algorithm.name == "vapo"


def test_there_are_recipes_of_both() -> None:
    assert {path.stem.split("_")[0] for path in RECIPES} >= {"quickstart", "vapo", "tppo"} and len(RECIPES) >= 4


def test_prompts_are_its_own_where_they_are_named() -> None:
    assert [path.name for path in pretraining_config(load_config(VAPO).config).data.train_paths] == ["spread.jsonl"]
    plain = load_config(EXAMPLES / "recipes" / "vapo_qwen2.5_32b.toml").config
    assert pretraining_config(plain).data.train_paths == plain.data.train_paths


def test_it_never_writes_where_the_run_will() -> None:
    """A run that found the checkpoints of pretraining would resume from them, with most of its steps done."""
    plain = load_config(VAPO).config
    apart = load_config(VAPO, ["checkpoint.output_dir=/ck"]).config
    assert pretraining_config(plain).checkpoint_dir == plain.run.output_dir / "value_pretraining" / "checkpoints"
    assert pretraining_config(apart).checkpoint_dir == Path("/ck/value_pretraining")
    given = pretraining_config(apart, Path("/given"))
    assert (given.run.output_dir, given.checkpoint_dir) == (Path("/given"), Path("/ck/value_pretraining"))


def test_a_recipe_may_name_the_critic_that_its_pretraining_writes() -> None:
    written = "runs/quickstart-vapo/value_pretraining/critic"
    assert pretraining_config(load_config(VAPO, [f"critic.path={written}"]).config).critic.path == ""
    assert pretraining_config(load_config(VAPO, ["critic.path=reward_model"]).config).critic.path == "reward_model"
    separate = pretraining_config(load_config(VAPO, [f"critic.path={written}"]).config, Path("/given"))
    assert separate.critic.path == written


def test_few_steps_are_enough_whatever_the_policys_schedule() -> None:
    few = ["value_pretraining.min_steps=2", "value_pretraining.max_steps=2"]
    policy = [*few, 'optimizer.schedule="linear"', "optimizer.warmup_steps=8"]
    assert validate(pretraining_config(load_config(VAPO, [*policy, "critic.optimizer.warmup_steps=1"]).config)) == []


def test_the_critics_schedule_has_the_same_rule_in_both() -> None:
    decaying = ['critic.optimizer.schedule="cosine"', "critic.optimizer.warmup_steps=30"]
    config = load_config(VAPO, decaying).config  # 24 train steps, 30 of pretraining at most
    for one, total in ((config, 24), (pretraining_config(config), 30)):
        (found,) = validate(one)
        assert found.path == "critic.optimizer.warmup_steps" and found.values["critic_scheduled_steps"] == total
        assert found.suggestion == f"set critic.optimizer.warmup_steps below {total}"
    enough = load_config(VAPO, [*decaying, 'critic.optimizer.warmup_unit="optimizer_step"']).config
    assert validate(enough) == []  # 8 mini-batches a train step
