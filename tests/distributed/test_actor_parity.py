from __future__ import annotations

from typing import Any

import pytest
from launcher import require_parity

ALL_LOGITS = 1 << 30
BUCKETS = {"overlap_grad_reduce": True, "bucket_size": 4096}  # elements of a bucket
FIXED = 128  # more than the longest micro-batch with its padding
BLOCK = {"recompute_method": "block", "recompute_num_layers": 1}
TENSOR_PIPELINE = {"tensor": 2, "pipeline": 2}
VIRTUAL = {"pipeline": 2, "virtual_pipeline": 2}
SEQUENCE = {"tensor": 2, "sequence_parallel": True}
CONTEXT_SEQUENCE = {"context": 2, **SEQUENCE}
# Each path of the code once; tests/families has every family in every layout.
CASES: list[dict[str, Any]] = [
    {"model": "llama3", "layout": VIRTUAL},
    {"model": "gemma3", "layout": CONTEXT_SEQUENCE},
    {"model": "qwen3", "layout": {"tensor": 4}},  # more tensor ranks than key-value heads
    {"model": "qwen2-tied", "layout": {"pipeline": 4}, "distributed": False},
    {"model": "qwen2", "layout": {"context": 4}, "recompute": "selective"},
    {"model": "qwen3", "layout": {**TENSOR_PIPELINE, "sequence_parallel": True}, "recompute": "full"},
    {
        "model": "qwen2-tied",
        "layout": {**TENSOR_PIPELINE, "first_stage_layers": 3, "last_stage_layers": 1},
        "recompute": "full",
        "megatron": BLOCK,
    },
    # Micro-batches of equal length, whose stages do not exchange lengths.
    {"model": "qwen3", "layout": VIRTUAL, "padded": True, "keep_bytes": ALL_LOGITS},
    {"model": "qwen3-moe", "layout": {"expert": 2, "pipeline": 2}, "padded": True},
    # All of one length, as buffers of an overlapped communication need it.
    {"model": "qwen3-moe", "layout": {"pipeline": 2, **SEQUENCE}, "fixed_tokens": FIXED},
    # Gradients summed in small buckets while the backward pass goes on.
    {"model": "llama3", "layout": {}, "megatron": BUCKETS, "keep_bytes": ALL_LOGITS},
]
MORE: list[dict[str, Any]] = [
    {"model": "llama3", "layout": CONTEXT_SEQUENCE, "megatron": BUCKETS, "keep_bytes": ALL_LOGITS},
    {"model": "qwen3", "layout": {"pipeline": 2}, "recompute": "full", "megatron": BLOCK},
    {"model": "qwen3", "layout": {"pipeline": 2, "first_stage_layers": 1}},
    {"model": "qwen2", "layout": {"pipeline": 2}, "padded": True},
    {"model": "llama3", "layout": {**TENSOR_PIPELINE, "sequence_parallel": True}, "padded": True},
    {"model": "qwen2-tied", "layout": {"context": 2, "pipeline": 2}, "padded": True},
    {"model": "qwen2", "layout": SEQUENCE, "fixed_tokens": FIXED},
    {"model": "qwen3", "layout": CONTEXT_SEQUENCE, "fixed_tokens": FIXED},
    {"model": "qwen2", "layout": {}, "megatron": BUCKETS},
    {"model": "qwen2-tied", "layout": {"pipeline": 2}, "megatron": BUCKETS},
    {"model": "qwen3", "layout": VIRTUAL, "megatron": BUCKETS},
    {"model": "qwen3-moe", "layout": {"expert": 2}, "megatron": BUCKETS, "distributed": False},
    {"model": "qwen2", "layout": {"tensor": 2}, "recompute": "selective", "megatron": {"recompute_modules": ["mlp"]}},
    {"model": "gemma3", "layout": {"tensor": 4}, "recompute": "full"},
    {"model": "gemma3", "layout": {"context": 4}, "recompute": "selective"},
]


@pytest.mark.parametrize("cases", [CASES, pytest.param(MORE, marks=pytest.mark.long)], ids=["each path", "more"])
def test_every_layout_gives_the_logprobs_and_gradients_of_transformers(
    cases: list[dict[str, Any]], actor_references: str
) -> None:
    """4 ranks, ragged packed batch, fp32 against fp64: log-probs, loss, every local gradient, gradient norm."""
    close, equal = ("logprob", "gradient", "loss", "norm"), ("targets", "not_applied")
    results = require_parity("actor_checks:parity_of_layouts", cases, actor_references, close, equal)
    for case, errors in zip(cases, results, strict=True):
        if case["layout"].get("pipeline", 1) > 1:
            is_equal = bool(case.get("padded") or case.get("fixed_tokens"))
            assert errors["exchanges_lengths"] != is_equal, (case, errors)
