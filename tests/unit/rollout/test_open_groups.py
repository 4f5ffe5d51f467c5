"""The engine is not stopped between batches that follow at once, and counts that are kept equal those of a scan."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from megatron_dapo.rollout.async_collector import AsyncCollector
from megatron_dapo.rollout.batch import CollectProgress
from megatron_dapo.rollout.open_group import is_partial
from megatron_dapo.types import Completion
from tests.examples import examples

TIMEOUT_S = 60.0
AHEAD = {"max_staleness": 2, "oversample": 3.0, "partial_rollout": True, "max_epochs": None}


def count_stops(world: Any) -> list[int]:
    """Return a list that grows by the number of responses stopped at each abort."""
    stops: list[int] = []
    abort = world.engine.abort

    def counted() -> list[Completion]:
        stopped = abort()
        stops.append(len(stopped))
        return stopped

    world.engine.abort = counted
    return stops


@pytest.mark.parametrize("order", ["start", "guarded"])
def test_the_engine_works_on_through_the_end_of_a_batch_that_another_follows(make_world: Callable, order: str) -> None:
    """Two batches by one version: the same groups as with a stop in between, and no response is stopped."""
    num_in_flight = 0
    for seed in range(examples(30)):
        settings = {**AHEAD, "order": order, "jitter": seed, "filter_groups": False}
        world, other = make_world([0.5] * 60, **settings), make_world([0.5] * 60, **settings)
        stops = count_stops(world)
        first = world.collector.collect(5, 0, is_followed=lambda: True)
        ledger = world.collector.accounting()
        assert ledger.is_balanced and ledger.unfinished == 0
        assert first.statistics.num_unfinished == ledger.in_flight
        num_in_flight += ledger.in_flight
        second = world.collector.collect(5, 1)
        assert stops == [] or world.engine.num_unfinished == 0 and len(stops) == 1, "stopped at the end only"
        expected = [other.collector.collect(5, version) for version in (0, 1)]
        if order == "start":
            assert [first.groups, second.groups] == [batch.groups for batch in expected]
        assert second.statistics.num_continued == 0
        assert world.collector.accounting().is_balanced
    assert num_in_flight > 0


def test_responses_that_the_next_batch_may_not_train_are_stopped(make_world: Callable) -> None:
    world = make_world([0.5] * 60, **{**AHEAD, "max_staleness": 1}, filter_groups=False)
    stops = count_stops(world)
    world.collector.collect(5, 1, is_followed=lambda: True)
    ledger = world.collector.accounting()
    assert ledger.in_flight == 0 and ledger.is_balanced, "a token of version 0 may not train version 2"
    assert len(stops) <= 1


def test_after_an_error_the_engine_is_stopped(make_world: Callable) -> None:
    """The error may have kept requests from the engine, which the next collection submits."""
    world = make_world([0.5] * 60, **AHEAD, filter_groups=False)
    stops = count_stops(world)
    world.collector.collect(5, 0, is_followed=lambda: True)
    world.engine.polls_until_crash = 0
    with pytest.raises(ConnectionError):
        world.collector.collect(5, 1)
    assert stops == [] and world.collector.accounting().is_balanced
    world.engine.polls_until_crash = None
    assert len(world.collector.collect(5, 1, is_followed=lambda: True).groups) == 5
    assert len(stops) == 1 and world.collector.accounting().is_balanced


@pytest.mark.parametrize("order", ["start", "guarded"])
def test_the_thread_stops_the_engine_only_for_updates(make_world: Callable, order: str) -> None:
    """The trainer is slow: two batches are collected by each version, and only `before_update` stops responses."""
    world = make_world([0.5] * 60, **AHEAD, order=order, filter_groups=False)
    stops = count_stops(world)
    rollout = AsyncCollector(world.collector, 2, TIMEOUT_S)
    trained: list[str] = []
    try:
        for version in range(9):
            rollout.before_update()
            world.engine.policy_version = version
            rollout.after_update(version)
            batch = rollout.next_batch(6)
            trained += [group.group_id for group in batch.groups]
            assert all(version - group.policy_version <= 2 for group in batch.groups)
            with rollout._condition:  # the batches ahead are collected
                assert rollout._condition.wait_for(
                    lambda version=version: rollout._next_version == version + 3, TIMEOUT_S
                )
    finally:
        rollout.close()
    assert len(set(trained)) == len(trained) == 54 and world.collector.accounting().is_balanced
    assert len(stops) <= 9 + 1, f"stopped {stops}: more often than weights were replaced"


def test_the_progress_equals_a_count_of_all_responses(make_world: Callable) -> None:
    seen: list[CollectProgress] = []

    def compare(progress: CollectProgress) -> None:
        collector = world.collector
        held = [one for group in collector._open for one in group.completions.values()]
        num_ended = 0 if collector._open.is_held else sum(not is_partial(one) for one in held)
        assert progress.num_responses == collector._builder.num_scored_responses + num_ended
        assert progress.num_in_flight == collector.accounting().in_flight
        seen.append(progress)

    def hold_at_times() -> None:
        if rng.random() < 0.1:
            world.collector.hold()

    for seed in range(examples(30)):
        rng = random.Random(seed)
        world = make_world(
            [0.0, 0.3, 0.6, 1.0] * 30,
            jitter=seed,
            abort_rate=rng.choice([0.0, 0.2]),
            max_staleness=1,
            oversample=rng.choice([1.0, 2.0]),
            partial_rollout=rng.random() < 0.7,
            on_progress=compare,
            max_epochs=None,
        )
        for version in range(5):
            world.engine.policy_version = version
            world.collector.collect(6, between_polls=hold_at_times)
    assert len(seen) > 100
