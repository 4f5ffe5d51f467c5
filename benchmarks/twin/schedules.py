"""A model of the product's schedules, which is faster than its collectors.

It is the schedule of `AsyncCollector` over `GroupCollector`, with which it is compared. "guarded" trains decided groups as
they end, but keeps a place for every group that this step must train to stay within the bound of the staleness, and never
drops one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from twin.ours import Outcome, Settings, outcome_of
from twin.simulation import Fleet, Response

Order = Literal["start", "guarded"]


@dataclass(frozen=True)
class Schedule:
    """How a step's groups are chosen and trained."""

    parts: int = 1  # mini-batches that are trained as soon as their groups are decided
    order: Order = "start"
    ahead: float | None = None  # batches that are started beyond the trained one; None: max_staleness
    keeps_cache: bool = False  # weights change in flight


class Model:
    """Engines that generate while the trainer works through the parts of its batch."""

    def __init__(self, settings: Settings, schedule: Schedule) -> None:
        self._settings, self._schedule = settings, schedule
        self._ahead = settings.max_staleness if schedule.ahead is None else schedule.ahead
        self.fleet = Fleet(settings.engines, settings.cost, keeps_groups=True)
        self.time = 0.0
        self.version = 0
        self.lengths: dict[int, list[int]] = {}
        self.num_computed_again = 0.0
        self._begun: dict[int, int] = {}  # open or decided group -> version at its start, in start order
        self._open: dict[int, int] = {}  # group -> responses that run
        self._decided: list[int] = []  # ordered by their ends
        self.trained: list[list[tuple[int, int]]] = []
        self._start()

    def _start(self) -> None:
        settings = self._settings
        most = round((self.version + 1 + self._ahead) * settings.prompts)
        for group in range(len(self.lengths), most):
            self.lengths[group] = lengths = settings.lengths.of_group(group, settings.group_size)
            self._begun[group], self._open[group] = self.version, len(lengths)
            self.fleet.submit(
                [Response((group, i), group, one, prompt=settings.lengths.prompt) for i, one in enumerate(lengths)]
            )

    def _run_to_next(self) -> None:
        group = self.fleet.end_next().group
        self._open[group] -= 1
        if not self._open[group]:
            del self._open[group]
            self._decided.append(group)

    def _choice(self, size: int, num_left: int) -> list[int]:
        """Return the groups of the next part, or fewer if it must wait; `num_left`: places left in the step."""
        if self._schedule.order == "start":
            first = list(self._begun)[:size]
            return [] if any(group in self._open for group in first) else first
        oldest = self.version - self._settings.max_staleness
        due = [group for group in self._decided if self._begun[group] <= oldest]
        others = [group for group in self._decided if self._begun[group] > oldest]
        num_due_open = sum(self._begun[group] <= oldest for group in self._open)
        return (due + others[: max(0, num_left - num_due_open - len(due))])[:size]

    def _part(self, size: int, num_left: int) -> float:
        """Train one part; return the seconds that the trainer waited for it."""
        begin = self.time
        while self.fleet.next_end <= self.time:
            self._run_to_next()
        while len(chosen := self._choice(size, num_left)) < size:
            num_decided = len(self._decided)
            while len(self._decided) == num_decided:
                self._run_to_next()
            self.time = max(self.time, self.fleet.now)
        self.trained[-1] += [(group, self.version - self._begun.pop(group)) for group in chosen]
        self._decided = [group for group in self._decided if group in self._begun]
        waited = self.time - begin
        self.time += self._settings.train / self._schedule.parts
        return waited

    def _update(self) -> None:
        while self.fleet.next_end <= self.time:
            self._run_to_next()
        self.fleet.advance(self.time)
        if not self._schedule.keeps_cache:
            self.num_computed_again += sum(engine.context for engine in self.fleet.engines)
        self.fleet.pause(self._settings.sync, self._schedule.keeps_cache)
        self.version += 1
        self.time += self._settings.sync
        self._start()

    def outcome(self) -> Outcome:
        """Train all steps and return their means."""
        settings, steps, waits = self._settings, list[float](), list[float]()
        size = settings.prompts // self._schedule.parts
        for _ in range(settings.num_steps):
            begin, waited = self.time, 0.0
            self.trained.append([])
            for part in range(self._schedule.parts):
                waited += self._part(size, settings.prompts - part * size)
            waits.append(waited)
            self._update()
            steps.append(self.time - begin)
            known = len(self._begun) + sum(map(len, self.trained))
            assert known == len(self.lengths), f"{len(self.lengths)} groups were started, {known} are accounted for"
        again = self.num_computed_again / max(1, self.fleet.num_tokens)
        return outcome_of(settings, steps, waits, self.trained, self.lengths, again, self.fleet.busy_share)


def simulate(settings: Settings, schedule: Schedule) -> Outcome:
    """Train with engines on separate GPUs."""
    return Model(settings, schedule).outcome()
