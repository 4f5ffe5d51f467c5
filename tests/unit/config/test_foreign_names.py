"""Keys and values of other systems are answered by fields and values that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_dapo.config import ConfigError, load_config
from megatron_dapo.config.foreign_names import KEYS, VALUES, counterpart
from megatron_dapo.config.loader import _words
from megatron_dapo.config.schema import leaf_fields, section_types, union_names

FIELD = re.compile(r"\b[a-z_]+(?:\.[a-z_0-9]+)+")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text('[model]\npath = "model"\n[data]\ntrain_paths = ["train.jsonl"]\n')
    return path


def test_what_the_table_names_exists() -> None:
    known = {*leaf_fields(), *section_types()}
    for text in (*KEYS.values(), *(note for notes in VALUES.values() for note in notes.values())):
        assert all(name in known for name in FIELD.findall(text)), text
    for field, notes in VALUES.items():
        choices = union_names(field.removesuffix(".name")) or _words(leaf_fields()[field])
        for theirs, ours in notes.items():
            first = re.split(r"[ :]", ours)[0]
            assert theirs not in choices and (first in choices or first in known), (field, theirs)


def test_no_field_of_this_package_is_taken_for_another_systems_key() -> None:
    assert not [path for path in leaf_fields() if KEYS.get(path)]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rollout.num_generations=8", "did you mean rollout.group_size?"),
        ("actor_rollout_ref.rollout.n=8", "did you mean rollout.group_size?"),
        ("rollout.n=8", "did you mean rollout.group_size?"),
        ("beta=0.0", "did you mean algorithm.kl_loss_coefficient"),
        ("algorithm.epsilon_high=0.28", "did you mean algorithm.loss.clip_ratio_high?"),
        ("model.lora_rank=8", "did you mean model.lora.rank?"),
        ("model.device=cuda", "set CUDA_VISIBLE_DEVICES"),
        ("rollout.engine=vllm", "vllm is sglang"),
        ("algorithm.name=grpo", 'grpo is dapo with algorithm.advantage = "grpo", loss = "ppo_clip"'),
        ("algorithm.loss.aggregation=seq-mean-token-mean", "seq-mean-token-mean is sample_mean"),
        ("run.total_steps=1e3", "run.total_steps = 1000"),
    ],
)
def test_names_of_other_systems_are_answered(override: str, words: str, recipe: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(recipe, [override])
    assert words in str(error.value)


def test_a_section_of_another_system_is_answered_key_by_key(recipe: Path) -> None:
    recipe.write_text(recipe.read_text() + "[actor_rollout_ref.rollout]\nn = 8\n[actor_rollout_ref.actor.optim]\nlr = 1e-6\n")
    with pytest.raises(ConfigError) as error:
        load_config(recipe)
    assert "actor_rollout_ref.rollout.n is rollout.group_size" in str(error.value)
    assert "actor_rollout_ref.actor.optim.lr is optimizer.learning_rate" in str(error.value)
    assert counterpart("trainer.unheard_of") is None
