"""Ends of the loop that are not the end of the run: the state is saved where it is whole, in the time there is."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_dapo.engines.sglang.servers import ServersFailed
from megatron_dapo.recovery.attempts import STOPPED_BY_SIGNAL
from megatron_dapo.rollout.batch import CollectionExhausted
from megatron_dapo.telemetry.metrics import PHASES
from megatron_dapo.telemetry.phases import PhaseTimer
from megatron_dapo.trainer import loop as module
from megatron_dapo.trainer.checkpointing import RunProgress
from megatron_dapo.trainer.loop import Parts, TrainingLoop
from megatron_dapo.trainer.rollout import TrainBatch

MODELS = SimpleNamespace(offload_all=lambda: None, log_moved=lambda: None, on_device=lambda *names: nullcontext())
GAP = {"mismatch/abs_logprob_diff_mean": 0.0}


class World:
    """A loop of four steps whose parts do nothing but note what was called. `generate`: by train step, else a batch."""

    def __init__(self, generate: dict[int, TrainBatch], interval: int = 0, fail_publish_at: int = -1) -> None:
        self.calls: list[str] = []
        self.progress = RunProgress()
        self.stop = SimpleNamespace(requested=False, seconds_left=float("inf"))
        self._fail_publish_at = fail_publish_at
        config = SimpleNamespace(
            run=SimpleNamespace(total_steps=4, max_generation_steps=0, max_train_seconds=0.0),
            mismatch=SimpleNamespace(trend_factor=2.0, trend_floor=1.0, alarm=1.0),
            evaluation=SimpleNamespace(at_start=False, at_end=False, interval=0),
            checkpoint=SimpleNamespace(interval=interval),
            rollout=SimpleNamespace(prompts_per_step=1, responses="sampled"),
            mismatch_gate=None,
        )
        learner = SimpleNamespace(
            models=MODELS,
            has_converged=lambda: False,
            score=lambda samples: samples,
            estimate_advantages=lambda samples: samples,
            train_critic=lambda *arguments: {},
            train_actor=lambda *arguments: None,
            finish=lambda *arguments: SimpleNamespace(metrics=GAP),
        )
        parts = Parts(
            rollout=SimpleNamespace(generate=lambda num, share: generate.get(self.progress.train_step, batch())),
            learner=learner,
            publisher=SimpleNamespace(publish=self._publish),
            parity=None,
            evaluator=None,
            checkpoints=SimpleNamespace(
                save=lambda: self._note("save", Path("checkpoint")), keep_collection=lambda: self._note("keep", None)
            ),
            recorder=None,
            collector=None,
            context=None,
        )
        phases = SimpleNamespace(phase=lambda name: nullcontext(), timer=PhaseTimer(list(PHASES)))
        self.loop = TrainingLoop(config, parts, self.progress, phases, self.stop)

    def _publish(self, version: int) -> None:
        if version == self._fail_publish_at:
            raise ServersFailed("server 0 is lost")

    def _note(self, what: str, result: Any) -> Any:
        self.calls.append(f"{what} {self.progress.train_step}")
        return result


def batch(**facts: Any) -> TrainBatch:
    return TrainBatch(samples=[] if facts else ["a sample"], should_stop=False, generation_step=1, **facts)


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "max_over", lambda values: values)


def test_a_run_to_its_end_saves_at_intervals_and_at_the_end() -> None:
    world = World({}, interval=3)
    assert world.loop.run() == "finished" and world.calls == ["save 3", "save 4"]


def test_an_error_of_the_collection_is_raised_after_a_checkpoint() -> None:
    world = World({2: batch(error=CollectionExhausted("no prompts"))})
    with pytest.raises(CollectionExhausted):
        world.loop.run()
    assert world.calls == ["save 2"]


def test_what_was_collected_behind_a_checkpoint_is_kept_beside_it() -> None:
    world = World({2: batch(error=CollectionExhausted("no prompts"))}, interval=2)
    with pytest.raises(CollectionExhausted):
        world.loop.run()
    assert world.calls == ["save 2", "keep 2"]
    world = World({2: batch(is_interrupted=True)}, interval=2)
    assert world.loop.run() == STOPPED_BY_SIGNAL and world.calls == ["save 2", "keep 2"]


def test_servers_lost_for_good_leave_a_checkpoint_of_the_step_just_trained() -> None:
    world = World({}, fail_publish_at=3)
    with pytest.raises(ServersFailed):
        world.loop.run()
    assert world.calls == ["save 3"]
    world = World({}, fail_publish_at=0)
    with pytest.raises(ServersFailed):
        world.loop.run()
    assert world.calls == [], "nothing was done that a checkpoint could hold"


def test_a_failing_save_does_not_hide_the_first_error() -> None:
    world = World({1: batch(error=CollectionExhausted("no prompts"))})

    def fail() -> None:
        raise OSError("the disk is full")

    world.loop._parts.checkpoints.save = fail
    with pytest.raises(CollectionExhausted):
        world.loop.run()


@pytest.mark.parametrize(("seconds_left", "calls"), [(100.0, ["save 2", "save 3"]), (10.0, ["save 2"])])
def test_a_stop_saves_if_there_is_time_for_what_the_last_checkpoint_took(seconds_left: float, calls: list[str]) -> None:
    world = World({3: batch(is_interrupted=True)}, interval=2)
    save = world.loop._save

    def slow_save() -> None:
        save()
        world.loop._save_seconds = 20.0

    world.loop._save = slow_save
    world.stop.seconds_left = seconds_left
    assert world.loop.run() == STOPPED_BY_SIGNAL and world.calls == calls


@pytest.mark.parametrize(("interval", "evaluated"), [(0, [2]), (2, [2]), (1, [1, 2])])
def test_a_run_may_end_by_its_training_seconds_and_is_evaluated_once(interval: int, evaluated: list[int]) -> None:
    world = World({})
    world.loop._config.run.max_train_seconds = 5.0
    world.loop._config.evaluation = SimpleNamespace(at_start=False, at_end=True, interval=interval)
    # A step of three seconds, of which an evaluation took half of one.
    times = {"step": 3.0, "evaluate": 0.5, "checkpoint": 0.0}
    timer = SimpleNamespace(finish_step=lambda: times)
    world.loop._phases = SimpleNamespace(phase=lambda name: nullcontext(), timer=timer)
    seen: list[int] = []
    world.loop._parts.evaluator = SimpleNamespace(evaluate=seen.append)
    assert world.loop.run() == "training seconds used up"
    assert seen == evaluated and world.calls == ["save 2"]
