"""Both forms of a state of unfinished windows give the same state back; the figures are of what was written."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest


@pytest.fixture(scope="module")
def benchmark(repository: Path) -> Iterator[ModuleType]:
    sys.path.insert(0, str(repository / "benchmarks"))
    yield importlib.import_module("window_state")
    sys.path.remove(str(repository / "benchmarks"))


def test_every_response_waits_and_both_forms_hold_it(benchmark: ModuleType, tmp_path: Path) -> None:
    collector = benchmark.filled_collector(2, 3, 500)
    assert collector.accounting().unfinished == 6
    (tensors, first), (plain, second) = (
        benchmark.as_tensors(collector, tmp_path),
        benchmark.as_json(collector, tmp_path),
    )
    assert json.loads(json.dumps(first, default=np.ndarray.tolist)) == second
    # 8 bytes a token and the rest of the state, against some 25 characters a token.
    assert 6 * 500 * 8 / 1e9 < tensors["gigabytes"] < 2 * 6 * 500 * 8 / 1e9 < plain["gigabytes"]


def test_a_small_measurement(benchmark: ModuleType) -> None:
    found = benchmark.measure(1, 4, 200)
    assert (found["responses"], found["tokens"]) == (4, 200)
    assert found["size_ratio"] == pytest.approx(found["tensors"]["gigabytes"] / found["json"]["gigabytes"])
