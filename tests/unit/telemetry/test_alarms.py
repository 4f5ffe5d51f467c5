"""The bound on the mismatch that rounding explains, by number format and device."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_dapo.telemetry.alarms import mismatch_limit

FP8_TRAINER, FP8_ENGINE = {"precision.recipe": "fp8_blockwise"}, {"sglang.quantization": "fp8"}


@pytest.mark.parametrize(
    ("dtype", "is_on_gpu", "more", "healthy", "faulty"),
    [
        # healthy: the largest mean of runs that learned (docs/tuning.md). faulty: what has to raise the alarm.
        ("float32", False, {}, 1e-6, 0.003),
        ("bfloat16", False, {}, 0.042, 0.08),
        ("bfloat16", True, {}, 0.038, 0.08),
        ("bfloat16", True, FP8_TRAINER, 0.07, 0.3),
        ("bfloat16", True, FP8_ENGINE, 0.07, 0.3),
        ("float32", False, {"rollout.max_staleness": 1}, 0.02, 0.05),
        ("float32", False, {"mismatch.alarm": 0.5}, 0.4, 0.6),
    ],
)
def test_what_rounding_explains_is_no_alarm(
    dtype: str, is_on_gpu: bool, more: dict[str, Any], healthy: float, faulty: float
) -> None:
    config = {"mismatch.alarm": 0.0, "model.dtype": dtype, "precision.recipe": "", "sglang.quantization": "none", **more}
    assert healthy < mismatch_limit(config.get, is_on_gpu) < faulty
