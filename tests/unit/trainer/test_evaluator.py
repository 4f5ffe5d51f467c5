"""An evaluation in the background: its result, its error, its end by a signal, and a wait without progress."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_dapo.engines.shared import SharedEngine
from megatron_dapo.trainer import evaluator as module
from megatron_dapo.trainer.evaluator import Evaluator

ENGINE = SimpleNamespace(run_on_rank0=lambda body: body(), num_unfinished=0)
Run = Callable[[int, Any, Callable[[], None]], dict[str, float]]


@pytest.fixture(autouse=True)
def short_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOOK_S", 0.01)


def evaluator_of(run: Run, timeout_s: float = 60.0, **options: Any) -> Evaluator:
    made = Evaluator(ENGINE, SimpleNamespace(), 8, SimpleNamespace(), shared=SharedEngine(ENGINE, 4), timeout_s=timeout_s, **options)
    made._run = run
    return made


def until_cancelled(step: int, engine: Any, check_stop: Callable[[], None]) -> dict[str, float]:
    while True:
        check_stop()
        time.sleep(0.001)


def test_begin_returns_at_once_and_finish_waits() -> None:
    may_end = threading.Event()

    def run(step: int, engine: Any, check_stop: Callable[[], None]) -> dict[str, float]:
        may_end.wait(60.0)
        return {"step": step}

    evaluator = evaluator_of(run)
    for step in (3, 5):
        may_end.clear()
        evaluator.begin(step)
        may_end.set()
        assert evaluator.finish() == {"step": step}


def test_an_error_is_raised_by_finish() -> None:
    def run(step: int, engine: Any, check_stop: Callable[[], None]) -> dict[str, float]:
        raise KeyError("no verdict")

    evaluator = evaluator_of(run)
    evaluator.begin(0)
    with pytest.raises(KeyError, match="no verdict"):
        evaluator.finish()


def test_an_evaluation_without_time_is_cancelled_and_another_may_begin() -> None:
    evaluator = evaluator_of(until_cancelled)
    evaluator.begin(1)
    assert evaluator.finish(lambda: False) is None
    evaluator.begin(2)
    evaluator.cancel()
    assert evaluator._background is None
    evaluator.cancel()  # none is under way


def test_a_wait_ends_without_progress_and_looks_after_the_engines() -> None:
    looks: list[bool] = [True] * 50
    collector = SimpleNamespace(recover_engines=lambda: bool(looks) and looks.pop())
    evaluator = evaluator_of(until_cancelled, timeout_s=0.2, collector=collector)
    evaluator.begin(1)
    with pytest.raises(TimeoutError, match="no response finished"):
        evaluator.finish()
    assert not looks, "progress postpones the deadline"
    evaluator.cancel()


def test_ranks_without_the_task_begin_nothing() -> None:
    evaluator = Evaluator(ENGINE, None, 8, SimpleNamespace())
    evaluator.begin(0)
    evaluator.cancel()
    assert evaluator._background is None
