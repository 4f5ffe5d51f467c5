"""Emulated FP8 on two ranks: what a layout may change, and an exact resume, of the families of `fp8_checks`."""

from __future__ import annotations

from typing import Any

import pytest
from launcher import run_distributed

SEQUENCE = {"tensor": 2, "sequence_parallel": True}
# Tensor ranks share an expert, or have different ones.
SHARED_EXPERTS = [SEQUENCE, {**SEQUENCE, "expert": 2, "expert_tensor": 1}]
TENSOR = {
    **dict.fromkeys(("dense", "gemma3"), [{"tensor": 2}, SEQUENCE]),
    **dict.fromkeys(("experts", "delta", "latent"), SHARED_EXPERTS),
}
SAME_SUMS = 1e-5
# Context parallelism puts other tokens into the blocks in which weight gradients are quantized, but their scales are powers of two.
LAYOUTS: dict[str, list[dict[str, Any]]] = {
    **dict.fromkeys(("dense", "gemma3"), [{"pipeline": 2}, {"context": 2}]),
    "experts": [{"pipeline": 2}, {"expert": 2}, {"context": 2, "expert": 2}],
    **dict.fromkeys(("delta", "latent"), [{"pipeline": 2}, {"expert": 2}, {"context": 2}, {"context": 2, "expert": 2}]),
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
    **dict.fromkeys(
        ("delta", "latent"),
        [
            {"layout": {**SEQUENCE, "expert": 2, "expert_tensor": 1}, "distributed": True, "dtype": "bfloat16"},
            {"layout": {"context": 2, "expert": 2}, "distributed": False},
        ],
    ),
}


def families(*quick: str) -> list[Any]:
    """Return all families, those that are not `quick` for `make test-all`."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.long) for name in LAYOUTS]


@pytest.mark.parametrize("family", families("dense", "experts"))
def test_layouts_agree(family: str) -> None:
    """Blocks of weights are the same on every layout."""
    results = run_distributed("fp8_checks:layouts", 2, {"family": family, "layouts": LAYOUTS[family]})
    for layout, errors in zip(LAYOUTS[family], results, strict=True):
        assert errors["fp32"]["loss"] < 1e-3, (layout, errors)
        precise, bound = (errors["fp64"], 1e-12) if "context" in layout else (errors["fp32"], 1e-3)
        assert precise["logprob"] < bound and precise["loss"] < bound, (layout, errors)
        assert precise["gradient"] < SAME_SUMS, (layout, errors)


@pytest.mark.parametrize("family", families("dense"))
def test_tensor_ranks_differ_by_the_order_of_sums_alone(family: str) -> None:
    """The products of the same FP8 operands, summed in fp64, are the same on every tensor layout. In fp32 they are, too, if the
    operands next to a tie of e4m3 fall to the same side, which depends on the CPU."""
    results = run_distributed("fp8_checks:against_exact_sums", 2, {"family": family, "layouts": TENSOR[family]})
    for layout, errors in zip(TENSOR[family], results, strict=True):
        assert errors["fp64"]["logprob"] < 1e-12 and errors["fp64"]["loss"] < 1e-12, (layout, errors)
        assert errors["fp64"]["gradient"] < 1e-6, (layout, errors)  # gradients themselves are fp32
        assert max(errors["fp32"][name] for name in ("logprob", "loss", "gradient")) < SAME_SUMS, (layout, errors)
        assert errors["fp32"]["operand"] < 1e-4, (layout, errors)


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
