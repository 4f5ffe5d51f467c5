"""Precision of the prompt filter comes with its counts and interval."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest


@pytest.fixture
def benchmark(benchmarks_on_the_path: None) -> ModuleType:
    return importlib.import_module("prompt_filter")


@pytest.mark.parametrize(
    ("num_right", "num_tried", "interval"),
    [
        (8, 10, (0.4902, 0.9433)),
        (0, 10, (0.0, 0.2775)),
        (10, 10, (0.7225, 1.0)),
        (3, 4, (0.3006, 0.9544)),
        (0, 0, (0.0, 1.0)),
    ],
)
def test_wilson_intervals(benchmark: ModuleType, num_right: int, num_tried: int, interval: tuple[float, float]) -> None:
    assert benchmark.wilson_interval(num_right, num_tried) == pytest.approx(interval, abs=1e-4)
