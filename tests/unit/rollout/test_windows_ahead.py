"""Windows that are collected while those before are trained: the same windows, each once, and no token older than the bound."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from megatron_dapo.rollout.async_collector import AsyncCollector, State
from megatron_dapo.rollout.batch import RolloutBatch
from tests.examples import first

MIXED = [0.0, 0.05, 0.3, 0.5, 0.7, 0.95, 1.0]
TIMEOUT_S = 60.0
NUM_GROUPS = 5


def window_world() -> ModuleType:
    import window_world

    return window_world


def make_world(**changes: Any) -> Any:
    given = {"max_staleness": 1, "max_epochs": 4}
    return window_world().make_window_world(MIXED * 5, **{**given, **changes})


def contents(batch: RolloutBatch) -> list[tuple[str, int, bool, list[int]]]:
    samples = [sample for group in batch.groups for sample in group.samples]
    return [(one.sample_id, one.window.start, one.window.is_finished, one.completion.token_ids.tolist()) for one in samples]


def ages(batch: RolloutBatch) -> Counter[int]:
    """Return the trained tokens of a batch by age."""
    found: Counter[int] = Counter()
    for sample in (sample for group in batch.groups for sample in group.samples):
        for run in sample.completion.versions:
            found[batch.training_version - run.version] += max(0, run.end - max(run.start, sample.window.start))
    return +found


def on_policy(num_steps: int, **changes: Any) -> list[Any]:
    """Return the windows of a run in which nothing overlaps."""
    world = make_world(max_staleness=0, **changes)
    return [contents(world.collector.collect(NUM_GROUPS)) for _ in range(num_steps)]


def publish(world: Any, rollout: AsyncCollector, version: int) -> None:
    rollout.before_update()
    assert world.engine.num_unfinished == 0 and world.collector.accounting().is_balanced
    world.engine.policy_version = version
    rollout.after_update(version)


@contextmanager
def overlapped(world: Any, max_ahead: int = 1) -> Iterator[AsyncCollector]:
    rollout = AsyncCollector(world.collector, max_ahead, TIMEOUT_S)
    try:
        publish(world, rollout, world.engine.policy_version)
        yield rollout
    finally:
        rollout.close()


@pytest.mark.parametrize("jitter", [0, 1, 2])
@pytest.mark.parametrize("windows_per_step", [0, 12])
def test_the_windows_are_those_of_a_run_on_policy_and_at_most_one_version_old(jitter: int, windows_per_step: int) -> None:
    world = make_world(jitter=jitter, windows_per_step=windows_per_step)
    seen: Counter[int] = Counter()
    batches = []
    with overlapped(world) as rollout:
        for version in range(1, 21):
            batch = rollout.next_batch(NUM_GROUPS)
            assert batch.training_version == version - 1 and set(ages(batch)) <= {0, 1}
            seen += ages(batch)
            batches.append(contents(batch))
            publish(world, rollout, version)
    assert batches == on_policy(20, windows_per_step=windows_per_step)
    assert seen[1] and set(ages(batch)) <= {0, 1}


def test_the_next_window_is_collected_before_new_weights_come_and_no_further_one() -> None:
    world = make_world()
    with overlapped(world) as rollout:
        for version in range(1, 6):
            batch = rollout.next_batch(NUM_GROUPS)
            assert set(ages(batch)) == {min(1, batch.training_version)}
            with rollout._condition:
                ends = rollout._condition.wait_for(lambda: len(rollout._ready) == 1, TIMEOUT_S)
                assert ends and rollout._state is State.WAITING
            assert world.collector.generation_step == version + 1 == batch.generation_step + 1
            publish(world, rollout, version)


def test_new_weights_finish_a_window_that_older_ones_began() -> None:
    """The rest of each window is sampled by the weights that train it, after the tokens that there are."""
    world = make_world(jitter=3)
    polls = Counter[int]()
    poll = world.engine.poll

    def counted() -> list[Any]:
        polls[world.engine.policy_version] += 1
        return poll()

    world.engine.poll = counted
    mixed = 0
    with overlapped(world) as rollout:
        for version in range(1, 16):
            batch = rollout.next_batch(NUM_GROUPS)
            mixed += len(ages(batch)) == 2
            while polls[version - 1] < 1:  # the next collection has begun
                pass
            publish(world, rollout, version)
    assert mixed > 3


@dataclass
class Saved:
    """A checkpoint: its state, its policy version, and what was trained before it."""

    state: str
    version: int


@dataclass
class ChaoticRun:
    """Trains windows, and starts again from a checkpoint after every error and kill."""

    world: Any
    chance: random.Random
    version: int = 0
    trained: list[Any] = field(default_factory=list)
    events: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.open()
        self.saved = self.state()

    def open(self) -> None:
        self.rollout = AsyncCollector(self.world.collector, 1, TIMEOUT_S)
        publish(self.world, self.rollout, self.version)

    def state(self) -> Saved:
        state = {"collector": self.rollout.state_dict(), "version": self.version}
        return Saved(json.dumps(state, default=np.ndarray.tolist), self.version)

    def start_again(self, saved: Saved) -> None:
        """Begin a new process with what a checkpoint has; the old one may be in any state."""
        self.rollout.close()
        self.world = self.world.restart(saved.state, jitter=self.chance.randrange(10**6))
        self.version = saved.version
        del self.trained[self.version :]
        assert self.world.collector.accounting().is_balanced
        self.open()

    def step(self) -> None:
        chance = self.chance
        if chance.random() < 0.3:
            self.world.engine.polls_until_crash = chance.randrange(6)
        try:
            batch = self.rollout.next_batch(NUM_GROUPS)
            assert set(ages(batch)) <= {0, 1}
            self.events[f"age {max(ages(batch))}"] += 1
            if chance.random() < 0.3:  # The batch is trained meanwhile.
                self.events["kills"] += 1
                return self.start_again(self.saved)
            if chance.random() < 0.2:
                with self.rollout.paused():
                    assert self.world.engine.num_unfinished == 0
            self.trained.append(contents(batch))
            self.version += 1
            publish(self.world, self.rollout, self.version)
        except ConnectionError:
            self.events["failed polls"] += 1
            # The failed collector is consistent: what a save after the failure has is resumed.
            return self.start_again(self.state())
        if chance.random() < 0.5:
            self.saved = self.state()


@pytest.mark.parametrize("trial", first(3, range(12)))
def test_each_window_is_trained_once_through_failures_kills_and_updates(trial: int) -> None:
    """A batch in training when its process is killed was not published, so it is trained again, the same."""
    run = ChaoticRun(make_world(jitter=trial), random.Random(trial))
    try:
        while run.version < 30:
            run.step()
    finally:
        run.rollout.close()
    assert run.trained == on_policy(30)
    assert run.events["kills"] > 1 and run.events["failed polls"] > 1 and run.events["age 1"] > 5, run.events


@pytest.mark.parametrize("is_ready", [False, True])
def test_a_resume_that_allows_no_staleness_names_it(is_ready: bool) -> None:
    """Both a batch that is ready and a window that is begun may be older than a stricter bound allows."""
    world = make_world(jitter=1)
    stop = InterruptedError

    def after_some() -> None:
        if any(group.completions for group in world.collector._pool.groups):
            raise stop

    if is_ready:
        batch = world.collector.collect(NUM_GROUPS, training_version=1)
        state = json.loads(world.checkpoint(untrained=[batch]))
    else:
        with pytest.raises(InterruptedError):
            world.collector.collect(NUM_GROUPS, 1, lambda: (world.collector.hold(), after_some()))
        state = json.loads(world.checkpoint())
    saved = json.dumps({**state, "version": 1})
    later = world.restart(saved, settings=replace(world.settings, max_staleness=0))
    with pytest.raises(ValueError, match="by policy version 0 .* version 1, .*: resume with rollout.max_staleness = 1"):
        later.collector.collect(NUM_GROUPS)
    assert later.collector.accounting().is_balanced
    assert world.restart(saved).collector.collect(NUM_GROUPS).groups
