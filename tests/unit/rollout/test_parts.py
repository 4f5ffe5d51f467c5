"""Batches handed out in parts: the groups of the whole batch in its order, and nothing lost or trained twice on the way."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron_dapo.rollout.async_collector import AsyncCollector
from megatron_dapo.rollout.batch import RolloutBatch, joined
from megatron_dapo.watch.signals import Stopped
from tests.examples import examples

TIMEOUT_S = 60.0


def drawn(rng: random.Random) -> dict[str, Any]:
    """Settings of a collector: order of completion, filtering, oversampling, staleness."""
    rates = [0.0, 0.05, 0.3, 0.5, 0.7, 0.95, 1.0]
    staleness = rng.choice([0, 1, 2])
    return {
        "pass_rates": [rng.choice(rates) for _ in range(rng.choice([30, 90, 150]))],
        "jitter": rng.randrange(10**6),
        "abort_rate": rng.choice([0.0, 0.1]),
        "max_staleness": staleness,
        "oversample": rng.choice([1.0, 1.5, 2.5]) if staleness else 1.0,
        "partial_rollout": rng.random() < 0.6,
        "filter_groups": rng.random() < 0.8,
        "max_epochs": None if rng.random() < 0.5 else 1,
    }


def in_parts(collector: Any, num_groups: int, part_size: int, rng: random.Random) -> list[RolloutBatch]:
    """Collect a batch in parts; some are given back and collected again."""
    parts: list[RolloutBatch] = []
    while not parts or not parts[-1].is_last:
        parts.append(collector.collect(num_groups, part_size=part_size))
        assert collector.accounting().is_balanced
        if not parts[-1].is_last and len(parts) > 1 and rng.random() < 0.2:
            for _ in range(rng.randint(1, len(parts) - 1)):
                collector.give_back(parts.pop())
                assert collector.accounting().is_balanced
    return parts


def test_the_parts_of_a_batch_are_the_whole_batch(make_world: Callable) -> None:
    for seed in range(examples(200)):
        rng = random.Random(seed)
        settings = drawn(rng)
        num_groups, part_size = rng.randint(2, 9), rng.randint(1, 5)
        whole, parted = make_world(**settings), make_world(**settings)
        for version in range(6):
            whole.engine.policy_version = parted.engine.policy_version = version
            batch = whole.collector.collect(num_groups)
            parts = in_parts(parted.collector, num_groups, part_size, rng)
            assert replace(joined(parts), samples=()) == batch
            sizes = [len(part.groups) for part in parts[:-1]]
            assert sizes == [part_size] * len(sizes) and len(parts[-1].groups) <= part_size
            assert [part.num_before for part in parts] == [part_size * index for index in range(len(parts))]
            assert parted.checkpoint() == whole.checkpoint()
            if batch.should_stop:
                break


def test_a_part_comes_before_its_batch_is_decided(make_world: Callable) -> None:
    in_flight = []
    for jitter in range(10):
        world = make_world([0.5] * 60, filter_groups=False, jitter=jitter)
        part = world.collector.collect(12, part_size=3)
        ledger = world.collector.accounting()
        assert not part.is_last and len(part.groups) == ledger.trained == 3
        assert world.collector.train_step == 0, "a step is counted once its batch is complete"
        in_flight.append(ledger.in_flight)
    assert max(in_flight) > 0


@pytest.mark.parametrize("max_ahead", [0, 1, 2])
def test_the_thread_collects_the_rest_while_a_part_is_trained(make_world: Callable, max_ahead: int) -> None:
    settings = {"pass_rates": [0.5] * 200, "max_staleness": max_ahead, "partial_rollout": max_ahead > 0, "jitter": 5}
    for seed in range(examples(10)):
        rng = random.Random(seed)
        world = make_world(**settings)
        rollout = AsyncCollector(world.collector, max_ahead, TIMEOUT_S, overlaps=True)
        trained: list[str] = []
        try:
            for version in range(8):
                rollout.before_update()
                world.engine.policy_version = version
                rollout.after_update(version)
                parts = []
                while not parts or not parts[-1].is_last:
                    parts.append(rollout.next_batch(6, 2))
                    if rng.random() < 0.3:  # A checkpoint would hold every group once.
                        resumed = make_world(**settings)
                        state = json.loads(json.dumps(rollout.state_dict(), default=np.ndarray.tolist))
                        resumed.collector.load_state_dict(state)
                        ledger = resumed.collector.accounting()
                        assert ledger.is_balanced
                        done = parts[-1].is_last
                        assert ledger.trained == len(trained) + done * sum(len(part.groups) for part in parts)
                batch = joined(parts)
                assert [len(part.groups) for part in parts] == [2, 2, 2] and batch.training_version == version
                ids = [group.group_id for group in batch.groups]
                assert ids == sorted(ids)
                trained += ids
                assert all(version - group.policy_version <= max_ahead for group in batch.groups)
        finally:
            rollout.close()
        assert len(set(trained)) == len(trained) == 48 and world.collector.accounting().is_balanced


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_stop_waits_for_the_end_of_a_step_that_has_begun(make_world: Callable, overlaps: bool) -> None:
    world = make_world([0.5] * 60, filter_groups=False)
    is_asked = False

    def check_stop() -> None:
        if is_asked:
            raise Stopped

    rollout = AsyncCollector(world.collector, 0, TIMEOUT_S, check_stop=check_stop, overlaps=overlaps)
    try:
        rollout.before_update()
        rollout.after_update(0)
        first = rollout.next_batch(6, 2)
        is_asked = True
        second, third = (rollout.next_batch(6, 2) for _ in range(2))
        assert not first.is_last and not second.is_last and third.is_last and len(third.groups) == 2
        rollout.before_update()
        world.engine.policy_version = 1
        rollout.after_update(1)
        with pytest.raises(Stopped):
            rollout.next_batch(6, 2)
    finally:
        rollout.close()
    assert world.collector.accounting().is_balanced
