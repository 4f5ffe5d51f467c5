"""Shipped recipes: each is parsed and validated; the AIME recipe is compared with the published values."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from megatron_dapo.config import load_config, validate
from megatron_dapo.config.schema import leaf_fields
from megatron_dapo.models.config_json import parse_architecture
from megatron_dapo.rewards.verifiers.verifier import SET_PRESETS
from tests.unit.config import architectures

ROOT = Path(__file__).resolve().parents[3]
TOML_FILES = sorted((ROOT / "examples").rglob("*.toml"))
RECIPES = [
    path for path in TOML_FILES if "[[variants]]" not in path.read_text(encoding="utf-8")
]  # the others are grids
QWEN_32B = parse_architecture(architectures.QWEN_32B)

def by_path(sections: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {f"{section}.{name}": value for section, fields in sections.items() for name, value in fields.items()}


# From the paper (arXiv 2503.14476) and, for what it does not state, from the published script of the reproduction.
CLIP_HIGHER = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
AIME_50 = by_path(
    {
        "algorithm": {"name": "dapo", "entropy_coefficient": 0.0, "kl_loss_coefficient": 0.0},
        "algorithm.advantage": {"name": "grpo"},
        "algorithm.loss": {"name": "ppo_clip", **CLIP_HIGHER, "dual_clip": 10.0, "aggregation": "token_mean"},
        "optimizer": {
            **{"clip_grad": 1.0, "learning_rate": 1e-6, "schedule": "constant", "weight_decay": 0.1},
            **{"warmup_steps": 10, "warmup_unit": "train_step"},
        },
        "rollout": {
            **{"prompts_per_step": 512, "group_size": 16, "max_response_tokens": 20480},
            **{"filter_groups": True, "dynamic_sampling": "hard", "accuracy_min": 0.0, "accuracy_max": 1.0},
            **{"temperature": 1.0, "top_p": 1.0, "top_k": 0},
        },
        "data": {"max_prompt_tokens": 2048, "deduplicate": True},
        "training": {"mini_batch_prompts": 32, "epochs": 1},
        "reward": {"verifier": "dapo", "correct": 1.0, "incorrect": -1.0, "overlong_filter": False},
        "reward.overlong_punishment": {"enabled": True, "max_length": 20480, "cache_length": 4096, "factor": 1.0},
        "evaluation": {"temperature": 1.0, "top_p": 0.7, "num_samples": 32},
    }
)
# algorithms.md's values of the papers (arXiv 2504.05118, 2506.15050) and of T-PPO's public scripts.
VAPO = by_path(
    {
        "algorithm": {"name": "vapo", "positive_example_coefficient": 0.1},
        "algorithm.loss": {**CLIP_HIGHER, "aggregation": "token_mean"},
        "advantage_estimation": {
            **{"gamma": 1.0, "lambda_rule": "length_adaptive", "lambda_alpha": 0.05, "critic_lambda": 1.0}
        },
        "optimizer": {"learning_rate": 1e-6},
        "critic.optimizer": {"learning_rate": 2e-6},
        "rollout": {"prompts_per_step": 512, "group_size": 16, "filter_groups": False},
        "training": {"mini_batch_prompts": 32},
        "value_pretraining": {"min_steps": 50, "max_steps": 50},
    }
)
TPPO = by_path(
    {
        "algorithm": {"name": "tppo", "positive_example_coefficient": 0.1},
        "algorithm.loss": {**CLIP_HIGHER, "dual_clip": 10.0, "aggregation": "rollout_token_mean"},
        "advantage_estimation": {
            **{"lambda_rule": "window", "lambda_alpha": 0.05, "lambda_floor": 0.95, "critic_lambda": 1.0, "clip": 10.0}
        },
        "window": {"tokens": 8192, "ignored_tail_tokens": 8},
        "rollout": {"max_response_tokens": 24576, "group_size": 16},
        "optimizer": {"learning_rate": 8e-7, "warmup_steps": 20, "weight_decay": 0.1},
        "critic": {"warmup_train_steps": 10, "clip_value_low": 0.5, "clip_value_high": 0.6, "aggregation": "sample_mean"},
        "critic.optimizer": {"learning_rate": 2e-6},
        "training": {"epochs": 1},
    }
)
# Values that the papers themselves name; others in a recipe are the script's, or ours, and say so.
IN_PAPER: dict[str, dict[str, Any]] = {
    "dapo": {
        **{
            path: AIME_50[path]
            for path in AIME_50
            if path.startswith(("algorithm.", "rollout.", "reward.", "evaluation."))
        },
        **{"optimizer.learning_rate": 1e-6, "optimizer.schedule": "constant", "optimizer.warmup_steps": 20},
        **{"optimizer.warmup_unit": "train_step", "training.mini_batch_prompts": 32},
        "evaluation.max_response_tokens": 20480,
    },
    "vapo": {
        **VAPO,
        **{"run.total_steps": 320, "optimizer.schedule": "constant", "critic.optimizer.schedule": "constant"},
        **{"critic.mini_batch_prompts": 0, "critic.warmup_train_steps": 0, "evaluation.num_samples": 32},
        "algorithm.loss.name": "ppo_clip",
    },
    "tppo": by_path(
        {
            "algorithm": {"name": "tppo"},
            "algorithm.loss": {"name": "ppo_clip", **CLIP_HIGHER},
            "advantage_estimation": {"gamma": 1.0, "critic_lambda": 1.0},
            "window": {"tokens": 8192},
            "rollout": {
                **{"prompts_per_step": 512, "group_size": 16, "max_response_tokens": 24576, "filter_groups": False}
            },
            "critic": {"mini_batch_prompts": 0},
            "evaluation": {"num_samples": 32, "max_response_tokens": 24576},
        }
    ),
}
# The papers are silent on these, or name another value.
for path in (
    "algorithm.loss.dual_clip algorithm.entropy_coefficient rollout.temperature rollout.top_p rollout.top_k reward.overlong_filter"
).split():
    del IN_PAPER["dapo"][path]
LEARNING = ("run", "data", "rollout", "reward", "algorithm", "training", "optimizer", "evaluation")
CRITICS = ("critic", "advantage_estimation", "value_pretraining")
# Of those sections: paths, limits, and records, which change no gradient ...
OPERATIONAL = """
    run.name run.output_dir run.group_readable run.deterministic run.max_generation_steps run.max_train_seconds
    run.wait_timeout_seconds run.hang_timeout_seconds run.node_timeout_seconds run.stopped_timeout_seconds run.max_fruitless_attempts run.max_node_failures run.stop_notice_seconds run.ignore_estimates data.train_paths data.eval_paths data.sources data.chat_template_options data.columns.prompt data.columns.answer reward.concurrency reward.batch_size
    rollout.slots_per_rank reward.num_workers reward.memory_limit_mb reward.file_limit_mb reward.max_processes reward.environment reward.answer_format
    training.micro_batch_tokens training.max_consecutive_skips evaluation.interval evaluation.at_start evaluation.at_end
    critic.path critic.offload critic.micro_batch_tokens critic.explained_variance_alarm value_pretraining.train_paths
    rollout.engine reward.shadow_verifier data.max_epochs run.callbacks critic.megatron
    optimizer.implementation critic.optimizer.implementation optimizer.on_host critic.optimizer.on_host
""".split()
# ... and those without effect because another value of these recipes switches them off.
SWITCHED_OFF = """
    reward.allow_overlong_filter_and_punishment algorithm.kl_estimator algorithm.kl_reward_estimator
    algorithm.loss.aggregation_length optimizer.min_learning_rate critic.optimizer.min_learning_rate
    data.held_out_share data.injection.when data.injection.rate data.injection.ramp_prompts reward.format.markers reward.perplexity_penalty.start
    reward.perplexity_penalty.end reward.perplexity_penalty.low_start reward.perplexity_penalty.low_end
    reward.perplexity_penalty.factor algorithm.gkl.gamma algorithm.gkl.weigh_by algorithm.gkl.weighted_mse
    algorithm.gkl.cross_entropy
    rollout.budget.min_size rollout.budget.max_size rollout.budget.prompt_weight rollout.prompt_filter.margin
    rollout.prompt_filter.audit_share
    value_pretraining.explained_variance_slope value_pretraining.loss_slope advantage_estimation.policy_lambda
    reward.mix reward.token_ids reward.format.pattern data.order rollout.group_filter algorithm.credit algorithm.turn_discount
""".split()
# Settings of presets that these recipes do not reward by.
SWITCHED_OFF += [
    path
    for path in leaf_fields()
    if path.startswith(tuple(f"reward.{name}." for name in SET_PRESETS if name != "format"))
]
WITHOUT_CRITIC = ("algorithm.kl_reward_coefficient", "algorithm.positive_example_coefficient")
# A critic's advantage takes the place of the group's, and nothing is filtered, corrected or punished for its length.
WITH_CRITIC = """
    algorithm.advantage. algorithm.off_policy.level algorithm.off_policy.low algorithm.off_policy.high
    algorithm.off_policy.batch_normalize rollout.accuracy_ rollout.dynamic_sampling rollout.max_num_gen_batches rollout.on_exhausted
    reward.overlong_punishment.max_length reward.overlong_punishment.cache_length reward.overlong_punishment.factor
""".split()


def value(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = getattr(config, name)
    return config


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe_is_valid(recipe: Path) -> None:
    assert validate(load_config(recipe).config) == []


def test_there_are_recipes() -> None:
    assert {"quickstart", "dapo_qwen2.5_32b"} <= {path.stem for path in RECIPES}


@pytest.mark.parametrize(("name", "published"), [("dapo", AIME_50), ("vapo", VAPO), ("tppo", TPPO)])
def test_published_values_are_stated_in_the_recipe(name: str, published: dict[str, Any]) -> None:
    """A value that rests on a default, or on a recipe below, may change."""
    loaded, recipe = load_config(recipe_of(name)), str(recipe_of(name))
    found = {path: (value(loaded.config, path), loaded.origins[path]) for path in published}
    assert found == {path: (expected, recipe) for path, expected in published.items()}


def test_recipes_fit_their_model_and_nodes() -> None:
    for name in ("dapo", "vapo", "tppo"):
        assert validate(load_config(recipe_of(name)).config, world_size=128, architecture=QWEN_32B) == []
    config = load_config(recipe_of("dapo")).config
    optimizer_steps = config.rollout.prompts_per_step // config.training.mini_batch_prompts
    assert optimizer_steps == 16 and config.training.mini_batch_prompts * config.rollout.group_size == 512
    limit = config.rollout.max_num_gen_batches * config.rollout.prompts_per_step * config.rollout.oversample
    assert limit == 10 * 1536, "as many prompts a step as the published script allows"


def recipe_of(name: str) -> Path:
    return ROOT / "examples" / "recipes" / f"{name}_qwen2.5_32b.toml"


def learning_values(name: str) -> list[str]:
    """Paths of everything in a recipe's configuration that affects what is learned."""
    config = load_config(recipe_of(name)).config
    sections = LEARNING + (CRITICS if name != "dapo" else ()) + (("window",) if name == "tppo" else ())
    found = []
    for path in leaf_fields():
        is_off = path in SWITCHED_OFF or (
            path in WITHOUT_CRITIC if name == "dapo" else path.startswith(tuple(WITH_CRITIC))
        )
        if path.split(".")[0] not in sections or path in OPERATIONAL or is_off or path.startswith("critic.parallel."):
            continue
        try:  # a field of another member of a union
            value(config, path)
        except AttributeError:
            continue
        found.append(path)
    return found


@pytest.mark.parametrize("name", ["dapo", "vapo", "tppo"])
def test_every_value_that_affects_learning_is_stated(name: str) -> None:
    """In the recipe or in those it is based on: none rests on a default that may change."""
    origins = load_config(recipe_of(name)).origins
    recipes = {str(recipe_of(one)) for one in IN_PAPER}
    assert len(learning_values(name)) > 45
    assert [path for path in learning_values(name) if origins.get(path, "default") not in recipes] == []


@pytest.mark.parametrize("name", ["dapo", "vapo", "tppo"])
def test_every_value_that_is_not_the_papers_is_marked(name: str) -> None:
    """By "script" or "ours" on its line, and ours with a reason."""
    config, unmarked = load_config(recipe_of(name)).config, []
    bases = ("dapo", "vapo", "tppo")  # each is based on the one before
    lines = {}
    for base in bases[: bases.index(name) + 1]:
        lines |= stated_lines(recipe_of(base))
    for path in learning_values(name):
        _, _, mark = lines[path].partition("#")
        is_papers = IN_PAPER[name].get(path) == value(config, path)
        if not is_papers and not re.search(r"script\b|ours: \S|ours, see above|ours, as above", mark):
            unmarked.append(f"{path}: {lines[path]}")
    assert unmarked == []


# Values of learning in which DAPO's recipes of other models differ from that of the published run.
OTHER_MODELS: dict[str, dict[str, Any]] = {
    "dapo_qwen2.5_7b": {},
    "dapo_qwen2.5_14b": {},
    "dapo_qwen3_30b_a3b": {"rollout.routing_replay": True},
    "dapo_qwen3_235b_a22b": {"rollout.routing_replay": True},
}


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_other_models_learn_by_the_published_hyper_parameters(name: str) -> None:
    recipe = ROOT / "examples" / "recipes" / f"{name}.toml"
    published, config = load_config(recipe_of("dapo")).config, load_config(recipe).config
    found = {path: value(config, path) for path in learning_values("dapo")}
    changed = {path: found[path] for path in found if found[path] != value(published, path)}
    assert changed == OTHER_MODELS[name]
    lines = stated_lines(recipe)
    assert all(re.search(r"# ours: \S", lines[path]) for path in changed)


def stated_lines(recipe: Path) -> dict[str, str]:
    """Lines of a recipe by the path that they set."""
    section, lines = "", {}
    for line in recipe.read_text(encoding="utf-8").splitlines():
        if match := re.fullmatch(r"\[([\w.]+)\]", line):
            section = match[1]
        elif match := re.match(r"(\w+) = ", line):
            lines[f"{section}.{match[1]}"] = line
    return lines


def test_quickstart_inputs_stand_beside_the_recipe() -> None:
    directory = ROOT / "examples" / "quickstart"
    config = load_config(directory / "quickstart.toml").config
    assert config.model.path == directory / "base_model"
    assert config.data.train_paths == (directory / "train.jsonl",) and config.data.eval_paths == (
        directory / "heldout.jsonl",
    )
    assert config.parallel.tp_size == 2 and config.num_processes == 2


def test_documented_choices_of_what_to_sample_are_valid() -> None:
    text = re.sub(r"\\\n\s*", "", (ROOT / "docs" / "sampling.md").read_text(encoding="utf-8"))
    lines = re.findall(r"megatron-dapo train (\S+)((?: --set \S+)+)", text)
    settings: list[list[str]] = []
    for recipe, overrides in lines:
        chosen = [word for word in overrides.split() if word != "--set"]
        assert validate(load_config(ROOT / recipe, chosen).config) == [], overrides
        settings.append(chosen)
    for last in settings[3:]:
        together = [*sum(settings[:3], []), *last]
        assert validate(load_config(ROOT / "examples" / "quickstart" / "quickstart.toml", together).config) == []
    assert {word.partition("=")[0] for chosen in settings for word in chosen} >= {
        "rollout.budget.enabled",
        "rollout.prompt_filter.name",
        "rollout.prompt_order",
        "rollout.replay_order",
        "rollout.dynamic_sampling",
    }
