"""Keys of [megatron]: known, typed, denied with a reason, layered and overridden like any other key."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_dapo.config import ConfigError, load_config
from megatron_dapo.config.loader import read_resolved, write_resolved
from megatron_dapo.config.megatron_options import (
    DENIED,
    field_table,
    options_for,
    problem_with,
    reason_against,
    settable,
)
from megatron_dapo.config.validator import validate
from tools.megatron_fields import differences, installed

RECIPE = """
[model]
path = "model"
[data]
train_paths = ["train.jsonl"]
"""


def write(directory: Path, text: str, name: str = "recipe.toml") -> Path:
    path = directory / name
    path.write_text(text, encoding="utf-8")
    return path


def test_the_table_is_that_of_the_installed_version() -> None:
    [(version, directory)] = installed().items()
    assert differences(version, directory) == []
    assert version == importlib.metadata.version("megatron-core")


def test_every_denied_pattern_matches_a_field_and_no_settable_one_is_without_a_type() -> None:
    names = list(field_table())
    for pattern in DENIED:
        for alternative in re.split(r"\|(?![^()]*\))", pattern):
            assert any(re.fullmatch(alternative, name) for name in names), alternative
    assert all(field_table()[name]["kinds"] or reason_against(name) for name in names)
    assert len(settable()) > 50


def test_a_recipe_inherits_and_overrides_fields_one_by_one(tmp_path: Path) -> None:
    write(tmp_path, RECIPE + '[megatron]\noverlap_grad_reduce = true\nrecompute_modules = ["mlp"]\n', "base.toml")
    recipe = write(tmp_path, 'base = "base.toml"\n[megatron]\noverlap_grad_reduce = false\n')
    loaded = load_config(recipe, ["megatron.bucket_size=1000", "megatron.attention_backend=fused"])
    assert loaded.config.megatron == {
        "overlap_grad_reduce": False,
        "recompute_modules": ["mlp"],
        "bucket_size": 1000,
        "attention_backend": "fused",
    }
    assert loaded.origins["megatron.overlap_grad_reduce"] == str(recipe)
    assert loaded.origins["megatron.recompute_modules"].endswith("base.toml")
    assert loaded.origins["megatron.bucket_size"] == "--set"


def test_the_critic_has_the_policys_fields_and_its_own(tmp_path: Path) -> None:
    recipe = write(
        tmp_path, RECIPE + "[megatron]\nbucket_size = 8\nnccl_ub = true\n[critic.megatron]\nbucket_size = 9\n"
    )
    config = load_config(recipe).config
    assert config.critic_megatron == {"bucket_size": 9, "nccl_ub": True}
    assert config.megatron["bucket_size"] == 8


def test_a_written_configuration_reads_back_equal(tmp_path: Path) -> None:
    loaded = load_config(write(tmp_path, RECIPE + '[megatron]\noffload_modules = ["mlp"]\nbucket_size = 7\n'))
    write_resolved(loaded, tmp_path / "config.json")
    again = read_resolved(tmp_path / "config.json")
    assert again.config == loaded.config and again.origins == loaded.origins


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("tensor_model_parallel_size", 8, "set parallel.tp_size"),
        ("hidden_dropout", 0.1, "log-probs of the old policy"),
        ("adam_beta2", 0.95, "set [optimizer]"),
        ("fp8_recipe", "blockwise", "[precision]"),
        ("no_sync_func", "f", "function"),
        ("moe_aux_loss_coeff", 0.01, "change the loss"),
        ("use_megatron_fsdp", True, "data-parallel wrapper"),
        ("overlap_grad_reduc", True, "did you mean overlap_grad_reduce?"),
        ("overlap_grad_reduce", "yes", "true or false"),
        ("overlap_grad_reduce", 1, "true or false"),
        ("bucket_size", 1.5, "a whole number"),
        ("bucket_size", True, "a whole number"),
        ("attention_backend", "flsh", "'flash'"),
        ("recompute_modules", "mlp", "a list of text"),
        ("recompute_modules", [1], "a list of text"),
        ("wholly_unlike_anything", 1, "remove it"),
    ],
)
def test_unknown_mistyped_and_denied_keys_are_one_line_each(tmp_path: Path, key: str, value: Any, words: str) -> None:
    written = {True: "true", False: "false"}.get(value, value) if isinstance(value, bool) else value
    text = f'"{value}"' if isinstance(value, str) else written
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, RECIPE + f"[megatron]\n{key} = {text}\n"))
    [violation] = caught.value.violations
    assert violation.path == f"megatron.{key}"
    assert words in str(violation) and "recipe.toml" in str(violation) and "\n" not in str(violation)


def test_a_value_in_the_place_of_the_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected a table \[megatron\]"):
        load_config(write(tmp_path, "megatron = 3\n" + RECIPE))


def test_fields_go_to_the_parts_that_have_them() -> None:
    options = {"overlap_grad_reduce": True, "recompute_modules": ["mlp"], "log_num_zeros_in_grad": False}
    assert options_for("ddp", options) == {"overlap_grad_reduce": True}
    assert options_for("model", options) == {"recompute_modules": ["mlp"]}
    assert options_for("optimizer", options) == {"log_num_zeros_in_grad": False}


def test_whole_numbers_are_numbers() -> None:
    assert problem_with("activation_offload_fraction", 1) == ("", "")
    assert problem_with("cp_comm_type", ["p2p", "a2a"]) == ("", "")
    assert problem_with("cp_comm_type", "a2a+p2p") == ("", "")


@pytest.mark.parametrize(
    ("granularity", "line", "fits"),
    [
        ("selective", 'recompute_modules = ["mlp"]', True),
        ("none", 'recompute_modules = ["mlp"]', False),
        ("full", 'recompute_modules = ["mlp"]', False),
        ("full", "recompute_num_layers = 2", True),
        ("selective", 'recompute_method = "block"', False),
    ],
)
def test_options_of_recomputation_need_its_granularity(tmp_path: Path, granularity: str, line: str, fits: bool) -> None:
    recipe = write(tmp_path, RECIPE + f"[megatron]\n{line}\n")
    found = validate(load_config(recipe, [f"model.recompute_granularity={granularity}"]).config)
    assert [one.path for one in found] == ([] if fits else ["model.recompute_granularity"])


BF16, SEQUENCE = 'model.dtype="bfloat16"', ("parallel.tp_size=2", "parallel.sequence_parallel=true")
VAPO = ('algorithm.name="vapo"',)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ((BF16, *SEQUENCE), ""),
        (SEQUENCE, "model.dtype"),
        ((BF16, "parallel.tp_size=2"), "parallel.sequence_parallel"),
        ((BF16, *SEQUENCE, 'precision.recipe="fp8_blockwise"'), "computes_in_fp8"),
        ((BF16, *SEQUENCE, *VAPO), ""),
        ((BF16, *SEQUENCE, *VAPO, "critic.parallel.tp_size=1"), "critic.parallel.tp_size"),
        ((BF16, *SEQUENCE, *VAPO, "critic.parallel.num_processes=2"), "critic.parallel.num_processes"),
        ((BF16, *SEQUENCE, *VAPO, "critic.micro_batch_tokens=65536"), "critic.micro_batch_tokens"),
    ],
)
def test_overlapped_communication_needs_one_shape_for_all(
    tmp_path: Path, overrides: tuple[str, ...], problem: str
) -> None:
    recipe = write(tmp_path, RECIPE + "[megatron]\ntp_comm_overlap = true\n")
    found = [one for one in validate(load_config(recipe, overrides).config) if "tp_comm_overlap" in str(one)]
    assert [one.path for one in found] == (["megatron"] if problem else [])
    assert all(problem in one.values for one in found)
