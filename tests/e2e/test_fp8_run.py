"""A whole run whose trainer multiplies in emulated FP8: it samples what the fp32 run samples, and says how far it is off."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from fp8_learning import QUICKSTART, train, widen

SMALL = ["rollout.prompts_per_step=4", "training.mini_batch_prompts=4"]


@pytest.mark.slow
@pytest.mark.long
def test_a_step_in_fp8_starts_from_the_same_responses_and_shows_its_mismatch(tmp_path: Path) -> None:
    widen(QUICKSTART / "base_model", tmp_path / "model")
    runs = {
        recipe: train(recipe, tmp_path / "model", tmp_path / recipe, 1, SMALL) for recipe in ("fp32", "fp8_blockwise")
    }
    assert runs["fp32"]["accuracy"] == runs["fp8_blockwise"]["accuracy"], "the engine serves the same weights"
    assert runs["fp32"]["mismatch"][0] < 1e-5
    assert 1e-4 < runs["fp8_blockwise"]["mismatch"][0] < 0.02
    # A gradient's norm may grow by what rounding adds to it, and more where the gradient is noise itself.
    ratio = runs["fp8_blockwise"]["grad_norm"][0] / runs["fp32"]["grad_norm"][0]
    assert abs(math.log(ratio)) < math.log(2.0)
