"""Estimates the step of a run whose engines generate ahead while the trainer works: one engine's queue and the trainer take
turns, as `AsyncCollector` and the training loop do.

    engine   groups of batch t + 1 ... t + S | paused | contexts again, batch t + 1 ...
    trainer  waits for batch t | trains it   | update | waits for batch t + 1 ...

With parts, the trainer waits for one after another. The engine stands for the mean of all. Its responses are a few that count
for many, and one of full length that counts for little: the longest of all engines.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal

from megatron_dapo.age_guard import DatedGroup, trainable
from megatron_dapo.config.schema import Config
from megatron_dapo.plan.device import SHARES
from megatron_dapo.plan.rollout import EngineRates, Lengths

# Responses of a batch that are simulated: at least, at most, and as many as make the engine's places this many.
LEAST_SIMULATED, MOST_SIMULATED, PLACES = 48, 384, 24
LEAST_GROUPS = 24  # simulated groups of a batch that is collected group by group
NUM_STEPS, NUM_COUNTED = 12, 8
BETWEEN_PROMPTS = 0.25  # share of the variance of log-lengths


@dataclass(frozen=True)
class Collection:
    """How a run makes batches of what ends."""

    group_size: int = 1  # responses that are decided together
    parts: int = 1  # mini-batches that are trained while the rest of the batch is generated; 1: whole batches
    order: Literal["start", "guarded"] = "start"
    in_flight: bool = False  # weights are replaced under running responses, which keep their contexts

    @property
    def takes_groups(self) -> bool:
        """True if the trainer does not wait for the whole of what was started first."""
        return self.parts > 1 or self.order == "guarded"

    @staticmethod
    def of(config: Config) -> Collection:
        """Return that of a run."""
        rollout, is_streamed = config.rollout, config.training.stream != "off"
        return Collection(
            rollout.group_size if config.algorithm.name != "tppo" else 1,
            rollout.prompts_per_step // config.training.mini_batch_prompts if is_streamed else 1,
            rollout.order,
            config.sglang.update_pause == "in_place",
        )


@dataclass(frozen=True)
class QueuedStep:
    """What one engine and the trainer do in a step."""

    responses: int  # an engine
    running: int  # limit of running responses
    train: float  # seconds of the trainer
    update: float  # seconds of a weight update
    max_staleness: int
    oversample: float
    ahead: float = 0.0  # batches started for later steps at most; 0: max_staleness
    collection: Collection = Collection()


@dataclass(frozen=True)
class Overlapped:
    """Mean seconds of a step in the steady state."""

    step: float
    wait: float  # the trainer's for its batch
    collect: float  # seconds from when a batch may be collected until it is complete, including updates in between

    @property
    def engine_idle(self) -> float:
        """Seconds in which nothing may be collected."""
        return max(0.0, self.step - max(self.collect, self.wait))


@lru_cache(maxsize=4096)
def overlapped_seconds(rates: EngineRates, lengths: Lengths, turns: QueuedStep) -> Overlapped:
    """Simulate some steps and return the means of the last ones."""
    queue, time, first, waits, collects = _Queue(rates, lengths, turns), 0.0, 0.0, 0.0, 0.0
    allowed = [0.0] * (turns.max_staleness + 1)  # batch -> earliest begin of its collection
    before = 0.0  # end of the last batch's collection
    for step in range(NUM_STEPS):
        is_counted = step >= NUM_STEPS - NUM_COUNTED
        if step == NUM_STEPS - NUM_COUNTED:
            first = time
        end = 0.0
        for part in range(turns.collection.parts):
            end = queue.run_to_end_of(step, part)
            waits += max(0.0, end - time) if is_counted else 0.0
            time = max(time, end) + turns.train / turns.collection.parts
        collects += end - max(allowed[step], before) if is_counted else 0.0
        before = end
        queue.run_until(time)
        time += turns.update
        queue.update(time)
        allowed.append(time)
    return Overlapped((time - first) / NUM_COUNTED, waits / NUM_COUNTED, collects / NUM_COUNTED)


@dataclass
class _Group:
    """Responses that are decided together."""

    number: int  # position in start order
    version: int  # policy version at its start
    num_open: int  # responses that have not ended


class _Queue:
    """The engine: groups of responses that run together and wait for a place, and the batches that are made of them."""

    def __init__(self, rates: EngineRates, lengths: Lengths, turns: QueuedStep) -> None:
        self._rates, self._lengths, self._turns = rates, lengths, turns
        self._begun = lengths.prompt + lengths.context  # tokens of a response that is submitted
        self._now = 0.0
        self._version = 0
        self._step = 0.0  # decoding steps
        self._context = 0.0
        self._num_running = 0.0
        self._running: list[tuple[float, int, float, float]] = []  # heap: (end, group, weight, begin)
        self._waiting: deque[tuple[int, int, float]] = deque()  # (length, group, weight)
        self._groups: dict[int, _Group] = {}  # number -> a group that was started and is in no batch yet
        self._num_started = 0  # groups
        self._ends: dict[tuple[int, int], float] = {}  # batch and part -> time at which it was complete
        self._next = (0, 0)  # batch and part that are collected
        wanted = PLACES * turns.responses // max(1, turns.running)
        least = max(LEAST_SIMULATED, LEAST_GROUPS * turns.collection.group_size if turns.collection.takes_groups else 0)
        num_responses = max(1, min(turns.responses, max(least, min(MOST_SIMULATED, wanted))))
        self._group_size = min(turns.collection.group_size, num_responses)
        self._per_batch = num_responses // self._group_size  # groups
        self._weight = turns.responses / (self._per_batch * self._group_size)
        self._drawn = _spread(lengths.responses, self._per_batch, self._group_size)
        flops = rates.ranks * rates.gpu.flops * SHARES.prefill * (2 if rates.fp8 else 1)
        self._prefill = 2 * rates.active_parameters / flops  # seconds of a token
        self._start()

    def run_to_end_of(self, batch: int, part: int) -> float:
        """Decode until that part of the batch is complete; return when it was."""
        while (batch, part) not in self._ends:
            self._advance(max(0.0, self._running[0][0] - self._step), None)
            self._end()
        return self._ends[batch, part]

    def run_until(self, time: float) -> None:
        """Decode up to a time."""
        while self._running:
            steps = max(0.0, self._running[0][0] - self._step)
            end = self._now + self._seconds(steps)
            if end > time:
                break
            self._advance(steps, end)
            self._end()
        if time > self._now:
            self._advance(self._steps(time - self._now) if self._running else 0.0, time)

    def update(self, time: float) -> None:
        """Continue at `time` with new weights, for which contexts are computed again unless they are replaced in flight."""
        self._now = max(self._now, time)
        self._version += 1
        if not self._turns.collection.in_flight:
            self._now += self._prefill * self._context
        self._collect()
        self._start()

    def _start(self) -> None:
        """Start groups as far as the staleness and the round of the collection allow."""
        turns, collected = self._turns, self._next[0]
        most = self._version + 1 + (turns.ahead or turns.max_staleness)
        if collected <= self._version + turns.max_staleness:
            most = min(most, collected + turns.oversample)
        while self._num_started < most * self._per_batch:
            number, place = self._num_started, self._num_started % self._per_batch
            self._num_started += 1
            lengths = self._drawn[place * self._group_size : (place + 1) * self._group_size]
            self._waiting.extend((length, number, self._weight) for length in lengths)
            if place == self._per_batch - 1:
                self._waiting.append((max(self._lengths.responses), number, 0.0))
                lengths = [*lengths, 0]
            self._groups[number] = _Group(number, self._version, len(lengths))
        self._fill()

    def _collect(self) -> None:
        """Collect the parts of batches that are complete now and may be trained by then."""
        while self._next[0] <= self._version + self._turns.max_staleness:
            chosen = self._complete_part()
            if chosen is None:
                return
            for number in chosen:
                del self._groups[number]
            self._ends[self._next] = self._now
            batch, part = self._next
            self._next = (batch, part + 1) if part + 1 < self._turns.collection.parts else (batch + 1, 0)

    def _complete_part(self) -> list[int] | None:
        """Return the numbers of the groups of the next part, None if they have not ended."""
        (batch, part), turns = self._next, self._turns
        begin, end = (-(-self._per_batch * index // turns.collection.parts) for index in (part, part + 1))
        if turns.collection.order == "guarded" and batch >= turns.max_staleness:
            if sum(not group.num_open for group in self._groups.values()) < end - begin:
                return None
            dated = [
                DatedGroup(group.version + turns.max_staleness, f"{group.number:012d}", not group.num_open)
                for group in self._groups.values()
            ]
            chosen = [int(name) for name in trainable(dated, batch, self._per_batch - begin, self._per_batch)][: end - begin]
        else:
            chosen = [number for number, _ in zip(self._groups, range(end - begin), strict=False)]
            chosen = [number for number in chosen if not self._groups[number].num_open]
        return chosen if len(chosen) == end - begin else None

    def _fill(self) -> None:
        # Places are filled to the nearest multiple of what a simulated response counts for; sums of weights are not exact.
        places = self._turns.running + 1e-6
        while self._waiting and (not self._num_running or self._num_running + self._waiting[0][2] / 2 <= places):
            length, group, weight = self._waiting.popleft()
            heapq.heappush(self._running, (self._step + length, group, weight, self._step))
            self._num_running += weight
            self._context += weight * self._begun
            self._now += self._prefill * weight * self._lengths.context

    def _end(self) -> None:
        _, group, weight, begin = heapq.heappop(self._running)
        self._num_running -= weight
        self._context -= weight * (self._begun + self._step - begin)
        self._groups[group].num_open -= 1
        self._fill()
        if not self._groups[group].num_open:
            before = self._next[0]
            self._collect()
            if self._next[0] > before:
                self._start()

    def _advance(self, steps: float, to: float | None) -> None:
        self._now = self._now + self._seconds(steps) if to is None else to
        self._step += steps
        self._context += steps * self._num_running

    def _seconds(self, steps: float) -> float:
        running = max(1.0, self._num_running)
        return steps * self._rates.seconds(running, self._context + running * steps / 2)

    def _steps(self, seconds: float) -> float:
        """Invert `_seconds`; two iterations suffice, because contexts change little within a step of training."""
        steps = 0.0
        for _ in range(3):
            running = max(1.0, self._num_running)
            steps = seconds / self._rates.seconds(running, self._context + running * steps / 2)
        return steps


def _spread(lengths: tuple[int, ...], num_groups: int, group_size: int) -> list[int]:
    """Return lengths of the distribution, each the mean of its part, in a random order in which those of a group are alike."""
    ordered, count, draw = sorted(lengths), num_groups * group_size, random.Random(0)
    edges = [round(index * len(ordered) / count) for index in range(count + 1)]
    parts = [ordered[begin:end] or [ordered[min(begin, len(ordered) - 1)]] for begin, end in pairwise(edges)]
    means = [sum(part) // len(part) for part in parts]
    scores = [
        math.sqrt(BETWEEN_PROMPTS) * prompt + math.sqrt(1 - BETWEEN_PROMPTS) * draw.gauss()
        for prompt in [draw.gauss() for _ in range(num_groups)]
        for _ in range(group_size)
    ]
    drawn = [0] * count
    for length, place in zip(means, sorted(range(count), key=scores.__getitem__), strict=True):
        drawn[place] = length
    return drawn
