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
            "ours": {"p2p": [{"update": 3.0}, {"update": 4.0}, {"update": 90.0}], "shared_memory": [{"update": 5.0}]},
            "bytes": {"p2p": [2.0, 1.0, 30.0], "shared_memory": [2.5]},
            "floor": {"p2p": [1.0, 1.6, 20.0], "shared_memory": [0.5]},
        },
        "model_bytes": 200,
        "shard_bytes": [100, 80],
        "received_bytes": {"p2p": {"0": 101, "1": 84}, "shared_memory": {"0": 100, "1": 80}},
    }
    keys = benchmark.compare(result, ["p2p", "shared_memory"])
    assert keys["bytes_ratio"] == pytest.approx(1.05)  # the worse of 1.01 and 1.05
    assert keys["vs_mbridge"] == pytest.approx(8.0 / 2.0)
    assert keys["vs_floor"] == pytest.approx(2.0 / 1.6)
    assert keys["with_verification_vs_mbridge"] == pytest.approx(8.0 / 4.0)
    assert keys["verify_seconds"] == pytest.approx(2.0)
    assert keys["transports"]["shared_memory"]["vs_floor"] == pytest.approx(5.0)
