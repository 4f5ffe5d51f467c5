"""One schema: no name missing, none unknown."""

from __future__ import annotations

import pytest
import torch

from megatron_dapo.algorithms.off_policy import mismatch_metrics, mismatch_sums
from megatron_dapo.telemetry.metrics import EVALUATION_METRICS, PHASES, STEP_METRICS, checked
from megatron_dapo.telemetry.phases import PhaseTimer


@pytest.mark.parametrize("schema", [STEP_METRICS, EVALUATION_METRICS])
def test_exactly_the_schema_passes(schema: dict) -> None:
    values = dict.fromkeys(reversed(list(schema)), 1)
    assert list(checked(schema, values)) == list(schema)
    assert all(isinstance(value, float) for value in checked(schema, values).values())


def test_unknown_and_missing_are_all_named() -> None:
    values = dict.fromkeys(STEP_METRICS, 0.0)
    del values["actor/entropy"], values["time/step"]
    values |= {"actor/entrpy": 0.0, "zzz": 0.0}
    with pytest.raises(
        ValueError, match=r"actor/entrpy \(did you mean actor/entropy\?\), zzz; missing: actor/entropy, time/step"
    ):
        checked(STEP_METRICS, values)


def test_every_metric_has_a_unit_and_a_meaning() -> None:
    for metric in (*STEP_METRICS.values(), *EVALUATION_METRICS.values()):
        assert metric.unit and len(metric.meaning) > 3 and metric.name.count("/") == 1


def test_phase_times_are_in_the_schema() -> None:
    assert {f"time/{name}" for name in PhaseTimer(list(PHASES)).finish_step()} == {
        name for name in STEP_METRICS if name.startswith("time/")
    }


def test_mismatch_metrics_of_the_algorithms_are_in_the_schema() -> None:
    total = mismatch_sums(torch.zeros(2), torch.zeros(2), torch.ones(2))
    assert set(mismatch_metrics(total)) <= set(STEP_METRICS)
