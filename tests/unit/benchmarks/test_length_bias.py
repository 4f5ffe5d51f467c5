"""The measure of trained lengths against sampled ones sees the bias of a collector that takes what ends first."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

from megatron_dapo.config.rollout_schema import RolloutConfig
from megatron_dapo.rollout.open_group import OpenGroups

ROLLOUT = RolloutConfig(group_size=4, oversample=3.0, max_staleness=0, partial_rollout=False, max_response_tokens=20480)


@pytest.fixture
def benchmark(benchmarks_on_the_path: None) -> ModuleType:
    return importlib.import_module("length_bias")


def test_a_collector_that_trains_what_ends_first_is_caught(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OpenGroups, "first_id", None)
    row = benchmark.measure(benchmark.POPULATIONS["wrong is longer"], ROLLOUT, num_groups=32, num_steps=8)
    assert row["length_bias"] < -0.05
