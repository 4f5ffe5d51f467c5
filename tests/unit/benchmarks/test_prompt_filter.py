"""Precision of the prompt filter comes with its counts and interval."""

from __future__ import annotations

import importlib
import json
import sys
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


def test_rows_have_the_counts_behind_their_precision(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["prompt_filter.py", "--json", "--tiny"])
    benchmark.main()
    result = json.loads(capsys.readouterr().out)
    assert any(row["flagged_tried"] for row in result["rows"] if row["filter"] == "model")
    for row in result["rows"]:
        tried, wrong = row["flagged_tried"], row["flagged_useful"]
        assert row["filter_precision"] == pytest.approx((tried - wrong) / tried if tried else 0.0)
        assert tried <= row["audited"], "of all collections, not of the last"
        low, high = row["precision_interval"]
        assert 0 <= low < high <= 1 and low - 1e-9 <= row["filter_precision"] <= high + 1e-9
    models = [row for row in result["rows"] if row["filter"] == "model"]
    worst = min(models, key=lambda row: (row["filter_precision"], row["precision_interval"]))
    for name in ("flagged_tried", "flagged_useful", "precision_interval"):
        assert result[name] == worst[name]
