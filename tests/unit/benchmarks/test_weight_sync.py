"""Figures of the weight-sync benchmark, from rows made by hand."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def benchmark(repository: Path):
    specification = importlib.util.spec_from_file_location("weight_sync", repository / "benchmarks" / "weight_sync.py")
    module = importlib.util.module_from_spec(specification)
    sys.modules["weight_sync"] = module
    specification.loader.exec_module(module)
    return module


def test_keys_are_of_medians_and_of_the_first_transport(benchmark) -> None:
    result = {
        "rows": {
            "mbridge": [8.0, 6.0, 50.0],
            "ours": {"peer": [{"update": 3.0}, {"update": 4.0}, {"update": 90.0}], "colocated": [{"update": 5.0}]},
            "bytes": {"peer": [2.0, 1.0, 30.0], "colocated": [2.5]},
            "floor": {"peer": [1.0, 1.6, 20.0], "colocated": [0.5]},
        },
        "model_bytes": 200,
        "shard_bytes": [100, 80],
        "received_bytes": {"peer": {"0": 101, "1": 84}, "colocated": {"0": 100, "1": 80}},
    }
    keys = benchmark.compare(result, ["peer", "colocated"])
    assert keys["bytes_ratio"] == pytest.approx(1.05)  # the worse of 1.01 and 1.05
    assert keys["vs_mbridge"] == pytest.approx(8.0 / 2.0)
    assert keys["vs_floor"] == pytest.approx(2.0 / 1.6)
    assert keys["with_verification_vs_mbridge"] == pytest.approx(8.0 / 4.0)
    assert keys["verify_seconds"] == pytest.approx(2.0)
    assert keys["transports"]["colocated"]["vs_floor"] == pytest.approx(5.0)
