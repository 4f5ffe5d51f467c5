"""Planned against published steps: every row is within a quarter, or says why it is not."""

from __future__ import annotations

from types import ModuleType

import pytest


@pytest.fixture
def benchmark(benchmarks_on_the_path: None) -> ModuleType:
    import plan_published

    return plan_published


def test_published_steps_are_within_a_quarter_or_say_why(benchmark: ModuleType) -> None:
    result = benchmark.run()
    off = [row for row in result["rows"] if abs(row["relative_error"]) > benchmark.AIM]
    assert len(off) <= 1 and all(row["why"] for row in off), off
    assert result["max_relative_error"] < 0.4
