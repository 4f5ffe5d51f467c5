from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from launcher import require_parity

SEQUENCE = {"tensor": 2, "sequence_parallel": True}
GROUPED = {"moe_grouped_gemm": True}  # the names and order of Transformer Engine's grouped layers
# Each path of the code once: 4 ranks.
CASES: list[dict[str, Any]] = [
    {"model": "qwen3", "targets": "some", "layout": {"tensor": 4}},  # a rank without a row of q_proj or v_proj
    {"model": "qwen2-tied", "targets": "all", "layout": {**SEQUENCE, "pipeline": 2}, "recompute": "full"},
    {"model": "gemma3", "targets": "some", "layout": {**SEQUENCE, "context": 2}},
    {"model": "qwen2-tied", "targets": "some", "layout": {"pipeline": 2, "virtual_pipeline": 2}, "distributed": False},
    {"model": "qwen3-moe-mixed", "targets": "all", "layout": {**SEQUENCE, "expert": 2, "expert_tensor": 1}},
    {"model": "qwen3-moe", "targets": "all", "layout": {**SEQUENCE, "expert": 2}, "megatron": GROUPED},
    {"model": "deepseek", "targets": "all", "layout": {**SEQUENCE, "expert": 2}},  # latent attention, a shared expert
    {"model": "qwen3-next", "targets": "all", "layout": {**SEQUENCE, "context": 2}},  # gated delta nets, a gated shared expert
]
MORE: list[dict[str, Any]] = [
    {"model": "qwen3", "targets": "all", "layout": {"tensor": 2}},
    {"model": "qwen3-moe", "targets": "all", "layout": {"expert": 2}},
    {"model": "qwen3-moe", "targets": "some", "layout": {**SEQUENCE, "pipeline": 2}},
    {"model": "qwen3-moe", "targets": "all", "layout": {**SEQUENCE, "expert": 2}},
]


@pytest.fixture(scope="module")
def lora_references(tmp_path_factory: pytest.TempPathFactory) -> str:
    from lora_checks import write_lora_references

    directory = tmp_path_factory.mktemp("lora_references")
    write_lora_references(Path(directory), CASES + MORE)
    return str(directory)


@pytest.mark.parametrize("cases", [CASES, pytest.param(MORE, marks=pytest.mark.long)], ids=["each path", "more"])
def test_every_layout_gives_the_logprobs_and_gradients_of_the_merged_weights(
    cases: list[dict[str, Any]], lora_references: str
) -> None:
    """4 ranks, ragged packed batch, fp32 against fp64: log-probs, loss, gradients of A and B, gradient norm; the base has none."""
    close, equal = ("logprob", "gradient", "loss", "norm"), ("targets", "not_applied", "base_gradients")
    require_parity("lora_checks:parity_of_adapters", cases, lora_references, close, equal)
