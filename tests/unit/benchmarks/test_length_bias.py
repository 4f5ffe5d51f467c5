"""Trained lengths against sampled ones: no bias in this collector, and the measure sees the bias of one that takes what ends first."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

from megatron_dapo.config.rollout_schema import RolloutConfig
from megatron_dapo.rollout.group_collector import GroupCollector

ROLLOUT = RolloutConfig(group_size=4, oversample=2.0, max_staleness=1, partial_rollout=True, max_response_tokens=20480)


@pytest.fixture
def benchmark(benchmarks_on_the_path: None) -> ModuleType:
    return importlib.import_module("length_bias")


@pytest.mark.parametrize(("name", "partial_rollout"), [("wrong is longer", False), ("a tenth loops", True)])
def test_trained_responses_are_as_long_as_sampled_ones(benchmark: ModuleType, name: str, partial_rollout: bool) -> None:
    rollout = ROLLOUT.model_copy(update={"partial_rollout": partial_rollout})
    row = benchmark.measure(benchmark.POPULATIONS[name], rollout, num_groups=32, num_steps=8)
    assert abs(row["length_bias"]) <= 0.02 and abs(row["tail"]) <= 0.03
    assert row["discarded_share"] <= 0.05 and row["mean_staleness"] > 0.2


def test_a_collector_that_trains_what_ends_first_is_caught(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GroupCollector, "_first_open", lambda collector: None)
    rollout = ROLLOUT.model_copy(update={"oversample": 3.0, "max_staleness": 0, "partial_rollout": False})
    row = benchmark.measure(benchmark.POPULATIONS["wrong is longer"], rollout, num_groups=32, num_steps=8)
    assert row["length_bias"] < -0.05
