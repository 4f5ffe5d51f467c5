"""Planned against published steps: every row is within a quarter, or says why it is not."""

from __future__ import annotations

from types import ModuleType

import pytest

from megatron_dapo.plan.device import Shares


@pytest.fixture
def benchmark(benchmarks_on_the_path: None) -> ModuleType:
    import plan_published

    return plan_published


def test_published_steps_are_within_a_quarter_or_say_why(benchmark: ModuleType) -> None:
    result = benchmark.run()
    off = [row for row in result["rows"] if abs(row["relative_error"]) > benchmark.AIM]
    assert len(off) <= 1 and all(row["why"] for row in off), off
    assert result["max_relative_error"] < 0.4


def test_constants_that_rows_set_are_the_same_for_all(benchmark: ModuleType) -> None:
    """Rows set two constants of all, and without those rows the others are no further off."""
    setters = [row for row in benchmark.ROWS if row.calibrates]
    assert {row.calibrates for row in setters} == {"experts", "decode_experts"}
    assert all(hasattr(Shares(), row.calibrates) for row in setters)
    others = benchmark.run([row for row in benchmark.ROWS if not row.calibrates])
    assert len(others["rows"]) >= 6 and others["within_aim"] >= len(others["rows"]) - 1
