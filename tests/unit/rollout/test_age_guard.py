"""The age guard: no group is trained too late or dropped, whatever ends first; and the budget of groups started ahead."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from megatron_dapo.age_guard import DatedGroup, trainable
from megatron_dapo.rollout.async_collector import AsyncCollector
from megatron_dapo.rollout.batch import joined
from tests.examples import examples


def can_all_be_trained(deadlines: list[int], version: int, num_left: int, num_groups: int) -> bool:
    """Train by earliest deadline, batch after batch."""
    waiting = sorted(deadlines)
    while waiting:
        if waiting[0] < version:
            return False
        waiting, version, num_left = waiting[num_left:], version + 1, num_groups
    return True


def test_what_is_left_can_be_trained_in_time_and_no_place_is_kept_for_nothing() -> None:
    for seed in range(examples(2000)):
        rng = random.Random(seed)
        version, num_groups = rng.randrange(5), rng.randint(1, 5)
        num_left = rng.randint(1, num_groups)
        groups = [
            DatedGroup(version + rng.randrange(4), f"{number:03d}", rng.random() < 0.5)
            for number in range(rng.randrange(14))
        ]
        if not can_all_be_trained([one.deadline for one in groups], version, num_left, num_groups):
            continue
        chosen = trainable(groups, version, num_left, num_groups)
        assert len(set(chosen)) == len(chosen) <= num_left
        assert set(chosen) <= {one.group_id for one in groups if one.is_decided}
        rest = [one for one in groups if one.group_id not in chosen]
        places = num_left - len(chosen)
        assert can_all_be_trained([one.deadline for one in rest], version, places, num_groups)
        for other in (one for one in rest if one.is_decided and places):
            others = [one.deadline for one in rest if one is not other]
            assert not can_all_be_trained(others, version, places - 1, num_groups), "a place was kept for nothing"


@pytest.mark.parametrize("bound", [1, 2, 3])
@pytest.mark.parametrize("part_size", [0, 2])
def test_nothing_is_trained_too_late_or_dropped(make_world: Callable, bound: int, part_size: int) -> None:
    num_out_of_order = 0
    for seed in range(examples(50)):
        rng = random.Random(seed)
        world = make_world(
            [0.5] * 60,
            jitter=seed,
            filter_groups=False,
            max_staleness=bound,
            oversample=rng.choice([1.5, 2.0, 3.0]),
            partial_rollout=True,
            order="guarded",
            max_epochs=None,
        )
        trained: list[str] = []
        for version in range(12):
            world.engine.policy_version = version
            parts = [world.collector.collect(6, part_size=part_size)]
            while not parts[-1].is_last:
                parts.append(world.collector.collect(6, part_size=part_size))
                assert world.collector.accounting().is_balanced
            batch = joined(parts)
            assert len(batch.groups) == 6 and all(version - one.policy_version <= bound for one in batch.groups)
            ids = [group.group_id for group in batch.groups]
            first_open = world.collector._open.first_id or "9"
            num_out_of_order += sum(one > first_open for one in ids)
            assert version >= bound or max(ids) < first_open, "the first steps go by start"
            trained += ids
        ledger = world.collector.accounting()
        assert len(set(trained)) == len(trained) == 72 and ledger.is_balanced
        assert ledger.queued_again == 0 and ledger.drawn == ledger.trained + ledger.buffered + ledger.unfinished
    assert num_out_of_order > 0, "groups are taken as they end"


@pytest.mark.parametrize("ahead", [0.5, 1.0])
def test_the_budget_bounds_what_is_started_for_later_batches(make_world: Callable, ahead: float) -> None:
    world = make_world(
        [0.5] * 200, filter_groups=False, max_staleness=1, oversample=2.0, partial_rollout=True, ahead=ahead
    )
    rollout = AsyncCollector(world.collector, 1, 60.0)
    young = []
    try:
        for version in range(8):
            rollout.before_update()
            world.engine.policy_version = version
            rollout.after_update(version)
            batch = rollout.next_batch(6)
            assert len(batch.groups) == 6
            young.append(sum(group.policy_version == version for group in batch.groups))
            assert world.collector.accounting().drawn - 6 * (version + 1) <= 6 * ahead
    finally:
        rollout.close()
    assert world.collector.accounting().is_balanced
    assert min(young) >= (3 if ahead == 0.5 else 0), young
