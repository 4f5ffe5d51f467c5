"""The benchmark of the costs of FP8 runs whole at a small size and reports figures of that size."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

import fp8_costs


def test_buckets_of_both_engines_are_filled() -> None:
    result = fp8_costs.filling(1, fp8_costs.TINY_SERVED)
    matrices = 4 * 256 * 256 + 3 * 256 * 512
    for row in (result["bfloat16"], result["float32"]):
        assert 0 < row["scales_s"] < row["fp8_s"]
        # A byte and a share of a scale where there were two.
        saved = matrices - 4 * matrices / 128**2
        assert row["bf16_gb"] - row["fp8_gb"] == pytest.approx(saved / 1e9)
    assert fp8_costs.describe({"filling": result}).count("\n") == 2


def test_a_gradient_is_off_by_about_what_rounding_adds_up_to() -> None:
    torch.manual_seed(0)
    [row] = fp8_costs.gradients([1])
    assert row["expected"] == pytest.approx(0.1125, abs=1e-3)
    assert 0.5 * row["expected"] < row["relative_error"] < 2 * row["expected"]
    assert row["bf16"] < 0.5 * row["relative_error"]
