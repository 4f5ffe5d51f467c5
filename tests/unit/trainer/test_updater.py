"""Learning-rate schedules, which count trained steps in the unit of their section, and optimizer steps as progress."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from megatron_dapo.config.model_schema import OptimizerConfig
from megatron_dapo.parallel.coordination import Progress
from megatron_dapo.trainer.build import mark_micro_batches
from megatron_dapo.trainer.updater import LearningRateSchedule, MiniBatch, StepCounters, Updater
from megatron_dapo.watch.heartbeat import Heartbeat


def make_schedule(peak: float, warmup_steps: int, total_steps: int, first_train_step: int = 0, **section):
    configured = OptimizerConfig(learning_rate=peak, warmup_steps=warmup_steps, **section)
    return LearningRateSchedule(configured, total_steps, first_train_step)


def test_warmup_reaches_the_peak_and_stays():
    schedule = make_schedule(1e-6, 20, 100, schedule="constant")
    assert schedule.at(0) == pytest.approx(5e-8)
    assert schedule.at(19) == schedule.at(20) == schedule.at(5000) == 1e-6


@pytest.mark.parametrize("shape", ["linear", "cosine"])
def test_decay_is_monotone_and_ends_at_the_minimum(shape):
    schedule = make_schedule(1.0, 2, 12, schedule=shape, min_learning_rate=0.1)
    rates = [schedule.at(step) for step in range(2, 13)]
    assert rates[0] == 1.0 and rates[-1] == pytest.approx(0.1)
    assert all(a > b for a, b in zip(rates, rates[1:]))
    assert schedule.at(100) == pytest.approx(0.1)


def test_half_way_values():
    assert make_schedule(1.0, 0, 10, schedule="linear").at(5) == pytest.approx(0.5)
    assert make_schedule(1.0, 0, 12, schedule="cosine").at(4) == pytest.approx(0.75)


def test_a_schedule_counts_in_its_own_unit():
    in_train_steps = make_schedule(1.0, 0, 10, first_train_step=3, warmup_unit="train_step")
    assert [in_train_steps.step(optimizer_step=7, train_step=step) for step in (2, 3, 5)] == [0, 0, 2]
    assert make_schedule(1.0, 0, 10, warmup_unit="optimizer_step").step(optimizer_step=7, train_step=2) == 7


def test_unknown_shape_names_what_exists():
    with pytest.raises(ValueError, match="constant"):
        OptimizerConfig(schedule="step")


def test_a_train_phase_of_many_optimizer_steps_outlives_its_deadline():
    """20 steps of 0.2 s under a deadline of 3 s, which the phase as a whole exceeds and no step comes near."""

    def train_step(*_, **__):
        time.sleep(0.2)
        return SimpleNamespace(applied=True)

    progress, expired = Progress(), []
    model = SimpleNamespace(train_step=train_step, architecture=SimpleNamespace(attention_parity=0))
    updater = Updater("policy", model, StepCounters(), make_schedule(1.0, 0, 10), 64, 3, progress)
    heartbeat = Heartbeat()
    heartbeat._expire = expired.append
    with heartbeat.phase("train", progress, deadline_s=3.0):
        for step in range(20):
            updater.step(MiniBatch([], 0), None, step)
            heartbeat._look()  # Its thread does this.
    assert expired == [] and updater.counters.optimizer_steps == 20


def test_each_micro_batch_is_progress() -> None:
    """A pass over many micro-batches may enter no collective for minutes; a hang makes none."""
    progress, chunks = Progress(), [torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)]
    mark_micro_batches(SimpleNamespace(chunks=chunks), progress)
    for count in range(1, 4):
        chunks[count % 2](torch.zeros(1))
        assert progress.count == count
