"""[precision]: contradictions with model.dtype, and shapes that FP8 cannot multiply."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_dapo.config import Config, config_from_dict, validate
from megatron_dapo.models.config_json import parse_architecture
from tests.unit.config import architectures

SIZES = {
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
}
HALF_B = {**architectures.QWEN_7B, **SIZES}
QWEN_HALF_B = parse_architecture(HALF_B)

EXPERTS = {
    **architectures.EXPERTS,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6143,  # of no layer
}
SEQUENCE = {"tp_size": 4, "sequence_parallel": True}


def make(dtype: str = "float32", parallel: dict[str, Any] | None = None, **precision: Any) -> Config:
    return config_from_dict(
        {
            "model": {"path": "/m", "dtype": dtype},
            "precision": precision,
            "parallel": parallel or {},
            "data": {"train_paths": ["/t"], "eval_paths": ["/e"], "max_prompt_tokens": 32},
            "rollout": {"prompts_per_step": 8, "group_size": 4, "max_response_tokens": 64},
            "training": {"mini_batch_prompts": 4, "micro_batch_tokens": 2048},
        }
    )


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [
        ("float32", {}),
        ("float32", {"recipe": "fp32"}),
        ("bfloat16", {"recipe": "bf16"}),
        ("float32", {"recipe": "fp8_blockwise", "num_layers_at_start_in_bf16": 1}),
        ("bfloat16", {"recipe": "fp8_blockwise", "num_layers_at_end_in_bf16": 2, "fp8_param": True}),
        ("bfloat16", {"recipe": "fp8_delayed"}),
    ],
)
def test_these_agree(dtype: str, precision: dict[str, Any]) -> None:
    assert validate(make(dtype, **precision), architecture=QWEN_HALF_B) == []


@pytest.mark.parametrize(
    ("dtype", "precision", "path", "fix"),
    [
        ("float32", {"recipe": "bf16"}, "precision.recipe", 'model.dtype = "bfloat16"'),
        ("bfloat16", {"recipe": "fp32"}, "precision.recipe", 'model.dtype = "float32"'),
        ("bfloat16", {"num_layers_at_start_in_bf16": 1}, "precision.num_layers_at_start_in_bf16", "fp8_blockwise"),
        ("bfloat16", {"recipe": "bf16", "num_layers_at_end_in_bf16": 1}, "precision.num_layers_at_end_in_bf16", "= 0"),
        ("bfloat16", {"fp8_param": True}, "precision.fp8_param", "= false"),
        ("float32", {"recipe": "fp8_current", "fp8_param": True}, "precision.fp8_param", "bfloat16"),
        ("bfloat16", {"recipe": "fp8_delayed", "num_layers_at_start_in_bf16": 1}, "precision.recipe", "fp8_blockwise"),
        (
            "bfloat16",
            {"recipe": "fp8_blockwise", "num_layers_at_start_in_bf16": -1},
            "precision.num_layers_at_start_in_bf16",
            ">= 0",
        ),
    ],
)
def test_contradictions(dtype: str, precision: dict[str, Any], path: str, fix: str) -> None:
    found = validate(make(dtype, **precision))
    assert [violation.path for violation in found] == [path] and fix in found[0].suggestion


def test_fp8_parameters_need_the_distributed_optimizer() -> None:
    parallel = {"use_distributed_optimizer": False}
    found = validate(make("bfloat16", parallel, recipe="fp8_blockwise", fp8_param=True))
    assert [violation.path for violation in found] == ["precision.fp8_param"]


@pytest.mark.parametrize(
    ("changes", "parallel", "path", "words"),
    [
        ({"hidden_size": 900, "head_dim": 64}, {}, "precision.recipe", "hidden_size % 128"),
        (
            {},
            {"tp_size": 2},
            "parallel.tp_size",
            "QKV rows, (num_attention_heads 14 + 2 num_key_value_heads 2) x head_dim 64",
        ),
        ({"intermediate_size": 5000}, {}, "precision.recipe", "intermediate_size % 128"),
        ({"head_dim": 60}, {}, "precision.recipe", "x head_dim 60 % 128"),
        (
            {**architectures.EXPERTS, **SIZES, "head_dim": 64, "moe_intermediate_size": 192},
            {},
            "precision.recipe",
            "moe_intermediate_size % 128 == 0",
        ),
        (
            {**EXPERTS, "moe_intermediate_size": 384},
            {**SEQUENCE, "ep_size": 2},
            "parallel.tp_size",
            "moe_intermediate_size / parallel.etp_size (4) % 128 == 0",
        ),
        (
            {**EXPERTS, "moe_intermediate_size": 768},
            {**SEQUENCE, "ep_size": 2, "etp_size": 4},
            "parallel.etp_size",
            "moe_intermediate_size / parallel.etp_size (4) % 128 == 0",
        ),
    ],
)
def test_shapes_are_named_with_the_multiple(
    changes: dict[str, Any], parallel: dict[str, Any], path: str, words: str
) -> None:
    config = make(parallel=parallel, recipe="fp8_blockwise")
    found = validate(
        config, world_size=16 if "ep_size" in parallel else None, architecture=parse_architecture({**HALF_B, **changes})
    )
    assert found and {violation.path for violation in found} == {path}
    assert any(words in violation.formula for violation in found), [violation.formula for violation in found]


@pytest.mark.parametrize(
    ("changes", "parallel"),
    [
        ({**EXPERTS, "moe_intermediate_size": 768}, {}),
        ({**EXPERTS, "moe_intermediate_size": 384}, {**SEQUENCE, "ep_size": 4, "etp_size": 1}),
        ({**EXPERTS, "moe_intermediate_size": 768}, {"tp_size": 2, "sequence_parallel": True, "ep_size": 8}),
    ],
)
def test_experts_are_cut_over_their_own_ranks(changes: dict[str, Any], parallel: dict[str, Any]) -> None:
    architecture = parse_architecture({**HALF_B, **changes})
    assert validate(make(parallel=parallel, recipe="fp8_blockwise"), world_size=16, architecture=architecture) == []


def test_layers_out_of_fp8_leave_some_and_fit_a_stage() -> None:
    config = make(recipe="fp8_blockwise", num_layers_at_start_in_bf16=12, num_layers_at_end_in_bf16=12)
    assert [v.path for v in validate(config, architecture=QWEN_HALF_B)] == ["precision.num_layers_at_start_in_bf16"]
    config = make(parallel={"pp_size": 4}, recipe="fp8_blockwise", num_layers_at_end_in_bf16=7)
    [found] = validate(config, architecture=QWEN_HALF_B)
    assert found.path == "precision.num_layers_at_end_in_bf16" and "= 6 or less" in found.suggestion


def test_a_micro_batch_holds_the_longest_sequence_with_the_recipe_s_padding() -> None:
    parallel = {"tp_size": 2, "sequence_parallel": True, "cp_size": 2}
    config = make(parallel=parallel, recipe="fp8_blockwise")
    small = config.model_copy(update={"training": config.training.model_copy(update={"micro_batch_tokens": 511})})
    [found] = validate(small)
    assert found.path == "training.micro_batch_tokens" and "= 512 or more" in found.suggestion
    assert validate(config) == []


def test_a_critic_cut_otherwise_is_looked_at_too() -> None:
    tree = {"algorithm": {"name": "vapo"}, "critic": {"parallel": {"tp_size": 2}}, "parallel": {"num_processes": 2}}
    config = make(recipe="fp8_blockwise").model_dump()
    config = config_from_dict({**config, **{name: {**config[name], **values} for name, values in tree.items()}})
    found = [violation for violation in validate(config, architecture=QWEN_HALF_B) if "multiple" in violation.values]
    assert {violation.path for violation in found} == {"critic.parallel.tp_size"}
    assert (
        "critic.parallel.tp_size (2)" in found[0].formula and "a smaller critic.parallel.tp_size" in found[0].suggestion
    )
