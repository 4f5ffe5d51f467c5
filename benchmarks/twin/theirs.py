"""verl's schedules as its documentation and scripts describe them, on simulated engines.

Fully asynchronous (docs/advance/fully_async.md): the engines may hold (1 + staleness_threshold) x a step's prompts beyond
those that were trained; the trainer takes samples in the order in which they end, a step / trigger_parameter_sync_step at
a time; weights are then replaced. With partial rollout running responses are interrupted and continue with the new
weights, otherwise the engines run empty first. At most 16 prompts a server are in flight.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from twin.simulation import Cost, Fleet, Lengths, Response

PROMPTS_PER_SERVER = 16


@dataclass(frozen=True)
class Settings:
    """A run of verl's schedule."""

    engines: int
    cost: Cost
    lengths: Lengths
    prompts: int
    group_size: int
    update: float  # seconds of training a step
    sync: float
    staleness: float = 0.0
    parts: int = 4
    is_partial: bool = True
    num_steps: int = 12


@dataclass(frozen=True)
class Outcome:
    """Means over the steady steps."""

    step: float
    wait: float  # the trainer's for samples
    mean_age: float  # versions between the start of a sample and its training
    oldest: int


class Rollouter:
    """Starts prompts within the budget and queues those that ended."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.fleet = Fleet(settings.engines, settings.cost)
        self.version = 0
        self.begun: dict[int, int] = {}  # prompt -> version at its start
        self.ended: deque[int] = deque()
        self._open: dict[int, int] = {}  # prompt -> responses that run
        self._used = 0  # groups of the budget, since the last update
        self.start()

    def start(self) -> None:
        """Start prompts as far as the budget and the servers allow."""
        settings = self._settings
        budget = int(settings.prompts * (1 + settings.staleness))
        while self._used < budget and len(self._open) < PROMPTS_PER_SERVER * settings.engines:
            prompt, self._used = len(self.begun), self._used + 1
            self.begun[prompt], self._open[prompt] = self.version, settings.group_size
            lengths = settings.lengths.of_group(prompt, settings.group_size)
            self.fleet.submit(
                [Response((prompt, i), prompt, one, prompt=settings.lengths.prompt) for i, one in enumerate(lengths)]
            )

    def run_until(self, time: float) -> None:
        while self.fleet.next_end <= time:
            self.run_to_next()
        self.fleet.advance(time)

    def run_to_next(self) -> None:
        prompt = self.fleet.end_next().group
        self._open[prompt] -= 1
        if not self._open[prompt]:
            del self._open[prompt]
            self.ended.append(prompt)
            self.start()

    def update(self) -> None:
        """Replace the weights."""
        settings = self._settings
        while not settings.is_partial and self._open:
            self.run_to_next()
        self.fleet.pause(settings.sync)
        self.version += 1
        self._used = len(self._open) + len(self.ended)
        self.start()


def stream(settings: Settings) -> Outcome:
    """Simulate the fully asynchronous schedule."""
    rollouter, time = Rollouter(settings), 0.0
    part = settings.prompts // settings.parts
    steps: list[float] = []
    waits: list[float] = []
    ages: list[list[int]] = []
    for _ in range(settings.num_steps):
        begin, wait, taken = time, 0.0, list[int]()
        for _ in range(settings.parts):
            rollouter.run_until(time)
            while len(rollouter.ended) < part:
                rollouter.run_to_next()
            wait += max(0.0, rollouter.fleet.now - time)
            time = max(time, rollouter.fleet.now)
            taken += [rollouter.ended.popleft() for _ in range(part)]
            time += settings.update / settings.parts
        rollouter.run_until(time)
        ages.append([rollouter.version - rollouter.begun[prompt] for prompt in taken])
        rollouter.update()
        time = max(time, rollouter.fleet.now) + settings.sync
        steps.append(time - begin)
        waits.append(wait)
    return _steady(steps, waits, ages)


def one_step_off(settings: Settings) -> Outcome:
    """Simulate a batch that is generated whole while the one before is trained."""
    steps: list[float] = []
    waits: list[float] = []
    for number in range(settings.num_steps):
        seconds = generation(settings, number * settings.prompts)
        waits.append(max(0.0, seconds - settings.update))
        steps.append(max(seconds, settings.update) + settings.sync)
    return _steady(steps, waits, [[1]] * settings.num_steps)


def generation(settings: Settings, first: int = 0) -> float:
    """Return the seconds in which the engines generate one batch to its last response."""
    fleet = Fleet(settings.engines, settings.cost)
    for prompt in range(first, first + settings.prompts):
        lengths = settings.lengths.of_group(prompt, settings.group_size)
        fleet.submit([Response((prompt, i), prompt, one, prompt=settings.lengths.prompt) for i, one in enumerate(lengths)])
    while fleet.num_unfinished:
        fleet.end_next()
    return fleet.now


def _steady(steps: list[float], waits: list[float], ages: list[list[int]]) -> Outcome:
    first = len(steps) // 3
    counted = [age for step in ages[first:] for age in step]
    return Outcome(
        sum(steps[first:]) / len(steps[first:]),
        sum(waits[first:]) / len(waits[first:]),
        sum(counted) / len(counted),
        max(age for step in ages for age in step),
    )
