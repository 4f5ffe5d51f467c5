"""[precision]: contradictions with model.dtype, and shapes that FP8 cannot multiply."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_dapo.config import ArchitectureFacts, Config, config_from_dict, validate

QWEN_HALF_B = ArchitectureFacts(
    num_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    hidden_size=896,
    intermediate_size=4864,
    max_position_embeddings=32768,
)

EXPERTS = {
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6143,  # of no layer
    "num_experts": 8,
    "has_dense_layers": False,
}
SEQUENCE = {"tensor": 4, "sequence_parallel": True}


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
        ("float32", {"recipe": "fp8_blockwise", "bf16_first_layers": 1}),
        ("bfloat16", {"recipe": "fp8_blockwise", "bf16_last_layers": 2, "fp8_parameters": True}),
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
        ("bfloat16", {"bf16_first_layers": 1}, "precision.bf16_first_layers", "fp8_blockwise"),
        ("bfloat16", {"recipe": "bf16", "bf16_last_layers": 1}, "precision.bf16_last_layers", "= 0"),
        ("bfloat16", {"fp8_parameters": True}, "precision.fp8_parameters", "= false"),
        ("float32", {"recipe": "fp8_current", "fp8_parameters": True}, "precision.fp8_parameters", "bfloat16"),
        ("bfloat16", {"recipe": "fp8_delayed", "bf16_first_layers": 1}, "precision.recipe", "fp8_blockwise"),
        ("bfloat16", {"recipe": "fp8_blockwise", "bf16_first_layers": -1}, "precision.bf16_first_layers", ">= 0"),
    ],
)
def test_contradictions(dtype: str, precision: dict[str, Any], path: str, fix: str) -> None:
    found = validate(make(dtype, **precision))
    assert [violation.path for violation in found] == [path] and fix in found[0].suggestion


def test_fp8_parameters_need_the_distributed_optimizer() -> None:
    parallel = {"distributed_optimizer": False}
    found = validate(make("bfloat16", parallel, recipe="fp8_blockwise", fp8_parameters=True))
    assert [violation.path for violation in found] == ["precision.fp8_parameters"]


@pytest.mark.parametrize(
    ("changes", "parallel", "path", "words"),
    [
        ({"hidden_size": 900}, {}, "precision.recipe", "hidden_size % 128"),
        (
            {},
            {"tensor": 2},
            "parallel.tensor",
            "QKV rows, (num_attention_heads 14 + 2 num_key_value_heads 2) x head_dim 64",
        ),
        ({"intermediate_size": 5000}, {}, "precision.recipe", "intermediate_size % 128"),
        ({"head_dim": 60}, {}, "precision.recipe", "x head_dim 60 % 128"),
        (
            {"num_experts": 8, "moe_intermediate_size": 192, "has_dense_layers": False},
            {},
            "precision.recipe",
            "moe_intermediate_size % 128 == 0",
        ),
        (
            {**EXPERTS, "moe_intermediate_size": 384},
            {**SEQUENCE, "expert": 2},
            "parallel.tensor",
            "moe_intermediate_size / parallel.expert_tensor (4) % 128 == 0",
        ),
        (
            {**EXPERTS, "moe_intermediate_size": 768},
            {**SEQUENCE, "expert": 2, "expert_tensor": 4},
            "parallel.expert_tensor",
            "moe_intermediate_size / parallel.expert_tensor (4) % 128 == 0",
        ),
    ],
)
def test_shapes_are_named_with_the_multiple(
    changes: dict[str, Any], parallel: dict[str, Any], path: str, words: str
) -> None:
    config = make(parallel=parallel, recipe="fp8_blockwise")
    found = validate(
        config, world_size=16 if "expert" in parallel else None, architecture=replace(QWEN_HALF_B, **changes)
    )
    assert found and {violation.path for violation in found} == {path}
    assert any(words in violation.formula for violation in found), [violation.formula for violation in found]


@pytest.mark.parametrize(
    ("changes", "parallel"),
    [
        ({**EXPERTS, "moe_intermediate_size": 768}, {}),
        ({**EXPERTS, "moe_intermediate_size": 384}, {**SEQUENCE, "expert": 4, "expert_tensor": 1}),
        ({**EXPERTS, "moe_intermediate_size": 768}, {"tensor": 2, "sequence_parallel": True, "expert": 8}),
    ],
)
def test_experts_are_cut_over_their_own_ranks(changes: dict[str, Any], parallel: dict[str, Any]) -> None:
    architecture = replace(QWEN_HALF_B, **changes)
    assert validate(make(parallel=parallel, recipe="fp8_blockwise"), world_size=16, architecture=architecture) == []


def test_layers_out_of_fp8_leave_some_and_fit_a_stage() -> None:
    config = make(recipe="fp8_blockwise", bf16_first_layers=12, bf16_last_layers=12)
    assert [v.path for v in validate(config, architecture=QWEN_HALF_B)] == ["precision.bf16_first_layers"]
    config = make(parallel={"pipeline": 4}, recipe="fp8_blockwise", bf16_last_layers=7)
    [found] = validate(config, architecture=QWEN_HALF_B)
    assert found.path == "precision.bf16_last_layers" and "= 6 or less" in found.suggestion


def test_a_micro_batch_holds_the_longest_sequence_with_the_recipe_s_padding() -> None:
    parallel = {"tensor": 2, "sequence_parallel": True, "context": 2}
    config = make(parallel=parallel, recipe="fp8_blockwise")
    small = config.model_copy(update={"training": config.training.model_copy(update={"micro_batch_tokens": 511})})
    [found] = validate(small)
    assert found.path == "training.micro_batch_tokens" and "= 512 or more" in found.suggestion
    assert validate(config) == []


def test_a_critic_cut_otherwise_is_looked_at_too() -> None:
    tree = {"algorithm": {"name": "vapo"}, "critic": {"parallel": {"tensor": 2}}, "parallel": {"num_processes": 2}}
    config = make(recipe="fp8_blockwise").model_dump()
    config = config_from_dict({**config, **{name: {**config[name], **values} for name, values in tree.items()}})
    found = [violation for violation in validate(config, architecture=QWEN_HALF_B) if "multiple" in violation.values]
    assert {violation.path for violation in found} == {"critic.parallel.tensor"}
    assert (
        "critic.parallel.tensor (2)" in found[0].formula and "a smaller critic.parallel.tensor" in found[0].suggestion
    )
