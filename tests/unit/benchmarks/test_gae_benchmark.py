"""The advantages benchmark runs, its loops agree with the estimators, and its figures are of the times."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="module")
def benchmark(repository: Path):
    specification = importlib.util.spec_from_file_location("gae_benchmark", repository / "benchmarks" / "gae.py")
    module = importlib.util.module_from_spec(specification)
    sys.modules["gae_benchmark"] = module
    specification.loader.exec_module(module)
    return module


def test_a_small_batch_is_measured_and_the_loops_agree(benchmark, monkeypatch) -> None:
    monkeypatch.setattr(benchmark, "MAX_LENGTH", 300)
    monkeypatch.setattr(benchmark, "MEDIAN_LENGTH", 150.0)
    monkeypatch.setattr(benchmark, "SAMPLE_COLUMNS", 40)
    result = benchmark.measure(num_responses=70, repeats=1)
    assert result["longest"] == 300 and 0 < result["share_at_the_limit"] < 0.5
    assert set(result["vs_pass_of"]) == {"gae", "egae", "decoupled", "gaps"}


def test_figures_are_ratios_of_the_least_times(benchmark) -> None:
    seconds = {"pass": 2.0, "warm_pass": 1.0, "gae": 4.0, "egae": 5.0, "decoupled": 7.0, "gaps": 9.0}
    result = benchmark.summary(torch.tensor([10, 30]), seconds, {"seconds": 100.0}, {"seconds": 50.0}, repeats=3)
    assert result["vs_pass"] == pytest.approx(2.5)
    assert (result["vs_loop"], result["vs_column_loop"]) == (pytest.approx(20.0), pytest.approx(10.0))
    assert result["vs_warm_pass"] == pytest.approx(5.0)
    assert result["nanoseconds_per_token"]["gae"] == pytest.approx(4e9 / 40)
