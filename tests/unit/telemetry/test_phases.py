"""Phases sum to the step, nested ones are not counted twice."""

from __future__ import annotations

import pytest

from megatron_dapo.telemetry.phases import PhaseTimer


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def test_times_add_up_and_nesting_is_exclusive() -> None:
    clock = Clock()
    timer = PhaseTimer(["generate", "train"], clock)
    clock.now += 1
    with timer.phase("generate"):
        clock.now += 2
        with timer.phase("train"):
            clock.now += 4
            assert timer.current == "train"
        clock.now += 8
    clock.now += 16
    with timer.phase("train"):
        clock.now += 32
    assert timer.finish_step() == {"generate": 10.0, "train": 36.0, "unaccounted": 17.0, "step": 63.0}
    assert timer.finish_step() == {"generate": 0.0, "train": 0.0, "unaccounted": 0.0, "step": 0.0}


def test_an_error_closes_its_phase() -> None:
    clock = Clock()
    timer = PhaseTimer(["train"], clock)
    with pytest.raises(KeyError), timer.phase("train"):
        clock.now += 3
        raise KeyError
    clock.now += 5
    assert timer.finish_step() == {"train": 3.0, "unaccounted": 5.0, "step": 8.0}


def test_time_in_which_the_timer_is_paused_belongs_to_no_step() -> None:
    clock = Clock()
    timer = PhaseTimer(["train"], clock)
    with timer.phase("train"):
        clock.now += 1
    clock.now += 2
    with timer.paused():
        clock.now += 4
    clock.now += 8
    assert timer.finish_step() == {"train": 1.0, "unaccounted": 10.0, "step": 11.0}


def test_unknown_phase() -> None:
    with pytest.raises(ValueError, match="no phase 'tain'; there are train"), PhaseTimer(["train"]).phase("tain"):
        pass
