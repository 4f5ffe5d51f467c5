"""A configuration that is made from another one is validated like one that was loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_dapo.config import ConfigError, config_from_dict, load_config, validate
from megatron_dapo.config.derive import derive
from megatron_dapo.run.derive import for_evaluation, for_sampling, pretraining_config, sft_config

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
RECIPES = sorted((*(EXAMPLES / "quickstart").glob("*.toml"), *(EXAMPLES / "smollm2").glob("*.toml")))
WITH_CRITIC = [
    path
    for path in sorted(EXAMPLES.rglob("*.toml"))
    if ("vapo" in path.stem or "tppo" in path.stem) and path.parent.name != "grids"
]
VAPO = EXAMPLES / "quickstart" / "quickstart_vapo.toml"
TREE = {
    "model": {"path": "/m"},
    "data": {"train_paths": ["/t"], "eval_paths": ["/e"]},
    "algorithm": {"name": "vapo", "loss": {"name": "cispo"}},
    "megatron": {"moe_permute_fusion": True},
}


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"run": {"total_steps": "many"}}, "run.total_steps"),
        ({"filter_group": False}, "filter_group"),
        ({"rollout": {"filter_group": False}}, "rollout.filter_group"),
        ({"algorithm": {"gkl": {"coefficient": None}}}, "algorithm.gkl.coefficient"),
    ],
)
def test_a_wrong_name_or_type_is_refused(changes: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError) as error:
        derive(config_from_dict(TREE), changes)
    assert [violation.path for violation in error.value.violations] == [path]


def test_what_is_not_changed_stays() -> None:
    config = config_from_dict(TREE)
    assert derive(config, {}) == config
    changed = derive(config, {"run": {"total_steps": 7}})
    assert changed.run.total_steps == 7 and changed.run.seed == config.run.seed and changed.algorithm == config.algorithm


def test_runs_of_a_recipe_are_derived_from_it() -> None:
    teachers = {"teachers": [{"path": "/teacher"}]}
    config = config_from_dict({**TREE, "sglang": {"urls": ["http://host:1"]}, "distillation": teachers})
    assert not pretraining_config(config).distillation.teachers and not for_evaluation(config).distillation.teachers
    held_out = for_evaluation(config)
    assert held_out.data.train_paths == config.data.eval_paths and held_out.critic.path == ""
    assert held_out.sglang.weight_sync_transport == "disk"
    assert for_sampling(config).data.train_paths == config.data.train_paths


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_its_fine_tuning_is_a_valid_configuration(recipe: Path, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "3+3?", "response": "6"}\n' * 21)
    chosen = [f'sft.train_paths=["{data}"]', "sft.batch_size=8", "sft.epochs=2", "checkpoint.output_dir=/ck"]
    config = load_config(recipe, [*chosen, "sft.optimizer.learning_rate=2e-4"]).config
    tuned = sft_config(config)
    assert validate(tuned) == []
    assert tuned.run.total_steps == 6 and tuned.optimizer.learning_rate == 2e-4 and not tuned.has_critic
    assert tuned.algorithm.name == "sft" and tuned.rollout.prompts_per_step == 8
    assert tuned.run.output_dir == config.run.output_dir / "sft" and tuned.checkpoint_dir == Path("/ck/sft")
    assert sft_config(config, tmp_path).run.output_dir == tmp_path


SAMPLING = (
    "rollout.oversample=1.0",
    "rollout.max_staleness=0",
    "rollout.dynamic_sampling=soft",
    "rollout.budget.enabled=true",
    "rollout.budget.max_size=16",
    "rollout.budget.min_size=2",
    "rollout.prompt_order=priority",
    "rollout.prompt_filter.name=model",
)
INJECTION = ('data.injection.templates=["noise"]',)
OLD_LOGPROBS = ("training.old_logprobs=rollout",)


@pytest.mark.parametrize("chosen", [SAMPLING, INJECTION, OLD_LOGPROBS])
def test_fine_tuning_drops_what_the_recipe_samples_by(chosen: tuple[str, ...]) -> None:
    config = load_config(EXAMPLES / "quickstart" / "quickstart.toml", chosen).config
    assert validate(config) == []
    tuned = sft_config(config)
    assert validate(tuned) == [] and not tuned.data.injection.templates


def test_given_responses_have_no_variants_of_their_prompts() -> None:
    config = load_config(EXAMPLES / "quickstart" / "quickstart.toml", INJECTION).config
    broken = validate(sft_config(config).model_copy(update={"data": config.data}))
    (violation,) = [one for one in broken if one.path == "data.injection.templates"]
    assert "data.injection.templates = []" in violation.suggestion


# ---- value pretraining


@pytest.mark.parametrize("recipe", WITH_CRITIC, ids=lambda path: path.stem)
def test_its_pretraining_is_a_valid_configuration(recipe: Path) -> None:
    config = load_config(recipe).config
    pretraining = pretraining_config(config)
    assert validate(pretraining) == []
    assert pretraining.run.total_steps == config.value_pretraining.max_steps
    assert not pretraining.rollout.filter_groups and pretraining.algorithm.name == "vapo"


def test_there_are_recipes_of_both() -> None:
    assert {path.stem.split("_")[0] for path in WITH_CRITIC} >= {"quickstart", "vapo", "tppo"} and len(WITH_CRITIC) >= 4


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
