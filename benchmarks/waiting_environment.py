"""The environment of `episodes.py`: each step waits for a log-normal time of the episode's seed. Workers load it."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_dapo.environments import Environment, Step


def waits(task: Mapping[str, Any], seed: int) -> Iterator[float]:
    """Yield the seconds that the steps of an episode take."""
    rng = random.Random(seed)
    while True:
        yield rng.lognormvariate(0.0, task["sigma"]) * task["median_s"]


class Waiting(Environment):
    """Answers a fixed number of turns, and waits before each answer."""

    def reset(self, task, seed):
        self._waits, self._turns = waits(task, seed), 0
        return "Begin." if "begin" not in task else task["begin"]

    def step(self, turn):
        time.sleep(next(self._waits))
        self._turns += 1
        return Step(done=True, reward=1.0) if self._turns == self.task["turns"] else Step("Go on.")
