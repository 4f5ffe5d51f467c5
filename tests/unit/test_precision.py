"""Recipes as facts, and padding from the local shard: any layout, any lengths."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dapo.models.parts.attention import GroupedQueryAttention
from megatron_dapo.models.parts.mlp import GatedMlp
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.precision import (
    RECIPES,
    LinearSize,
    micro_batch_multiple,
    misfits,
    padded_tokens,
    recipe_name,
    token_multiple,
)
from tests.examples import examples


def sizes_of(hidden: int, heads: int, groups: int, head_dim: int, inner: int) -> list[LinearSize]:
    """Sizes of grouped-query attention and of a gated MLP."""
    parts = GroupedQueryAttention(hidden, heads, groups, head_dim), GatedMlp(hidden, inner)
    return list(dict.fromkeys(size for part in parts for size in part.linear_sizes()))


QWEN_7B = sizes_of(3584, 28, 4, 128, 18944)
QWEN_HALF_B = sizes_of(896, 14, 2, 64, 4864)


@pytest.mark.parametrize(
    ("asked", "dtype", "name"),
    [
        ("", "float32", "fp32"),
        ("", "bfloat16", "bf16"),
        ("bf16", "bfloat16", "bf16"),
        ("fp8_blockwise", "float32", "fp8_blockwise"),
        ("fp8_blockwise", "bfloat16", "fp8_blockwise"),
    ],
)
def test_a_recipe_by_name_or_by_the_type(asked: str, dtype: str, name: str) -> None:
    assert recipe_name(asked, dtype) == name


@pytest.mark.parametrize(
    ("asked", "dtype", "words"),
    [
        ("bf16", "float32", "recipe bf16 is of a model in bfloat16, but the model is in float32"),
        ("fp32", "bfloat16", "recipe fp32 is of a model in float32, but the model is in bfloat16"),
        ("fp8", "bfloat16", "recipe 'fp8' is unknown; choose one of fp32, bf16, fp8_blockwise"),
        ("", "float16", "no recipe for a model in 'float16'"),
    ],
)
def test_contradictions_are_named(asked: str, dtype: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        recipe_name(asked, dtype)


@settings(max_examples=examples(300), deadline=None)
@given(
    num_tokens=st.integers(0, 5000),
    tensor=st.integers(1, 8),
    context=st.integers(1, 8),
    sequence=st.booleans(),
    recipe=st.sampled_from(sorted(RECIPES)),
)
def test_every_rank_s_own_tokens_are_aligned(
    num_tokens: int, tensor: int, context: int, sequence: bool, recipe: str
) -> None:
    sequence = sequence and tensor > 1
    padded = padded_tokens(num_tokens, tensor, context, sequence, recipe)
    assert padded >= num_tokens
    own, rest = divmod(padded, context * (tensor if sequence else 1))
    assert rest == 0 and own % RECIPES[recipe].token_multiple == 0
    assert context == 1 or padded % (2 * context) == 0
    # No smaller number does.
    step = micro_batch_multiple(tensor, context, sequence, token_multiple(recipe))
    assert all(
        (padded - less) % step for less in range(1, min(step, padded - num_tokens + 1)) if padded - less >= num_tokens
    )
    layout = ParallelLayout(
        tensor * context,
        tensor=tensor,
        context=context,
        sequence_parallel=sequence,
        token_multiple=token_multiple(recipe),
    )
    assert layout.micro_batch_alignment == step


@pytest.mark.parametrize(
    ("recipe", "sizes", "tensor", "words"),
    [
        ("fp8_blockwise", QWEN_7B, 1, []),
        ("fp8_blockwise", QWEN_7B, 4, []),
        ("fp8_blockwise", QWEN_HALF_B, 1, []),
        (
            "fp8_blockwise",
            QWEN_HALF_B,
            2,
            [
                (
                    "QKV rows, (num_attention_heads 14 + 2 num_key_value_heads 2) x head_dim 64 / parallel.tp_size (2) "
                    "= 576 is no multiple of 128"
                ),
                "attention outputs, num_attention_heads 14 x head_dim 64 / parallel.tp_size (2) = 448 is no multiple of 128",
            ],
        ),
        ("fp8_current", QWEN_HALF_B, 2, []),
        ("fp8_delayed", sizes_of(72, 4, 2, 18, 96), 1, ["hidden_size = 72 is no multiple of 16"]),
        ("bf16", sizes_of(71, 1, 1, 71, 97), 1, []),
    ],
)
def test_shapes_that_do_not_fit_are_named_with_size_and_multiple(
    recipe: str, sizes: list[LinearSize], tensor: int, words: list[str]
) -> None:
    found = [str(one) for one in misfits(recipe, sizes, tensor)]
    assert found[: len(words)] == words and bool(found) == bool(words)
