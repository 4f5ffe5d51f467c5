"""Emulated FP8 on two ranks: what a layout may change, and an exact resume; dense models, Gemma 3, models with experts."""

from __future__ import annotations

from typing import Any

import pytest
from launcher import run_distributed

SEQUENCE = {"tensor": 2, "sequence_parallel": True}
TENSOR = [{"tensor": 2}, SEQUENCE]
SAME_SUMS, TIES, FEW_TOKENS, OTHER_BLOCKS = 1e-5, 1e-2, 5e-2, 3e-2
# The largest error of a parameter's gradient. Tensor ranks sum products in another order, which may move an activation or a
# gradient across a tie of e4m3; that shows more in an expert with few tokens, and which ties are crossed depends on the CPU. Context parallelism also puts other tokens
# into the blocks in which weight gradients are quantized.
LAYOUTS: dict[str, list[tuple[dict[str, Any], float]]] = {
    "dense": [({"pipeline": 2}, SAME_SUMS), *((layout, TIES) for layout in TENSOR), ({"context": 2}, OTHER_BLOCKS)],
    "gemma3": [({"pipeline": 2}, SAME_SUMS), *((layout, TIES) for layout in TENSOR), ({"context": 2}, OTHER_BLOCKS)],
    "experts": [
        ({"pipeline": 2}, SAME_SUMS),
        ({"expert": 2}, SAME_SUMS),
        (SEQUENCE, FEW_TOKENS),
        ({**SEQUENCE, "expert": 2, "expert_tensor": 1}, FEW_TOKENS),
        ({"context": 2, "expert": 2}, OTHER_BLOCKS),
    ],
}
RESUMED: dict[str, list[dict[str, Any]]] = {
    "dense": [
        {"layout": {}, "distributed": True},
        {"layout": SEQUENCE, "distributed": True, "dtype": "bfloat16"},
        {"layout": {"pipeline": 2}, "distributed": False},
    ],
    "experts": [
        {"layout": {"expert": 2}, "distributed": True, "dtype": "bfloat16"},
        {"layout": {**SEQUENCE, "expert": 2, "expert_tensor": 1}, "distributed": False},
    ],
}


FAMILIES = ["dense", "experts", pytest.param("gemma3", marks=pytest.mark.long)]


@pytest.mark.parametrize("family", FAMILIES)
def test_layouts_agree(family: str) -> None:
    """Blocks of weights are the same on every layout."""
    layouts = [layout for layout, _ in LAYOUTS[family]]
    results = run_distributed("fp8_checks:layouts", 2, {"family": family, "layouts": layouts})
    for (layout, allowed), errors in zip(LAYOUTS[family], results, strict=True):
        assert errors["logprob"] < (1e-2 if allowed == FEW_TOKENS else 1e-3) and errors["loss"] < 1e-3, (layout, errors)
        assert errors["gradient"] < allowed, (layout, errors)


@pytest.mark.parametrize("family", ["dense", *(pytest.param(one, marks=pytest.mark.long) for one in ("experts", "gemma3"))])
def test_tensor_ranks_differ_by_the_order_of_sums_alone(family: str) -> None:
    """The products of the same FP8 operands, summed in fp64, are the same on every tensor layout; fp32 moves a few across ties.
    Gradients of experts pass a router that computes in fp32."""
    experts = family == "experts"
    layouts = [SEQUENCE] if experts else TENSOR
    results = run_distributed("fp8_checks:against_exact_sums", 2, {"family": family, "layouts": layouts})
    for layout, errors in zip(layouts, results, strict=True):
        assert errors["fp64"]["logprob"] < 1e-12 and errors["fp64"]["loss"] < 1e-12, (layout, errors)
        assert errors["fp64"]["gradient"] < (TIES if experts else 1e-6), (
            layout,
            errors,
        )  # gradients themselves are fp32
        assert errors["fp32"]["logprob"] < (1e-2 if experts else 1e-3), (layout, errors)
        assert errors["fp32"]["gradient"] < (FEW_TOKENS if experts else TIES), (layout, errors)


@pytest.mark.long
@pytest.mark.parametrize("family", RESUMED)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(family: str) -> None:
    cases = [
        {**case, "precision": {"recipe": "fp8_blockwise", "num_layers_at_end_in_bf16": 1}} for case in RESUMED[family]
    ]
    arguments = {"family": family, "cases": cases}
    for case, result in zip(cases, run_distributed("fp8_checks:resume", 2, arguments), strict=True):
        assert result["continued"] == result["history"], case
        for rank in result["ranks"]:
            assert rank["loaded"] == [] and rank["difference"] == [], case
        assert "fp8" not in result["kinds"], "blocks have no state"
