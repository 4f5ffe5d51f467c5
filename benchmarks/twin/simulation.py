"""Engines as queues: decoding steps, prefill and pauses on a clock that the caller moves.

A decoding step gives every running response of an engine one token. It lasts

    max(bytes read / bandwidth, operations / peak) + fixed + per response

where the bytes are the weights and the keys and values of all running contexts. Between two events the context of an
engine grows linearly, so the seconds of many steps, and the steps of so many seconds, have a closed form.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from megatron_dapo.plan.device import REQUEST_SECONDS, SHARES, TICK_SECONDS
from megatron_dapo.plan.rollout import EngineRates

NEVER = math.inf


@dataclass(frozen=True)
class Cost:
    """Seconds of one engine's decoding step, by what they grow with, and of prefill."""

    weights: float  # reading the weights, once a step
    context: float  # reading keys and values, a token of context
    products: float  # a running response
    fixed: float = TICK_SECONDS
    request: float = REQUEST_SECONDS  # a running response: sampling
    prefill: float = 0.0  # a token
    experts: float = 0.0  # reading all experts' weights
    chosen_share: float = 1.0  # share of the experts that a token chooses

    @classmethod
    def of(cls, rates: EngineRates, fixed: float = TICK_SECONDS) -> Cost:
        """Return the costs of a planned engine."""
        speed = rates.gpu.memory_bytes_s
        flops = rates.ranks * rates.gpu.flops
        operations = 2 * rates.active_parameters
        return cls(
            weights=rates.weight_bytes * (1 - rates.expert_share) / SHARES.decode_memory / speed,
            context=rates.bytes_per_token / SHARES.decode_memory / speed,
            products=operations / (flops * SHARES.decode_flops),
            fixed=fixed,
            prefill=operations / (flops * SHARES.prefill),
            experts=rates.weight_bytes * rates.expert_share / SHARES.decode_experts / speed,
            chosen_share=rates.chosen_share,
        )

    def without_prefill(self) -> Cost:
        """Return the costs of responses whose contexts are cached."""
        return replace(self, prefill=0.0)

    def step(self, running: int, context: float) -> float:
        """Return the seconds of one step with `context` tokens of all `running` responses together."""
        return self._line(running, context)[0]

    def seconds(self, running: int, context: float, steps: float) -> float:
        """Return the seconds of `steps` steps that begin with `context` tokens."""
        level, growth, until = self._line(running, context)
        return steps * level + (growth * (steps - until) ** 2 / 2 if steps > until else 0.0)

    def steps(self, running: int, context: float, seconds: float) -> float:
        """Return the steps, with their fraction, that `seconds` have room for: the inverse of `seconds`."""
        level, growth, until = self._line(running, context)
        if seconds <= until * level:
            return seconds / level
        rest = seconds - until * level
        return until + 2 * rest / (level + math.sqrt(level * level + 2 * growth * rest))

    def _line(self, running: int, context: float) -> tuple[float, float, float]:
        """Return the seconds of the first step, what each later one adds, and the steps before it begins to add."""
        read, products = self._weights(running) + self.context * context, self.products * running
        growth, overhead = self.context * running, self.fixed + self.request * running
        if read >= products:
            return read + overhead, growth, 0.0
        return products + overhead, growth, (products - read) / growth if growth else NEVER

    def _weights(self, running: int) -> float:
        if not self.experts:
            return self.weights
        # Experts that no token chooses are not read.
        return self.weights + self.experts * (1 - (1 - self.chosen_share) ** running)


@dataclass(frozen=True)
class Response:
    """A response to generate: `done` of its `length` tokens are there already."""

    key: Hashable
    group: Hashable
    length: int
    done: int = 0
    prompt: int = 0

    @property
    def context(self) -> int:
        return self.prompt + self.done


class Engine:
    """One engine: responses that run advance together, others wait for a slot."""

    def __init__(self, cost: Cost, slots: float) -> None:
        self.cost, self.slots = cost, slots
        self.now = 0.0  # time up to which it is simulated; ahead of the caller's during a prefill or a pause
        self.step = 0.0
        self.context = 0.0
        self.busy_seconds = self.response_seconds = 0.0  # seconds with a running response; their sum over responses
        self.running: list[tuple[float, int, Response, float]] = []  # heap: (end, number, response, step of its begin)
        self.waiting: deque[Response] = deque()
        self._groups: set[Hashable] = set()  # groups with a cached prompt
        self._number = 0

    @property
    def load(self) -> int:
        return len(self.running) + len(self.waiting)

    @property
    def next_end(self) -> float:
        """Time at which the next response ends."""
        if not self.running:
            return NEVER
        steps = max(0.0, self.running[0][0] - self.step)
        return self.now + self.cost.seconds(len(self.running), self.context, steps)

    def submit(self, response: Response) -> None:
        self.waiting.append(response)
        self._fill()

    def advance(self, to: float) -> None:
        """Decode up to a time at which nothing ends before."""
        if to <= self.now:
            return
        if self.running:
            self._decode(to - self.now, self.cost.steps(len(self.running), self.context, to - self.now))
        self.now = to

    def end_next(self, end: float) -> Response:
        """Decode up to the next end, at time `end`, and return the response."""
        self._decode(end - self.now, max(0.0, self.running[0][0] - self.step))
        self.now = end
        self.step, _, response, _ = heapq.heappop(self.running)
        self.context -= response.prompt + response.length
        if not self.running:
            self.context = 0.0
        if self.waiting:
            self._fill()
        return response

    def tokens(self) -> list[tuple[Response, int]]:
        """Return the responses with the tokens that each has."""
        running = [(one, one.done + int(self.step - began + 1e-9)) for _, _, one, began in self.running]
        return running + [(one, one.done) for one in self.waiting]

    def stop(self) -> list[tuple[Response, int]]:
        """Remove everything; return the responses with the tokens that each has."""
        stopped = self.tokens()
        self.running, self.context = [], 0.0
        self.waiting.clear()
        return stopped

    def pause(self, now: float, seconds: float, keeps_cache: bool) -> None:
        """Stand still for `seconds` from `now`; without the cache, contexts are computed again afterwards."""
        self.advance(now)
        self.now = max(self.now, now) + seconds
        if not keeps_cache:
            self._groups.clear()
            self.now += self.cost.prefill * self.context

    def _decode(self, seconds: float, steps: float) -> None:
        self.busy_seconds += seconds
        self.response_seconds += seconds * len(self.running)
        self.step += steps
        self.context += steps * len(self.running)

    def _fill(self) -> None:
        while self.waiting and len(self.running) < self.slots:
            response = self.waiting.popleft()
            self._number += 1
            # A prompt is computed once for its group.
            computed = response.done + (0 if response.group in self._groups else response.prompt)
            self._groups.add(response.group)
            self.now += self.cost.prefill * computed
            end = self.step + response.length - response.done
            heapq.heappush(self.running, (end, self._number, response, self.step))
            self.context += response.context


class Fleet:
    """Engines with one clock. A response goes to the engine that its group is on unless that has more than its share."""

    def __init__(self, num_engines: int, cost: Cost, slots: float = NEVER, keeps_groups: bool = False) -> None:
        self.now = 0.0
        self.num_unfinished = 0
        self.num_tokens = 0  # generated
        self.engines = [Engine(cost, slots) for _ in range(num_engines)]
        self._keeps_groups = keeps_groups
        self._homes: dict[Hashable, int] = {}  # group -> its engine
        self._loads = [0] * num_engines
        self._events: list[tuple[float, int, int]] = []  # heap: (time, engine, its generation)
        self._generations = [0] * num_engines
        self._changed: set[int] = set()

    @property
    def next_end(self) -> float:
        """Time at which the next response ends."""
        if not self._changed:
            return self._events[0][0] if self._events else NEVER
        for index in self._changed:
            self._generations[index] += 1
            heapq.heappush(self._events, (self.engines[index].next_end, index, self._generations[index]))
        self._changed.clear()
        while self._events and self._events[0][2] != self._generations[self._events[0][1]]:
            heapq.heappop(self._events)
        return self._events[0][0] if self._events else NEVER

    @property
    def busy_share(self) -> float:
        """Share of the time in which an engine decodes, the mean of all."""
        return sum(engine.busy_seconds for engine in self.engines) / (len(self.engines) * max(self.now, 1e-9))

    @property
    def mean_running(self) -> float:
        """Responses that run at a time in one engine, the mean over the time and the engines."""
        return sum(engine.response_seconds for engine in self.engines) / (len(self.engines) * max(self.now, 1e-9))

    def submit(self, responses: Sequence[Response]) -> None:
        for response in responses:
            index = self._choose(response)
            self.engines[index].advance(self.now)
            self.engines[index].submit(response)
            self._loads[index] += 1
            self._changed.add(index)
        self.num_unfinished += len(responses)

    def end_next(self) -> Response:
        """Move the clock to the next end and return the response."""
        time = self.next_end
        index = self._events[0][1]
        response = self.engines[index].end_next(time)
        self.now = max(self.now, time)
        self._loads[index] -= 1
        self._changed.add(index)
        self.num_unfinished -= 1
        self.num_tokens += response.length - response.done
        return response

    def advance(self, to: float) -> list[Response]:
        """Move the clock and return what ends until then, in the order of the ends."""
        ended = []
        while self.next_end <= to:
            ended.append(self.end_next())
        self.now = max(self.now, to)
        return ended

    def running(self) -> Iterator[tuple[Response, int]]:
        """Yield the unfinished responses with the tokens that each has."""
        for engine in self.engines:
            engine.advance(self.now)
            yield from engine.tokens()

    def stop(self) -> list[tuple[Response, int]]:
        """Remove everything; return the responses with the tokens that each has."""
        stopped = []
        for index, engine in enumerate(self.engines):
            engine.advance(self.now)
            stopped += engine.stop()
            self._changed.add(index)
        self._loads = [0] * len(self.engines)
        self.num_unfinished = 0
        self.num_tokens += sum(tokens - one.done for one, tokens in stopped)
        return stopped

    def pause(self, seconds: float, keeps_cache: bool = False) -> None:
        """Let all engines stand still for `seconds`, as while weights are replaced."""
        for index, engine in enumerate(self.engines):
            engine.pause(self.now, seconds, keeps_cache)
            self._changed.add(index)

    def _choose(self, response: Response) -> int:
        least = min(self._loads)
        if self._keeps_groups:
            home = self._homes.get(response.group)
            if home is not None and self._loads[home] <= 9 / 8 * (self.num_unfinished / len(self._loads)) + 1:
                return home
        index = self._loads.index(least)
        self._homes[response.group] = index
        return index


@dataclass(frozen=True)
class Lengths:
    """Log-normal response lengths, cut at the longest; a prompt's responses share a part of the spread."""

    median: float
    sigma: float  # standard deviation of the logarithm, of all responses together
    longest: int
    prompt_sigma: float = 0.0  # the part of it that a prompt's responses share
    prompt: int = 200  # tokens of a prompt
    seed: int = 0

    def of_group(self, number: int, size: int, draw: int = 0) -> list[int]:
        """Return the lengths of the responses of a group; another `draw` is of the same prompt."""
        shared, single = _scores(self.seed, number, size)
        if draw:
            single = np.random.default_rng((self.seed, number, draw)).standard_normal(size)
        own = math.sqrt(max(0.0, self.sigma**2 - self.prompt_sigma**2))
        logs = self.prompt_sigma * shared + own * single
        return np.clip(self.median * np.exp(logs), 1, self.longest).astype(int).tolist()

    @property
    def mean(self) -> float:
        """Mean length."""
        return _mean(self.median, self.sigma, self.longest)


@lru_cache(maxsize=1 << 14)
def _scores(seed: int, number: int, size: int) -> tuple[float, np.ndarray]:
    """Return standard normal numbers: one of a group and one of each response; runs of one seed draw the same."""
    chance = np.random.default_rng((seed, number))
    return chance.standard_normal(), chance.standard_normal(size)


@lru_cache(maxsize=256)
def _mean(median: float, sigma: float, longest: int) -> float:
    scores = np.linspace(-6, 6, 4001)
    weights = np.exp(-scores * scores / 2)
    return float((np.minimum(longest, median * np.exp(sigma * scores)) * weights).sum() / weights.sum())
