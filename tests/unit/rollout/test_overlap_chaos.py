"""Hundreds of weight updates with streamed parts, engines that fail and processes that are killed: nothing is lost or doubled."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from megatron_dapo.rollout.async_collector import AsyncCollector
from tests.examples import first

TIMEOUT_S = 60.0
NUM_UPDATES, NUM_GROUPS = 500, 4


@dataclass
class Saved:
    """A checkpoint: its state, its policy version, and what was trained before it."""

    state: str
    version: int
    num_trained: int


@dataclass
class ChaoticRun:
    """Trains steps in parts, and starts again from a checkpoint after every error and kill."""

    world: Any
    part_size: int
    chance: random.Random
    version: int = 0
    trained: list[str] = field(default_factory=list)  # prompts
    events: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._open()
        self._save()

    def _open(self) -> None:
        self.rollout = AsyncCollector(self.world.collector, self.world.max_staleness, TIMEOUT_S, overlaps=True)
        self._publish()

    def _publish(self) -> None:
        self.rollout.before_update()
        self._require_balance()
        self.world.engine.policy_version = self.version
        self.rollout.after_update(self.version)
        self.events["updates"] += 1

    def _require_balance(self) -> None:
        accounts = self.world.collector.accounting()
        assert accounts.is_balanced, f"prompts were lost: {accounts}"

    def _state(self) -> str:
        state = {"collector": self.rollout.state_dict(), "version": self.version}
        return json.dumps(state, default=np.ndarray.tolist)

    def _save(self) -> None:
        self.saved = Saved(self._state(), self.version, len(self.trained))

    def start_again(self, saved: Saved) -> None:
        """Begin a new process with what a checkpoint has; the old one may be in any state."""
        self.world = self.world.restart(saved.state, jitter=self.chance.randrange(10**6))
        self.version = saved.version
        del self.trained[saved.num_trained :]
        self._require_balance()
        self._open()

    def step(self) -> bool:
        """Train one step, with whatever happens in it; return False once the prompts are used up."""
        groups: list[Any] = []
        if self.chance.random() < 0.05:
            self.world.engine.polls_until_crash = self.chance.randrange(4)
        try:
            while True:
                part = self.rollout.next_batch(NUM_GROUPS, self.part_size)
                groups += part.groups
                assert all(self.version - group.policy_version <= self.world.max_staleness for group in part.groups)
                if part.is_last:
                    break
                self._disturb()
        except ConnectionError:
            self.events["failed polls"] += 1
            # The failed collector is consistent: what a save after the failure has is resumed.
            self.start_again(Saved(self._state(), self.version, len(self.trained)))
            return True
        except _Killed:
            self.events["kills"] += 1
            self._end()
            self.start_again(self.saved)
            return True
        if part.should_stop and not groups:
            return False
        self.trained += [group.prompt.prompt_id for group in groups]
        self.version += 1
        self._publish()
        if self.chance.random() < 0.3:
            self._save()
        return True

    def _disturb(self) -> None:
        """Between two parts: a kill, an evaluation, or a checkpoint, which has the step's parts as untrained."""
        self.events["parts"] += 1
        draw = self.chance.random()
        if draw < 0.06:
            raise _Killed
        if draw < 0.11:
            with self.rollout.paused():
                assert self.world.engine.num_unfinished == 0
                self._require_balance()
        elif draw < 0.16:
            self._save()

    def _end(self) -> None:
        """End the thread of a process that is killed, without a look at its state."""
        self.rollout.close()


class _Killed(Exception):
    """kill -9 of the process."""


CASES = [
    (order, staleness, part_size, ahead)
    for part_size, ahead in ((2, 0.0), (1, 0.5), (0, 0.0))
    for order, staleness in (("guarded", 2), ("start", 1), ("guarded", 1), ("start", 2))
]


@pytest.mark.parametrize(("order", "max_staleness", "part_size", "ahead"), first(2, CASES))
def test_each_prompt_is_trained_once_through_failures_kills_and_updates(
    make_world: Callable, order: str, max_staleness: int, part_size: int, ahead: float
) -> None:
    chance = random.Random(f"{order} {max_staleness} {part_size}")
    world = make_world(
        [0.5] * (NUM_UPDATES * NUM_GROUPS),
        group_size=2,
        jitter=1,
        abort_rate=0.03,
        filter_groups=False,
        max_staleness=max_staleness,
        oversample=1.0 + max_staleness,
        partial_rollout=True,
        order=order,
        ahead=ahead,
    )
    run = ChaoticRun(world, part_size, chance)
    try:
        while run.step():
            pass
    finally:
        run.rollout.close()
    assert run.version == NUM_UPDATES and run.events["updates"] > NUM_UPDATES
    assert len(run.trained) == len(set(run.trained)) == NUM_UPDATES * NUM_GROUPS, "lost or doubled prompts"
    assert run.events["failed polls"] > 5 and (not part_size or run.events["kills"] > 5), run.events
    accounts = run.world.collector.accounting()
    assert accounts.is_balanced and accounts.buffered == accounts.unfinished == accounts.in_flight == 0
