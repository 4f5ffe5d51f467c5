"""Qwen3-MoE in the actor: layouts of the experts give transformers' numbers, train like the layout without them, and export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from launcher import run_distributed

SEQUENCE = {"tensor": 2, "sequence_parallel": True}
GROUPED = {"moe_grouped_gemm": True}  # the names and order of Transformer Engine's grouped layers
# Sums while the backward pass runs, and weights that the next forward pass gathers.
OVERLAPPED = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 4096}
# Each path of the code once.
CASES: list[dict[str, Any]] = [
    {"model": "qwen3-moe", "layout": {"expert": 2}, "distributed": False},  # two replicas of each expert
    {"model": "qwen3-moe", "layout": {"expert": 2, "pipeline": 2, "virtual_pipeline": 2}},
    {"model": "qwen3-moe", "layout": {**SEQUENCE, "expert": 2}},  # experts cut as dense layers
    {"model": "qwen3-moe-mixed", "layout": {"context": 2, "expert": 2}, "recompute": "selective"},
    {"model": "qwen3-moe-mixed", "layout": {**SEQUENCE, "expert": 4, "expert_tensor": 1}, "recompute": "full"},
    {"model": "qwen3-moe-mixed", "layout": {**SEQUENCE, "pipeline": 2}, "megatron": GROUPED, "recompute": "full"},
    # The engine's experts, also when layers are computed again after other micro-batches' forwards, or see padding.
    {
        "model": "qwen3-moe-replayed",
        "layout": {**SEQUENCE, "pipeline": 2, "virtual_pipeline": 2},
        "recompute": "full",
        "padded": True,
    },
]
LAYOUTS: list[dict[str, Any]] = [
    {},
    {**SEQUENCE, "pipeline": 2, "virtual_pipeline": 2, "expert": 2, "expert_tensor": 1},
    {"expert": 2, "pipeline": 2, "virtual_pipeline": 2, "megatron": {**GROUPED, **OVERLAPPED}},
]
MORE_CASES: list[dict[str, Any]] = [
    {"model": "qwen3-moe", "layout": {"expert": 4}},
    {"model": "qwen3-moe", "layout": {**SEQUENCE, "pipeline": 2}},
    {"model": "qwen3-moe-mixed", "layout": {"pipeline": 2, "virtual_pipeline": 2}},
    {"model": "qwen3-moe-mixed", "layout": {"expert": 2, "pipeline": 2}},
    {"model": "qwen3-moe-mixed-replayed", "layout": {"context": 2, "expert": 2}, "megatron": GROUPED},
]
MORE_LAYOUTS: list[dict[str, Any]] = [
    {},
    {"expert": 2},
    {"expert": 4},
    {"expert": 2, "pipeline": 2},
    {**SEQUENCE, "expert": 2},
    {**SEQUENCE, "expert": 2, "megatron": GROUPED},
]


@pytest.mark.parametrize(
    ("cases", "layouts"),
    [(CASES, LAYOUTS), pytest.param(MORE_CASES, MORE_LAYOUTS, marks=pytest.mark.long)],
    ids=["each path", "more"],
)
def test_layouts_of_experts(
    cases: list[dict[str, Any]], layouts: list[dict[str, Any]], actor_references: str, tmp_path: Path
) -> None:
    """4 ranks. Parity: fp32 against fp64. Training: the layouts against the first, which has no expert parallelism."""
    from actor_checks import reference_model

    model = tmp_path / "model"
    reference_model("qwen3-moe").float().save_pretrained(model)
    arguments = {
        "references": actor_references,
        "cases": cases,
        "model": str(model),
        "layouts": layouts,
        "work": str(tmp_path),
    }
    results = run_distributed("expert_checks:experts", 4, arguments)
    for case, errors in zip(cases, results["parity"], strict=True):
        assert errors["logprob"] < 1e-5 and errors["gradient"] < 1e-5, (case, errors)
        assert errors["loss"] < 1e-5 and errors["norm"] < 1e-5, (case, errors)
        assert errors["targets"] == 0 and errors["not_applied"] == 0, (case, errors)
    right = results["trained"][0]["history"]
    for layout, trained in zip(layouts, results["trained"], strict=True):
        assert trained["round_trip"] == "" and trained["drifted"] == [], (layout, trained)
        for step, expected in zip(trained["history"], right, strict=True):
            assert step == pytest.approx(expected, rel=1e-5), layout
        assert trained["weights"] < 1e-4, (layout, trained["weights"])
