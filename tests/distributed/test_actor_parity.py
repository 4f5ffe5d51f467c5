from __future__ import annotations

from typing import Any

from launcher import run_distributed

MODELS = ("qwen2", "qwen2-tied", "qwen3", "llama3", "gemma3")
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"tensor": 2, "pipeline": 2},
    {"pipeline": 2, "virtual_pipeline": 2},
    {"context": 2, "tensor": 2, "sequence_parallel": True},
)
ALL_LOGITS = 1 << 30
BUCKETS = {"overlap_grad_reduce": True, "bucket_size": 4096}  # elements of a bucket
FIXED = 128  # more than the longest micro-batch with its padding
CASES: list[dict[str, Any]] = [{"model": model, "layout": layout} for layout in LAYOUTS for model in MODELS] + [
    {"model": "qwen3", "layout": {"tensor": 4}},  # more tensor ranks than key-value heads
    {"model": "qwen2-tied", "layout": {"pipeline": 4}, "distributed": False},
    {"model": "qwen2", "layout": {"context": 4}, "recompute": "selective"},
    {"model": "llama3", "layout": {}, "keep_bytes": ALL_LOGITS},
    {"model": "qwen3", "layout": {"tensor": 2, "pipeline": 2, "sequence_parallel": True}, "recompute": "full"},
    {"model": "qwen3", "layout": {"pipeline": 2, "first_stage_layers": 1}},
    {"model": "qwen2-tied", "layout": {"pipeline": 2, "tensor": 2, "first_stage_layers": 3, "last_stage_layers": 1}},
    # Micro-batches of equal length, whose stages do not exchange lengths.
    {"model": "qwen2", "layout": {"pipeline": 2}, "padded": True},
    {"model": "qwen3", "layout": {"pipeline": 2, "virtual_pipeline": 2}, "padded": True, "keep_bytes": ALL_LOGITS},
    {"model": "llama3", "layout": {"tensor": 2, "pipeline": 2, "sequence_parallel": True}, "padded": True},
    {"model": "qwen2-tied", "layout": {"context": 2, "pipeline": 2}, "padded": True},
    {"model": "qwen3-moe", "layout": {"expert": 2, "pipeline": 2}, "padded": True},
    # All of one length, as buffers of an overlapped communication need it.
    {"model": "qwen2", "layout": {"tensor": 2, "sequence_parallel": True}, "fixed_tokens": FIXED},
    {"model": "qwen3", "layout": {"context": 2, "tensor": 2, "sequence_parallel": True}, "fixed_tokens": FIXED},
    {"model": "qwen3-moe", "layout": {"pipeline": 2, "tensor": 2, "sequence_parallel": True}, "fixed_tokens": FIXED},
    # Gradients summed in small buckets while the backward pass goes on.
    {"model": "qwen2", "layout": {}, "megatron": BUCKETS},
    {"model": "qwen2-tied", "layout": {"pipeline": 2}, "megatron": BUCKETS},
    {"model": "qwen3", "layout": {"pipeline": 2, "virtual_pipeline": 2}, "megatron": BUCKETS},
    {
        "model": "llama3",
        "layout": {"context": 2, "tensor": 2, "sequence_parallel": True},
        "megatron": BUCKETS,
        "keep_bytes": ALL_LOGITS,
    },
    {"model": "qwen3-moe", "layout": {"expert": 2}, "megatron": BUCKETS, "distributed": False},
    {"model": "qwen2", "layout": {"tensor": 2}, "recompute": "selective", "megatron": {"recompute_modules": ["mlp"]}},
    {
        "model": "qwen3",
        "layout": {"pipeline": 2},
        "recompute": "full",
        "megatron": {"recompute_method": "block", "recompute_num_layers": 1},
    },
    {"model": "gemma3", "layout": {"tensor": 4}, "recompute": "full"},
    {"model": "gemma3", "layout": {"context": 4}, "recompute": "selective"},
]


def test_every_layout_gives_the_logprobs_and_gradients_of_transformers(actor_references: str) -> None:
    """4 ranks, ragged packed batch, fp32 against fp64: log-probs, loss, every local gradient, gradient norm."""
    arguments = {"cases": CASES, "references": actor_references}
    for case, errors in zip(CASES, run_distributed("actor_checks:parity_of_layouts", 4, arguments), strict=True):
        assert errors["logprob"] < 1e-5, (case, errors)
        assert errors["gradient"] < 1e-5, (case, errors)
        assert errors["loss"] < 1e-5 and errors["norm"] < 1e-5, (case, errors)
        assert errors["targets"] == 0 and errors["not_applied"] == 0, (case, errors)
        if case["layout"].get("pipeline", 1) > 1:
            is_equal = bool(case.get("padded") or case.get("fixed_tokens"))
            assert errors["exchanges_lengths"] != is_equal, (case, errors)
