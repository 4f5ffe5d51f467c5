"""The head's benchmark at a small size, and its figures from rows made by hand."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def benchmark(repository: Path):
    specification = importlib.util.spec_from_file_location("head_memory", repository / "benchmarks" / "head_memory.py")
    module = importlib.util.module_from_spec(specification)
    sys.modules["head_memory"] = module
    specification.loader.exec_module(module)
    return module


def row(seconds: float, extra: int, loss: float = 5.0) -> dict:
    return {
        "seconds": 2 * seconds,
        "cpu_seconds": seconds,
        "extra_bytes": extra,
        "loss": loss,
        "entropy": 4.0,
        "gradient_norms": [1.0, 2.0],
    }


def test_ratios_are_of_the_least_figures(benchmark) -> None:
    rows = {"chunked": [row(6.0, 30), row(5.0, 20)], "logits": [row(4.0, 400)], "cross_entropy": [row(2.5, 100)]}
    keys = benchmark.compare({**rows, "kept": [row(4.5, 250), row(4.0, 200)]})
    assert keys["kept_memory_ratio"] == pytest.approx(0.5) and keys["kept_time_ratio"] == pytest.approx(0.8)
    assert keys["memory_ratio"] == pytest.approx(0.05) and keys["time_ratio"] == pytest.approx(1.25)
    assert keys["time_ratio_cross_entropy"] == pytest.approx(2.0)
    assert keys["wall_time_ratio"] == pytest.approx(1.25)


@pytest.mark.parametrize("wrong", ["logits", "kept"])
def test_sides_that_compute_something_else_are_an_error(benchmark, wrong) -> None:
    rows = {side: [row(1.0, 1)] for side in benchmark.SIDES} | {wrong: [row(1.0, 1, loss=5.1)]}
    with pytest.raises(ValueError, match="do not compute the same"):
        benchmark.compare(rows)


def test_all_sides_run_and_agree(benchmark) -> None:
    rows = {side: [benchmark.run_side(side, 40, 8, 300)] for side in benchmark.SIDES}
    assert rows["chunked"][0]["loss"] == pytest.approx(rows["cross_entropy"][0]["loss"], rel=1e-5)
    rows = {side: [{**of_side[0], "extra_bytes": 1}] for side, of_side in rows.items()}
    assert benchmark.compare(rows)["memory_ratio"] == 1.0
