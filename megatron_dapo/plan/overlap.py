"""Estimates the step of a run whose engines generate ahead while the trainer works: one engine's queue and the trainer take
turns, as `AsyncCollector` and the training loop do.

    engine   batch t + 1 ... t + S, in start order | paused | contexts again, batch t + 1 ...
    trainer  waits for batch t | trains batch t    | update | waits for batch t + 1 ...

The engine stands for the mean of all. Its responses are a few that count for many, and one of full length that counts for
little: the longest of all engines, for which the trainer waits.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from megatron_dapo.plan.device import SHARES
from megatron_dapo.plan.rollout import EngineRates, Lengths

# Responses of a batch that are simulated: at least, at most, and as many as make the engine's places this many.
LEAST_SIMULATED, MOST_SIMULATED, PLACES = 48, 384, 24
NUM_STEPS, NUM_COUNTED = 12, 8


@dataclass(frozen=True)
class QueuedStep:
    """What one engine and the trainer do in a step."""

    responses: int  # an engine
    running: int  # at once
    train: float  # seconds of the trainer
    update: float  # seconds of a weight update
    max_staleness: int
    oversample: float
    ahead: float = 0.0  # batches started for later steps at most; 0: max_staleness


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
    allowed = [0.0] * (turns.max_staleness + 1)  # by batch: when its collection may begin
    for step in range(NUM_STEPS):
        is_counted = step >= NUM_STEPS - NUM_COUNTED
        if step == NUM_STEPS - NUM_COUNTED:
            first = time
        end = queue.run_to_end_of(step)
        if is_counted:
            waits += max(0.0, end - time)
            collects += end - max(allowed[step], queue.run_to_end_of(step - 1) if step else 0.0)
        time = max(time, end) + turns.train
        queue.run_until(time)
        time += turns.update
        queue.update(time)
        allowed.append(time)
    return Overlapped((time - first) / NUM_COUNTED, waits / NUM_COUNTED, collects / NUM_COUNTED)


class _Queue:
    """The engine: responses of numbered batches that run together and wait for a place."""

    def __init__(self, rates: EngineRates, lengths: Lengths, turns: QueuedStep) -> None:
        self._rates, self._lengths, self._turns = rates, lengths, turns
        self._begun = lengths.prompt + lengths.context  # tokens of a response that is submitted
        self._now = 0.0
        self._version = 0
        self._step = 0.0  # decoding steps
        self._context = 0.0
        self._num_running = 0.0
        self._running: list[tuple[float, int, float, float]] = []  # heap: (end, batch, weight, begin)
        self._waiting: deque[tuple[int, int, float]] = deque()  # (length, batch, weight)
        self._num_open: Counter[int] = Counter()  # batch -> responses that have not ended
        self._num_started = 0  # responses
        self._num_ended = 0  # batches that are complete, in order
        self._ends: dict[int, float] = {}  # batch -> time at which it was complete
        wanted = PLACES * turns.responses // max(1, turns.running)
        self._per_batch = max(1, min(turns.responses, max(LEAST_SIMULATED, min(MOST_SIMULATED, wanted))))
        self._weight = turns.responses / self._per_batch
        self._drawn = _spread(lengths.responses, self._per_batch)
        flops = rates.ranks * rates.gpu.flops * SHARES.prefill * (2 if rates.fp8 else 1)
        self._prefill = 2 * rates.active_parameters / flops  # seconds of a token
        self._start()

    def run_to_end_of(self, batch: int) -> float:
        """Decode until the batch is complete; return when it was."""
        while batch not in self._ends:
            self._advance(max(0.0, self._running[0][0] - self._step), None)
            self._end()
        return self._ends[batch]

    def run_until(self, time: float) -> None:
        """Decode up to a time."""
        while self._running:
            steps = max(0.0, self._running[0][0] - self._step)
            if self._now + self._seconds(steps) > time:
                break
            self._advance(steps, None)
            self._end()
        if time > self._now:
            self._advance(self._steps(time - self._now) if self._running else 0.0, time)

    def update(self, time: float) -> None:
        """Continue at `time` with new weights, for which contexts are computed again."""
        self._now = max(self._now, time)
        self._version += 1
        self._continue()

    def _continue(self) -> None:
        """Continue what an update interrupted."""
        self._now += self._prefill * self._context
        self._start()

    def _start(self) -> None:
        """Start responses as far as the staleness and the round of the collection allow."""
        turns = self._turns
        most = self._version + 1 + (turns.ahead or turns.max_staleness)
        if self._num_ended <= self._version + turns.max_staleness:
            most = min(most, self._num_ended + turns.oversample)
        while self._num_started < most * self._per_batch:
            batch, index = divmod(self._num_started, self._per_batch)
            self._num_started += 1
            if not index:
                self._num_open[batch] = self._per_batch + 1
            self._waiting.append((self._drawn[index], batch, self._weight))
            if index == self._per_batch - 1:
                self._waiting.append((max(self._lengths.responses), batch, 0.0))
        self._fill()

    def _fill(self) -> None:
        # Places are filled to the nearest multiple of what a simulated response counts for; sums of weights are not exact.
        places = self._turns.running + 1e-6
        while self._waiting and (not self._num_running or self._num_running + self._waiting[0][2] / 2 <= places):
            length, batch, weight = self._waiting.popleft()
            heapq.heappush(self._running, (self._step + length, batch, weight, self._step))
            self._num_running += weight
            self._context += weight * self._begun
            self._now += self._prefill * weight * self._lengths.context

    def _end(self) -> None:
        _, batch, weight, begin = heapq.heappop(self._running)
        self._num_running -= weight
        self._context -= weight * (self._begun + self._step - begin)
        self._num_open[batch] -= 1
        self._fill()
        while self._num_ended in self._num_open and not self._num_open[self._num_ended]:
            self._ends[self._num_ended] = self._now
            self._num_ended += 1
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


def _spread(lengths: tuple[int, ...], count: int) -> list[int]:
    """Return `count` lengths of the distribution, each the mean of its part, in a random order."""
    ordered = sorted(lengths)
    edges = [round(index * len(ordered) / count) for index in range(count + 1)]
    parts = [ordered[begin:end] or [ordered[min(begin, len(ordered) - 1)]] for begin, end in pairwise(edges)]
    means = [sum(part) // len(part) for part in parts]
    random.Random(0).shuffle(means)
    return means
