"""Ends of the loop that are not the end of the run: the state is saved where it is whole, in the time there is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_dapo.checkpoints.save import FAILED, IDLE, IN_FLIGHT, Saved
from megatron_dapo.checkpoints.store import CheckpointError
from megatron_dapo.engines.sglang.servers import ServersFailed
from megatron_dapo.files.durable import DirectoryReplaced, Files
from megatron_dapo.rollout.batch import CollectionExhausted, RolloutBatch
from megatron_dapo.rollout.statistics import StatisticsBuilder
from megatron_dapo.telemetry.metrics import PHASES
from megatron_dapo.telemetry.phases import PhaseTimer
from megatron_dapo.trainer import loop as module
from megatron_dapo.trainer.checkpointing import RunProgress
from megatron_dapo.trainer.loop import Parts, TrainingLoop
from megatron_dapo.trainer.rollout import CollectionEnded
from megatron_dapo.watch.attempts import STOPPED_BY_SIGNAL

MODELS = SimpleNamespace(
    is_offloading=False, offload_all=lambda: None, log_moved=lambda: None, on_device=lambda *names: nullcontext()
)
GAP = {"mismatch/abs_logprob_diff_mean": 0.0}


class FakeCheckpoints:
    """Saves that last until they are waited for, or until `num_looks` steps have passed."""

    def __init__(self, progress: RunProgress, calls: list[str]) -> None:
        self.saves = self
        self.is_copying = self.is_in_flight = False
        self.num_looks = 10**9
        self.error: Exception | None = None
        self.seconds = 0.0
        self._progress, self._calls = progress, calls
        self._step = self._looks = 0

    @property
    def status(self) -> float:
        self._looks += 1
        return IN_FLIGHT if self.is_in_flight and self._looks < self.num_looks else FAILED if self.error else IDLE

    def start_save(self) -> None:
        assert not self.is_in_flight, "one at a time"
        self.is_copying = self.is_in_flight = True
        self._step, self._looks = self._progress.train_step, 0
        self._calls.append(f"save {self._step}")

    def wait_for_copy(self) -> None:
        self.is_copying = False
        self._calls.append(f"copied {self._step}")

    def finish_save(self) -> Saved:
        self.is_copying = self.is_in_flight = False
        if self.error is not None:
            raise self.error
        self._calls.append(f"saved {self._step}")
        return Saved(self._step, Path("checkpoint"), self.seconds)

    def keep_collection(self) -> None:
        self._calls.append(f"keep {self._progress.train_step}")


class World:
    """A loop of four steps whose parts do nothing but note what was called. `generate`: by train step, else a batch."""

    def __init__(self, generate: dict[int, RolloutBatch | CollectionEnded], interval: int = 0, fail_publish_at: int = -1) -> None:
        self.calls: list[str] = []
        self.phases: list[str] = []  # open ones
        self.progress = RunProgress()
        self.stop = SimpleNamespace(requested=False, seconds_left=float("inf"))
        self._fail_publish_at, self._batches = fail_publish_at, generate
        config = SimpleNamespace(
            run=SimpleNamespace(total_steps=4, max_generation_steps=0, max_train_seconds=0.0),
            mismatch=SimpleNamespace(trend_factor=2.0, trend_floor=1.0, alarm=1.0),
            evaluation=SimpleNamespace(at_start=False, at_end=False, interval=0, background=False),
            checkpoint=SimpleNamespace(interval=interval),
            rollout=SimpleNamespace(prompts_per_step=1),
            mismatch_gate=None,
            part_size=0,
        )
        learner = SimpleNamespace(
            models=MODELS,
            has_converged=lambda: False,
            learn=lambda samples, *arguments: (samples, SimpleNamespace(metrics=GAP)),
        )
        self.checkpoints = FakeCheckpoints(self.progress, self.calls)
        parts = Parts(
            rollout=SimpleNamespace(generate=self._generate),
            learner=learner,
            publisher=SimpleNamespace(publish=self._publish),
            parity=None,
            evaluator=None,
            checkpoints=self.checkpoints,
            recorder=None,
            collector=None,
            data=None,
        )
        phases = SimpleNamespace(phase=self._phase, watch=self._phase, timer=PhaseTimer(list(PHASES)))
        self.files = Files()
        context = SimpleNamespace(config=config, phases=phases, stop=self.stop, files=self.files)
        self.loop = TrainingLoop(context, parts, self.progress)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self.phases.append(name)
        yield
        self.phases.pop()

    def _generate(self, num_groups: int, share: Any, part_size: int) -> RolloutBatch:
        found = self._batches.get(self.progress.train_step, batch())
        if isinstance(found, CollectionEnded):
            raise found
        return found

    def _publish(self, version: int) -> None:
        if version == self._fail_publish_at:
            raise ServersFailed("server 0 is lost")


def batch() -> RolloutBatch:
    return RolloutBatch((), StatisticsBuilder().build(), samples=["a sample"], generation_step=1)


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "max_over", lambda values: values)


def test_a_run_to_its_end_saves_at_intervals_and_at_the_end() -> None:
    world = World({}, interval=3)
    assert world.loop.run() == "finished"
    assert world.calls == ["save 3", "copied 3", "saved 3", "save 4", "saved 4"]


def test_a_save_is_noticed_when_all_ranks_meet_and_the_next_one_waits_for_it() -> None:
    world = World({}, interval=2)
    world.checkpoints.num_looks = 1
    world.loop.run()
    assert world.calls == ["save 2", "saved 2", "save 4", "saved 4"]
    world = World({}, interval=1)
    world.loop.run()
    # The fourth is of the last step: the end of the run does not save it again.
    each = [f"{what} {step}" for step in (1, 2, 3) for what in ("save", "copied", "saved")]
    assert world.calls == [*each, "save 4", "saved 4"]


def test_a_failed_save_ends_the_run_at_the_next_step() -> None:
    world = World({}, interval=2)
    world.checkpoints.num_looks = 1
    world.checkpoints.error = CheckpointError("the disk is full")
    with pytest.raises(CheckpointError, match="the disk is full"):
        world.loop.run()
    assert world.calls == ["save 2"] and world.progress.train_step == 2 and world.loop.saved_step == -1


def test_what_moves_between_device_and_host_is_copied_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World({}, interval=3)
    monkeypatch.setattr(MODELS, "is_offloading", True)
    world.loop.run()
    assert world.calls == ["save 3", "copied 3", "saved 3", "save 4", "copied 4", "saved 4"]


def test_an_error_of_the_collection_is_raised_after_a_checkpoint() -> None:
    world = World({2: CollectionEnded(1, CollectionExhausted("no prompts"))})
    with pytest.raises(CollectionExhausted):
        world.loop.run()
    assert world.calls == ["save 2", "saved 2"]


def test_what_was_collected_behind_a_checkpoint_is_kept_beside_it() -> None:
    world = World({2: CollectionEnded(1, CollectionExhausted("no prompts"))}, interval=2)
    with pytest.raises(CollectionExhausted):
        world.loop.run()
    assert world.calls == ["save 2", "saved 2", "keep 2"]
    world = World({2: CollectionEnded(1, None)}, interval=2)
    assert world.loop.run() == STOPPED_BY_SIGNAL and world.calls == ["save 2", "saved 2", "keep 2"]


class PartedWorld(World):
    """A loop whose batches come in three parts of one sample; `fail_at` (step, part) ends a collection with an error."""

    def __init__(self, fail_at: tuple[int, int] = (-1, -1), **options: Any) -> None:
        super().__init__({}, **options)
        self.num_parts, self._fail_at = 0, fail_at
        learner = self.loop._parts.learner
        learner.learn = lambda *arguments: pytest.fail("a batch in parts is not trained as a whole")
        learner.learn_parts = self._learn_parts

    def _generate(self, num_groups: int, share: Any, part_size: int) -> RolloutBatch:
        step, number = self.progress.train_step, self.num_parts % 3
        if (step, number) == self._fail_at:
            raise CollectionEnded(1, RuntimeError("the verifier is gone"))
        self.num_parts += 1
        self.calls.append(f"part {step}.{number}")
        return replace(batch(), samples=[SimpleSample(0)], is_last=number == 2)

    def _learn_parts(self, parts: Any, step: int, gate: float | None) -> tuple[list[Any], Any]:
        for samples in parts:
            assert self.phases == [] and len(samples) == 1
            self.calls.append("trained")
        return [], SimpleNamespace(metrics=GAP)


@dataclass(frozen=True)
class SimpleSample:
    group_index: int


def test_each_part_is_generated_when_the_one_before_is_trained() -> None:
    world = PartedWorld(interval=3)
    assert world.loop.run() == "finished"
    step = [call for number in range(3) for call in (f"part 0.{number}", "trained")]
    assert world.calls[:7] == [*step, "part 1.0"] and world.progress.num_samples == 12
    assert [call for call in world.calls if call.startswith("save ")] == ["save 3", "save 4"]


def test_a_step_trained_in_part_is_not_saved(caplog: pytest.LogCaptureFixture) -> None:
    world = PartedWorld(fail_at=(2, 1), interval=2)
    with pytest.raises(RuntimeError, match="the verifier is gone"):
        world.loop.run()
    assert {"part 2.0", "save 2"} <= set(world.calls) and "part 2.1" not in world.calls
    assert [call for call in world.calls if call.startswith("save ")] == ["save 2"]
    assert "train step 3 was trained in part; a resumed run repeats what follows step" in caplog.text
    world = PartedWorld(fail_at=(2, 0), interval=0)
    with pytest.raises(RuntimeError, match="the verifier is gone"):
        world.loop.run()
    assert "save 2" in world.calls, "between steps the state is whole"


def test_servers_lost_for_good_leave_a_checkpoint_of_the_step_just_trained() -> None:
    world = World({}, fail_publish_at=3)
    with pytest.raises(ServersFailed):
        world.loop.run()
    assert world.calls == ["save 3", "saved 3"]
    world = World({}, fail_publish_at=0)
    with pytest.raises(ServersFailed):
        world.loop.run()
    assert world.calls == [], "nothing was done that a checkpoint could hold"


def test_a_failing_save_does_not_hide_the_first_error() -> None:
    world = World({1: CollectionEnded(1, CollectionExhausted("no prompts"))})

    def fail() -> None:
        raise OSError("the disk is full")

    world.checkpoints.start_save = fail
    with pytest.raises(CollectionExhausted):
        world.loop.run()


@pytest.mark.parametrize(("seconds_left", "is_saved"), [(100.0, True), (10.0, False)])
def test_a_stop_saves_if_there_is_time_for_what_the_last_checkpoint_took(seconds_left: float, is_saved: bool) -> None:
    world = World({3: CollectionEnded(1, None)}, interval=2)
    world.checkpoints.seconds = 20.0
    world.stop.seconds_left = seconds_left
    assert world.loop.run() == STOPPED_BY_SIGNAL
    assert world.calls == ["save 2", "copied 2", "saved 2", *(["save 3", "saved 3"] if is_saved else [])]


@pytest.mark.parametrize(("interval", "evaluated"), [(0, [2]), (2, [2]), (1, [1, 2])])
def test_a_run_may_end_by_its_training_seconds_and_is_evaluated_once(interval: int, evaluated: list[int]) -> None:
    world = World({})
    world.loop._config.run.max_train_seconds = 5.0
    world.loop._config.evaluation = SimpleNamespace(at_start=False, at_end=True, interval=interval, background=False)
    # A step of three seconds, of which an evaluation took half of one.
    times = {"step": 3.0, "evaluate": 0.5, "checkpoint": 0.0}
    timer = SimpleNamespace(finish_step=lambda: times, paused=nullcontext)
    world.loop._phases.timer = timer
    seen: list[int] = []
    world.loop._parts.evaluator = SimpleNamespace(evaluate=seen.append)
    assert world.loop.run() == "training seconds used up"
    assert seen == evaluated and world.calls == ["save 2", "saved 2"]


def test_a_failing_evaluation_is_raised_after_a_checkpoint() -> None:
    world = World({})
    world.loop._config.evaluation.interval = 2

    def fail(step: int) -> None:
        raise KeyError("no verdict")

    world.loop._parts.evaluator = SimpleNamespace(evaluate=fail)
    with pytest.raises(KeyError, match="no verdict"):
        world.loop.run()
    assert world.calls == ["save 2", "saved 2"]


class FakeEvaluator:
    """Notes its calls among those of the world."""

    def __init__(self, world: World) -> None:
        self._world = world

    def evaluate(self, step: int) -> None:
        self._world.calls.append(f"evaluate {step}")

    def begin(self, step: int) -> None:
        self._world.calls.append(f"begin {step}")

    def finish(self, has_time: Callable[[], bool]) -> None:
        self._world.calls.append(f"finish, {has_time()}")

    def cancel(self) -> None:
        self._world.calls.append("cancel")


def background_world(batches: dict[int, RolloutBatch | CollectionEnded]) -> World:
    world = World(batches, interval=1)
    world.loop._config.evaluation = SimpleNamespace(at_start=True, at_end=True, interval=2, background=True)
    world.loop._parts.evaluator = FakeEvaluator(world)
    publish = world.loop._parts.publisher.publish

    def note(version: int) -> None:
        world.calls.append(f"publish {version}")
        publish(version)

    world.loop._parts.publisher.publish = note
    return world


def test_an_evaluation_in_the_background_ends_before_the_next_weights_are_served() -> None:
    world = background_world({})
    world.loop.run()
    order = [call for call in world.calls if not call.startswith(("save", "copied"))]
    assert order == [
        *("publish 0", "begin 0", "finish, True", "publish 1", "publish 2", "begin 2", "finish, True", "publish 3"),
        *("publish 4", "evaluate 4"),
    ]
    # The checkpoint of step 2 does not know the evaluation, which a resumed run repeats.
    assert world.calls.index("begin 2") < world.calls.index("save 2") < world.calls.index("publish 3")


def test_the_end_of_the_data_waits_for_an_evaluation_in_the_background() -> None:
    world = background_world({2: RolloutBatch((), StatisticsBuilder().build(), should_stop=True)})
    assert world.loop.run() == "data exhausted"
    assert world.calls[-1] == "finish, True" and "evaluate 2" not in world.calls


def test_a_signal_cancels_an_evaluation_whose_step_is_saved() -> None:
    world = background_world({2: CollectionEnded(1, None)})
    assert world.loop.run() == STOPPED_BY_SIGNAL
    assert "cancel" in world.calls and world.calls.count("finish, True") == 1


@pytest.mark.parametrize(("seconds_left", "has_time"), [(31.0, True), (29.0, False), (float("inf"), False)])
def test_a_signal_within_a_step_leaves_an_evaluation_the_time_beyond_a_save(seconds_left: float, has_time: bool) -> None:
    world = background_world({})
    world.checkpoints.seconds = 20.0
    learn = world.loop._parts.learner.learn

    def signaled(*arguments: Any) -> Any:
        if world.progress.train_step == 2:
            world.stop.requested, world.stop.seconds_left = True, seconds_left
        return learn(*arguments)

    world.loop._parts.learner.learn = signaled
    assert world.loop.run() == STOPPED_BY_SIGNAL
    assert world.calls[world.calls.index("publish 3") - 1] == f"finish, {has_time}"


def test_the_collective_at_the_head_of_a_step_belongs_to_a_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside any phase a lost node would be reported in `start`, with the limits of a start."""
    world, seen = World({}), []
    monkeypatch.setattr(module, "max_over", lambda values: seen.append(list(world.phases)) or values)
    world.loop.run()
    assert seen == [["step"]] * 4


@pytest.mark.parametrize("interval", [0, 1, 4])
def test_a_replaced_directory_ends_the_run_at_the_next_step_and_nothing_is_saved(tmp_path: Path, interval: int) -> None:
    """As `umount -l` does: the path leads to an empty directory, in which every write would succeed."""
    run = tmp_path / "run"
    run.mkdir()
    world = World({}, interval=interval)
    world.files.hold(run)
    generate = world._generate

    def unmount(num_groups: int, share: Any, part_size: int) -> RolloutBatch:
        if world.progress.train_step == 2:
            run.rename(tmp_path / "elsewhere")
            run.mkdir()
        return generate(num_groups, share, part_size)

    world.loop._parts.rollout.generate = unmount
    with pytest.raises(DirectoryReplaced, match=f"{run} is another directory than before on "):
        world.loop.run()
    assert world.progress.train_step == 3 and "save 3" not in world.calls


def test_a_mismatch_above_the_alarm_is_one_warning_a_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(GAP, "mismatch/abs_logprob_diff_mean", 1.5)
    world = World({})
    assert world.loop.run() == "finished" and world.progress.train_step == 4
    warnings = [message for message in caplog.messages if "trainer and engine differ" in message]
    assert warnings == [
        "train step 1: trainer and engine differ by 1.5 nats a token on average, above 1 (mismatch.alarm); "
        "further steps are only marked in the report"
    ]
