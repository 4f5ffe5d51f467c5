"""Emulated FP8 on two ranks: what a layout may change, and an exact resume."""

from __future__ import annotations

from typing import Any

import pytest
from launcher import run_distributed

LAYOUTS: list[dict[str, Any]] = [
    {"pipeline": 2},
    {"tensor": 2},
    {"tensor": 2, "sequence_parallel": True},
    {"context": 2},
]
RESUMED: list[dict[str, Any]] = [
    {"layout": {}, "distributed": True},
    {"layout": {"tensor": 2, "sequence_parallel": True}, "distributed": True, "dtype": "bfloat16"},
    {"layout": {"pipeline": 2}, "distributed": False},
]


@pytest.mark.timeout(200)
def test_layouts_agree() -> None:
    """Blocks of weights are the same on every layout. Sums in another order may move an activation across a tie of e4m3
    here and there; context parallelism puts other tokens into the blocks that weight gradients are rounded in."""
    results = run_distributed("fp8_checks:layouts", 2, {"layouts": LAYOUTS}, timeout_s=180)
    for layout, errors in zip(LAYOUTS, results, strict=True):
        assert errors["logprob"] < 1e-3 and errors["loss"] < 1e-3, (layout, errors)
        assert errors["gradient"] < (5e-2 if "context" in layout else 1e-3), (layout, errors)


@pytest.mark.timeout(200)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit() -> None:
    cases = [{**case, "precision": {"recipe": "fp8_blockwise", "bf16_last_layers": 1}} for case in RESUMED]
    for case, result in zip(
        cases, run_distributed("fp8_checks:resume", 2, {"cases": cases}, timeout_s=180), strict=True
    ):
        assert result["continued"] == result["history"], case
        for rank in result["ranks"]:
            assert rank["loaded"] == [] and rank["difference"] == [], case
        assert "fp8" not in result["kinds"], "blocks have no state"
