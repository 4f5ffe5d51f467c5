"""A collection that is asked to stop: at the next poll, with nothing in flight and nothing lost, on and off the thread."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import numpy as np
import pytest

from megatron_dapo.rollout.async_collector import AsyncCollector, State

MIXED = [0.0, 0.05, 0.3, 0.5, 0.7, 0.95, 1.0]
TIMEOUT_S = 30.0


class Stop(Exception):
    pass


class Stopper:
    """Raises from its `after`-th look on."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Stop


def saved(state: dict, version: int) -> str:
    return json.dumps({"collector": state, "version": version}, default=np.ndarray.tolist)


def publish(rollout: AsyncCollector, world: object, version: int) -> None:
    rollout.before_update()
    world.engine.policy_version = version
    rollout.after_update(version)


@pytest.mark.parametrize("looks", [0, 1, 5])
def test_what_was_generated_continues(make_world: Callable, looks: int) -> None:
    world = make_world(MIXED * 20, partial_rollout=True, max_staleness=1)
    rollout = AsyncCollector(world.collector, 0, TIMEOUT_S, check_stop=Stopper(looks), keep_stopped=True)
    publish(rollout, world, 0)
    with pytest.raises(Stop):
        rollout.next_batch(6)
    assert world.engine.num_unfinished == 0, "the engine was emptied"
    accounting = world.collector.accounting()
    assert accounting.is_balanced and accounting.in_flight == 0
    assert (
        accounting.drawn == accounting.buffered + accounting.unfinished + accounting.filtered + accounting.queued_again
    )
    generated = world.engine.num_generated
    later = world.restart(saved(rollout.state_dict(), 0))
    batch = later.collector.collect(6)
    # The same groups as without the stop: they are the first ones that pass the filter.
    undisturbed = make_world(MIXED * 20, partial_rollout=True, max_staleness=1).collector.collect(6)
    assert [group.group_id for group in batch.groups] == [group.group_id for group in undisturbed.groups]
    assert batch.groups == undisturbed.groups
    if looks == 5:
        assert generated > 0 and batch.statistics.num_begun_earlier > 0


@pytest.mark.parametrize("oversample", [1.0, 2.0])
def test_a_collection_that_is_not_kept_is_repeated(make_world: Callable, oversample: float) -> None:
    settings = {"oversample": oversample, "max_staleness": 1, "max_epochs": None}
    expected, world = make_world(MIXED * 20, **settings), make_world(MIXED * 20, **settings)
    stop = Stopper(10**9)
    rollout = AsyncCollector(world.collector, 0, TIMEOUT_S, check_stop=stop, keep_stopped=False)
    publish(rollout, world, 0)
    assert rollout.next_batch(6) == expected.collector.collect(6)
    before = world.checkpoint()
    stop.left = 4
    with pytest.raises(Stop):
        rollout.next_batch(6)
    assert world.checkpoint() != before
    assert saved(rollout.state_dict(), world.engine.policy_version) == before


@pytest.mark.parametrize("looks", [0, 3, 40])
def test_the_thread_stands_still_and_its_state_can_be_saved(make_world: Callable, looks: int) -> None:
    world = make_world(MIXED * 40, partial_rollout=True, max_staleness=2, max_epochs=None)
    rollout = AsyncCollector(world.collector, 2, TIMEOUT_S, check_stop=Stopper(looks))
    publish(rollout, world, 0)
    start = time.monotonic()
    with pytest.raises(Stop):
        for version in range(1, 100):
            rollout.next_batch(6)
            publish(rollout, world, version)
    assert time.monotonic() - start < TIMEOUT_S
    state = rollout.state_dict()
    version = world.engine.policy_version
    assert world.engine.num_unfinished == 0 and saved(rollout.state_dict(), version) == saved(state, version)
    later = world.restart(saved(state, world.engine.policy_version))
    assert later.collector.accounting().is_balanced and len(later.collector.collect(6).groups) == 6
    rollout.close()
    assert rollout._state is State.CLOSED
