"""[precision]: contradictions with model.dtype, and shapes that FP8 cannot multiply."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_dapo.config import Config, validate
from megatron_dapo.config.layout_rules import unfit_shapes
from megatron_dapo.models.config_json import parse_architecture
from tests.unit.config import architectures
from tests.unit.config.small import make
from tests.unit.models.test_deepseek import PUBLISHED as DEEPSEEK
from tests.unit.models.test_glm import GLM
from tests.unit.models.test_qwen3_next import QWEN3_NEXT

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
    "intermediate_size": 6143,  # No layer has this size.
}
SEQUENCE = "parallel.tp_size=4 parallel.sequence_parallel=true"


def of_recipe(recipe: str, overrides: str = "") -> Config:
    return make(f"training.micro_batch_tokens=2048 precision.recipe={recipe} {overrides}")


@pytest.mark.parametrize(
    "overrides",
    [
        "",
        "precision.recipe=fp32",
        "model.dtype=bfloat16 precision.recipe=bf16 model.logprob_implementation=chunked_bf16",
        "precision.recipe=fp8_blockwise precision.num_layers_at_start_in_bf16=1",
        "model.dtype=bfloat16 precision.recipe=fp8_blockwise precision.num_layers_at_end_in_bf16=2 precision.fp8_param=true",
        "model.dtype=bfloat16 precision.recipe=fp8_delayed",
    ],
)
def test_these_agree(overrides: str) -> None:
    assert validate(make(f"training.micro_batch_tokens=2048 {overrides}"), architecture=QWEN_HALF_B) == []


FIRST, LAST = "precision.num_layers_at_start_in_bf16", "precision.num_layers_at_end_in_bf16"


@pytest.mark.parametrize(
    ("dtype", "recipe", "overrides", "path", "fix"),
    [
        ("float32", "bf16", "", "precision.recipe", 'model.dtype = "bfloat16"'),
        ("bfloat16", "fp32", "", "precision.recipe", 'model.dtype = "float32"'),
        ("bfloat16", "", f"{FIRST}=1", FIRST, "fp8_blockwise"),
        ("bfloat16", "bf16", f"{LAST}=1", LAST, "= 0"),
        ("bfloat16", "", "precision.fp8_param=true", "precision.fp8_param", "= false"),
        ("float32", "fp8_current", "precision.fp8_param=true", "precision.fp8_param", "bfloat16"),
        ("float32", "", "model.logprob_implementation=chunked_bf16", "model.logprob_implementation", "bfloat16"),
        ("float32", "", "model.attention_implementation=flash", "model.attention_implementation", '"auto"'),
        ("bfloat16", "fp8_delayed", f"{FIRST}=1", "precision.recipe", "fp8_blockwise"),
        ("bfloat16", "fp8_blockwise", f"{FIRST}=-1", FIRST, ">= 0"),
        (
            "bfloat16",
            "fp8_blockwise",
            "precision.fp8_param=true parallel.use_distributed_optimizer=false",
            "precision.fp8_param",
            "set parallel.use_distributed_optimizer = true",
        ),
    ],
)
def test_contradictions(dtype: str, recipe: str, overrides: str, path: str, fix: str) -> None:
    found = validate(of_recipe(recipe, f"model.dtype={dtype} {overrides}"))
    assert [violation.path for violation in found] == [path] and fix in found[0].suggestion


@pytest.mark.parametrize(
    ("changes", "overrides", "path", "words"),
    [
        ({"hidden_size": 900, "head_dim": 64}, "", "precision.recipe", "hidden_size % 128"),
        (
            {},
            "parallel.tp_size=2",
            "parallel.tp_size",
            "QKV rows, (num_attention_heads 14 + 2 num_key_value_heads 2) x head_dim 64",
        ),
        ({"intermediate_size": 5000}, "", "precision.recipe", "intermediate_size % 128"),
        ({"head_dim": 60}, "", "precision.recipe", "x head_dim 60 % 128"),
        (
            {**architectures.EXPERTS, **SIZES, "head_dim": 64, "moe_intermediate_size": 192},
            "",
            "precision.recipe",
            "moe_intermediate_size % 128 == 0",
        ),
        (
            {**EXPERTS, "moe_intermediate_size": 384},
            f"{SEQUENCE} parallel.ep_size=2",
            "parallel.tp_size",
            "moe_intermediate_size / parallel.etp_size (4) % 128 == 0",
        ),
        (
            {**EXPERTS, "moe_intermediate_size": 768},
            f"{SEQUENCE} parallel.ep_size=2 parallel.etp_size=4",
            "parallel.etp_size",
            "moe_intermediate_size / parallel.etp_size (4) % 128 == 0",
        ),
    ],
)
def test_shapes_are_named_with_the_multiple(changes: dict[str, Any], overrides: str, path: str, words: str) -> None:
    architecture = parse_architecture({**HALF_B, **changes})
    found = validate(
        of_recipe("fp8_blockwise", overrides), 16 if "ep_size" in overrides else None, architecture=architecture
    )
    assert found and {violation.path for violation in found} == {path}
    assert any(words in violation.formula for violation in found), [violation.formula for violation in found]


@pytest.mark.parametrize(
    ("model", "changes", "tensor", "formulas"),
    [
        (DEEPSEEK, {}, 8, []),
        (DEEPSEEK, {"kv_lora_rank": 500}, 1, ["kv_lora_rank % 128", "kv_lora_rank 500 + qk_rope_head_dim 64 % 16"]),
        (DEEPSEEK, {"q_lora_rank": 1500}, 1, ["q_lora_rank % 128"]),
        (DEEPSEEK, {"n_shared_experts": 3}, 16, []),
        (
            DEEPSEEK,
            {"num_attention_heads": 12, "num_key_value_heads": 12},
            4,
            ["num_attention_heads 12 x (qk_nope_head_dim 128 + qk_rope_head_dim 64) / parallel.tp_size (4) % 128"],
        ),
        (GLM, {}, 4, []),
        (GLM, {}, 8, ["n_shared_experts * moe_intermediate_size / parallel.tp_size (8) % 128"]),
        (QWEN3_NEXT, {}, 4, []),
        (
            QWEN3_NEXT,
            {},
            8,
            [
                "in_proj rows of beta and alpha, 2 linear_num_value_heads 32 / parallel.tp_size (8) % 16",
                "shared_expert_intermediate_size / parallel.tp_size (8) % 128",
            ],
        ),
        (
            QWEN3_NEXT,
            {"linear_value_head_dim": 97},
            1,
            [
                "in_proj rows of queries, keys, values and gates, 2 x (linear_num_key_heads 16 x linear_key_head_dim 128 + "
                "linear_num_value_heads 32 x linear_value_head_dim 97) % 128",
                "gated delta net outputs, linear_num_value_heads 32 x linear_value_head_dim 97 % 128",
            ],
        ),
    ],
)
def test_shapes_of_latent_attention_delta_nets_and_shared_experts(
    model: dict[str, Any], changes: dict[str, Any], tensor: int, formulas: list[str]
) -> None:
    """Of published models, which fit as far as docs/precision.md says, and with other sizes."""
    config = of_recipe("fp8_blockwise", f"parallel.tp_size={tensor} parallel.sequence_parallel=true parallel.etp_size=1")
    found = [one.formula for one in unfit_shapes(config, parse_architecture({**model, **changes}), "parallel")]
    assert found == [f"{formula} == 0 for precision.recipe = fp8_blockwise" for formula in formulas]


@pytest.mark.parametrize(
    ("inner", "overrides"),
    [
        (768, ""),
        (384, f"{SEQUENCE} parallel.ep_size=4 parallel.etp_size=1"),
        (768, "parallel.tp_size=2 parallel.sequence_parallel=true parallel.ep_size=8"),
    ],
)
def test_experts_are_cut_over_their_own_ranks(inner: int, overrides: str) -> None:
    architecture = parse_architecture({**HALF_B, **EXPERTS, "moe_intermediate_size": inner})
    assert validate(of_recipe("fp8_blockwise", overrides), world_size=16, architecture=architecture) == []


def test_layers_out_of_fp8_leave_some_and_fit_a_stage() -> None:
    config = of_recipe("fp8_blockwise", f"{FIRST}=12 {LAST}=12")
    assert [v.path for v in validate(config, architecture=QWEN_HALF_B)] == [FIRST]
    config = of_recipe("fp8_blockwise", f"parallel.pp_size=4 {LAST}=7")
    [found] = validate(config, architecture=QWEN_HALF_B)
    assert found.path == LAST and "= 6 or less" in found.suggestion


def test_a_micro_batch_holds_the_longest_sequence_with_the_recipe_s_padding() -> None:
    layout = "parallel.tp_size=2 parallel.sequence_parallel=true parallel.cp_size=2"
    [found] = validate(of_recipe("fp8_blockwise", f"{layout} training.micro_batch_tokens=511"))
    assert found.path == "training.micro_batch_tokens" and "= 512 or more" in found.suggestion
    assert validate(of_recipe("fp8_blockwise", layout)) == []


def test_a_critic_cut_otherwise_is_looked_at_too() -> None:
    config = of_recipe("fp8_blockwise", "algorithm.name=vapo critic.parallel.tp_size=2 parallel.num_processes=2")
    found = [violation for violation in validate(config, architecture=QWEN_HALF_B) if "multiple" in violation.values]
    assert {violation.path for violation in found} == {"critic.parallel.tp_size"}
    assert (
        "critic.parallel.tp_size (2)" in found[0].formula and "a smaller critic.parallel.tp_size" in found[0].suggestion
    )
