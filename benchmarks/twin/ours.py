"""The product's collectors on simulated engines and a fake clock.

`AsyncCollector` has a thread, whose polls move the engines' clock. While the trainer works for some seconds, polls may
advance the engines that far and no further; while it waits for a batch, as far as the batch needs. Both threads take
turns, so a run repeats exactly.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from twin.simulation import Cost, Fleet, Lengths, Response

from megatron_dapo.config.algorithm_schema import WindowConfig
from megatron_dapo.config.rollout_schema import RolloutConfig
from megatron_dapo.data.prompt_stream import PromptStream
from megatron_dapo.engines.base import PrefixReuse
from megatron_dapo.rollout.async_collector import AsyncCollector
from megatron_dapo.rollout.batch import CollectProgress, RolloutBatch
from megatron_dapo.rollout.collector import Collector, CollectorInputs
from megatron_dapo.rollout.group_collector import GroupCollector
from megatron_dapo.rollout.scoring import SampleScorer
from megatron_dapo.rollout.window_collector import WindowCollector
from megatron_dapo.types import Completion, GenerationRequest, Prompt, Repetition, SamplingParams, Score, VersionRange

SCALE = 64  # tokens that a token of a completion stands for; times follow the whole lengths
POLL_SECONDS = 0.25  # fake seconds that a poll waits for more after a group has ended
TIMEOUT_S = 600.0
NUM_PROMPTS = 4096


@dataclass(frozen=True)
class Settings:
    """A run of the product."""

    engines: int
    cost: Cost
    lengths: Lengths
    prompts: int
    group_size: int
    train: float  # seconds of the trainer's phases a step
    sync: float  # seconds of a weight update
    max_staleness: int = 0
    oversample: float = 1.0
    ahead: float = 0.0  # batches started for later steps at most; 0: max_staleness
    tail_rounds: bool = False
    window: int = 0  # tokens; 0: whole responses
    parts: int = 1  # mini-batches that are trained while the rest of the batch is generated; 1: whole batches
    order: Literal["start", "guarded"] = "start"
    in_flight: bool = False  # weights are replaced under running responses, which keep their cache
    num_steps: int = 12
    num_warm: int = 4  # first steps that are not counted


@dataclass(frozen=True)
class Outcome:
    """Means over the counted steps, and the extremes of the whole run."""

    step: float
    wait: float  # the trainer's for a batch
    mean_age: float  # versions between a group's oldest token and its training
    oldest: int
    ages: Mapping[int, float]  # share of the trained groups by age
    length_bias: float | None  # trained length / length of the groups in start order - 1; None: windows
    tokens_computed_again: float  # contexts of interrupted responses / generated tokens
    engines_busy: float
    thrown_away: float = 0.0  # share of the generated tokens that tail rounds generate anew


class Clock:
    """Lets the thread that polls advance the engines up to a limit that the trainer sets."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.limit = 0.0
        self.is_released = False  # polls return at once
        self.is_parked = False  # a poll waits at the limit

    def until(self, now: float) -> float | None:
        """Wait until the engines may go on from `now` and return how far; None if polls are released."""
        with self.condition:
            self.is_parked = self.limit <= now and not self.is_released
            self.condition.notify_all()
            self.condition.wait_for(lambda: self.is_released or self.limit > now, TIMEOUT_S)
            self.is_parked = False
            return None if self.is_released else self.limit

    def set(self, limit: float, is_released: bool = False) -> None:
        with self.condition:
            self.is_parked = self.is_parked and not is_released and limit <= self.limit
            self.limit, self.is_released = limit, is_released
            self.condition.notify_all()

    def wait_for(self, holds: Callable[[], bool]) -> None:
        with self.condition:
            assert self.condition.wait_for(holds, TIMEOUT_S), "the collecting thread made no progress"


class SimulatedServers:
    """A `RolloutEngine` over a fleet of simulated engines."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        # The product sends a group to one server if loads allow.
        self.fleet = Fleet(settings.engines, settings.cost, keeps_groups=True)
        self.policy_version = -1
        self.prefix_reuse = PrefixReuse()
        self.num_computed_again = 0
        self.lengths: dict[int, list[int]] = {}  # group number -> lengths
        self.first_groups: dict[int, int] = {}  # prompt -> the first group of it
        self._clock, self._settings = clock, settings
        self._requests: dict[str, GenerationRequest] = {}
        self._done: dict[str, int] = {}  # tokens of stopped responses
        self._open: Counter[Hashable] = Counter()  # group -> its unfinished responses
        self._runs: dict[str, tuple[VersionRange, ...]] = {}  # versions of running responses up to the last update in flight

    @property
    def num_unfinished(self) -> int:
        return self.fleet.num_unfinished

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        responses = []
        for request in requests:
            group, index = request.request_id.split("/")
            done = self._done.pop(request.request_id, 0) if request.prefix else 0
            self.num_computed_again += done
            self._requests[request.request_id] = request
            # A window ends before its response.
            length = min(self._lengths(int(group), request.prompt_ids[0])[int(index)], SCALE * request.sampling.max_new_tokens)
            responses.append(Response(request.request_id, group, length, done, self._settings.lengths.prompt))
            self._open[group] += 1
        self.fleet.submit(responses)

    def poll(self) -> list[Completion]:
        limit = self._clock.until(self.fleet.now)
        if limit is None:
            return []
        ended: list[Response] = []
        while (time := self.fleet.next_end) <= limit and math.isfinite(time):
            ended.append(self.fleet.end_next())
            group = ended[-1].group
            self._open[group] -= 1
            if not self._open[group]:  # a collector has nothing to decide before
                limit = min(limit, self.fleet.now + POLL_SECONDS)
        self.fleet.advance(limit if math.isfinite(limit) else self.fleet.now)
        return [self._ended(one) for one in ended]

    def wait(self) -> None:
        """Let time pass without a response."""
        limit = self._clock.until(self.fleet.now)
        if limit is not None and math.isfinite(limit):
            self.fleet.advance(limit)

    def abort(self) -> list[Completion]:
        stopped = self.fleet.stop()
        self._open.clear()
        self._done.update((str(one.key), tokens) for one, tokens in stopped)
        return [self._completion(one, tokens, "abort") for one, tokens in stopped]

    def update_in_flight(self, seconds: float) -> None:
        """Stand still for `seconds` in which weights are replaced; responses go on with the new ones."""
        for response, tokens in self.fleet.running():
            name = str(response.key)
            shown = min(tokens // SCALE, -(-response.length // SCALE) - 1)
            self._runs[name] = self._versions(name, self._requests[name], shown)
        self.fleet.pause(seconds, keeps_cache=True)

    def _versions(self, name: str, request: GenerationRequest, shown: int) -> tuple[VersionRange, ...]:
        """Return the versions of the first `shown` tokens, of which the last ones are of the version that is served."""
        runs = self._runs.get(name) or (request.prefix.versions if request.prefix else ())
        start = runs[-1].end if runs else 0
        return (*runs, VersionRange(start, shown, self.policy_version)) if shown > start else runs

    def _lengths(self, group: int, prompt: int) -> list[int]:
        if group not in self.lengths:
            first = self.first_groups.setdefault(prompt, group)
            draw = group if group != first else 0
            self.lengths[group] = self._settings.lengths.of_group(first, self._settings.group_size, draw)
        return self.lengths[group]

    def _ended(self, response: Response) -> Completion:
        group, index = str(response.key).split("/")
        if response.length == self.lengths[int(group)][int(index)]:
            return self._completion(response, response.length, "stop")
        self._done[str(response.key)] = response.length
        return self._completion(response, response.length, "length")

    def _completion(self, response: Response, tokens: int, reason: Any) -> Completion:
        name = str(response.key)
        request = self._requests.pop(name)
        shown = -(-response.length // SCALE)
        if reason == "abort":
            begun = self._runs.get(name) or (request.prefix.versions if request.prefix else ())
            shown = max(begun[-1].end if begun else 0, min(tokens // SCALE, shown - 1))
        runs = self._versions(name, request, shown)
        self._runs.pop(name, None)
        return Completion(name, np.zeros(shown, np.int32), np.zeros(shown, np.float32), reason, runs)


class WatchedCollector(Collector):
    """Tells the clock when a collection begins and ends."""

    def __init__(self, inner: Collector, engine: SimulatedServers, clock: Clock) -> None:
        self._inner, self._servers, self._clock = inner, engine, clock
        self.is_collecting = False
        self.seconds: list[float] = []  # length of each collection
        self.is_awaited = False  # the trainer waits for the batch that is collected

    def collect(
        self,
        num_groups: int,
        training_version: int | None = None,
        between_polls: Callable[[], None] | None = None,
        part_size: int = 0,
        is_followed: Callable[[], bool] | None = None,
    ) -> RolloutBatch:
        self.is_collecting, begin = True, self._servers.fleet.now
        batch = self._inner.collect(num_groups, training_version, between_polls, part_size, is_followed)
        with self._clock.condition:
            if self.is_awaited:
                self._clock.limit, self.is_awaited = self._servers.fleet.now, False
            self.seconds.append(self._servers.fleet.now - begin)
            self.is_collecting = False
            self._clock.condition.notify_all()
        return batch

    @property
    def num_collected(self) -> int:
        return len(self.seconds)

    @property
    def generation_step(self) -> int:
        return self._inner.generation_step

    @property
    def train_step(self) -> int:
        return self._inner.train_step

    def hold(self) -> None:
        self._inner.hold()

    def give_back(self, batch: RolloutBatch) -> None:
        self._inner.give_back(batch)

    def accounting(self) -> Any:
        return self._inner.accounting()

    def state_dict(self, untrained: Sequence[RolloutBatch] = ()) -> dict[str, Any]:
        return self._inner.state_dict(untrained)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._inner.load_state_dict(state)

    def _collect(self, num_groups: int, training_version: int | None, part_size: int) -> RolloutBatch:
        raise AssertionError("collect goes to the collector inside")

    @staticmethod
    def _num_trained_by(batch: RolloutBatch) -> int:
        return len(batch.groups)


class NoScore:
    """Scores every response alike and measures no repetition."""

    def score_many(self, items: Iterable[tuple[Any, str, str, bool]]) -> Mapping[Any, Score]:
        return {key: Score(0.0, 0.0, "wrong") for key, *_ in items}

    def measure_repetition(self, token_ids: Mapping[str, np.ndarray]) -> Mapping[str, Repetition]:
        return dict.fromkeys(token_ids, Repetition())


class Run:
    """Trains steps of the product's loop: next_batch, training, weight update."""

    def __init__(self, settings: Settings, is_colocated: bool) -> None:
        self._settings = settings
        self._ahead = 0 if is_colocated else settings.max_staleness
        self._is_colocated = is_colocated
        self.clock = Clock()
        self.servers = SimulatedServers(settings, self.clock)
        self.inner = self._collector()
        self.watched = WatchedCollector(self.inner, self.servers, self.clock)
        self._streams = settings.parts > 1
        self.collector = AsyncCollector(
            self.watched, self._ahead, TIMEOUT_S, overlaps=self._streams, keeps_requests=settings.in_flight
        )
        self._num_taken = 0  # batches or parts
        self.time = 0.0
        self.version = -1
        self.trained: list[list[tuple[int, int]]] = []  # step -> [(group, age)]
        self.token_ages: list[Counter[int]] = []  # one counter for each step
        self.num_events = 0  # polls after which the accounts were checked

    def _collector(self) -> Collector:
        settings = self._settings
        longest = -(-settings.lengths.longest // SCALE) + 1
        names = [f"{number}" for number in range(NUM_PROMPTS)]
        inputs = CollectorInputs(
            stream=PromptStream(names, seed=0),
            prompts={name: Prompt(name, (), (int(name),), "1") for name in names},
            engine=self.servers,
            scorer=SampleScorer(NoScore(), lambda token_ids: "", meter=NoScore()),  # type: ignore[arg-type]
            on_progress=self._check,
        )
        rollout = RolloutConfig(
            prompts_per_step=settings.prompts,
            group_size=settings.group_size,
            max_response_tokens=longest,
            filter_groups=False,
            oversample=settings.oversample,
            ahead=settings.ahead,
            tail_rounds=settings.tail_rounds,
            max_staleness=settings.max_staleness,
            partial_rollout=settings.max_staleness > 0,
            order=settings.order,
        )
        sampling = SamplingParams(max_new_tokens=longest)
        if settings.window:
            window = WindowConfig(tokens=settings.window // SCALE)
            return WindowCollector(inputs, rollout, window, sampling, seed=0)
        return GroupCollector(inputs, rollout, sampling, seed=0)

    def _check(self, progress: CollectProgress) -> None:
        self.num_events += 1
        accounts = self.inner.accounting()
        assert accounts.is_balanced, f"prompts were lost: {accounts}"
        if not progress.num_in_flight and progress.num_accepted < progress.num_groups:
            self.servers.wait()  # It waits for newer weights.

    def outcome(self) -> Outcome:
        """Train all steps and return their means."""
        settings, steps, waits = self._settings, list[float](), list[float]()
        self._update(0.0)
        try:
            for _ in range(settings.num_steps):
                begin, waited = self.time, 0.0
                self.trained.append([])
                self.token_ages.append(Counter())
                for _ in range(settings.parts):
                    before = self.time
                    batch = self._next_batch()
                    waited += self.time - before
                    self._note(batch)
                    self._train(settings.train / settings.parts)
                waits.append(waited)
                self._update(settings.sync)
                steps.append(self.time - begin)
        finally:
            self.clock.set(self.time, is_released=True)
            self.collector.close()
        servers, tokens = self.servers, max(1, self.servers.fleet.num_tokens)
        again = servers.num_computed_again / tokens
        found = outcome_of(
            settings, steps, waits, self.trained, servers.lengths, again, servers.fleet.busy_share, servers.first_groups
        )
        if not settings.tail_rounds:
            return found
        trained = sum(sum(servers.lengths[group]) for step in self.trained for group, _ in step)
        return replace(found, thrown_away=1 - trained / tokens)

    @property
    def _is_idle(self) -> bool:
        """True if the thread has nothing to collect until the next weight update."""
        is_ahead = self.watched.num_collected // self._settings.parts - self.version > self._ahead
        return not self.watched.is_collecting and (is_ahead or not (self._streams or self._ahead))

    def _settle(self) -> None:
        """Wait until the thread has done what it can at this time."""
        self.clock.wait_for(lambda: self.clock.is_parked or self._is_idle)

    def _next_batch(self) -> RolloutBatch:
        if self.watched.num_collected == self._num_taken:
            self.watched.is_awaited = True
            self.clock.set(math.inf)
        part_size = self._settings.prompts // self._settings.parts if self._streams else 0
        batch = self.collector.next_batch(self._settings.prompts, part_size)
        self._num_taken += 1
        self._settle()
        self.time = max(self.time, self.servers.fleet.now)
        return batch

    def _train(self, seconds: float) -> None:
        self.time += seconds
        if self._is_colocated:
            return
        self.clock.set(self.time)
        self._settle()
        self.servers.fleet.advance(self.time)

    def _update(self, seconds: float) -> None:
        self.clock.set(self.time, is_released=True)
        self.collector.before_update()
        if self._settings.in_flight:
            self.servers.update_in_flight(seconds)
        self.time += seconds
        self.servers.fleet.advance(self.time)
        self.version += 1
        self.servers.policy_version = self.version
        self.clock.set(self.time)
        self.collector.after_update(self.version)

    def _note(self, batch: RolloutBatch) -> None:
        ages = [(int(group.group_id), batch.training_version - group.policy_version) for group in batch.groups]
        self.trained[-1] += ages
        for sample in (sample for group in batch.groups for sample in group.samples):
            for run in sample.completion.versions:
                self.token_ages[-1][batch.training_version - run.version] += run.end - run.start


def outcome_of(
    settings: Settings,
    steps: Sequence[float],
    waits: Sequence[float],
    trained: Sequence[Sequence[tuple[int, int]]],
    lengths: Mapping[int, Sequence[int]],
    computed_again: float,
    busy: float,
    first_groups: Mapping[int, int] | None = None,
) -> Outcome:
    """Return the means of a run that trained (group, age) in each step; check that the bound holds and nothing repeats.

    `first_groups`: the first group of each prompt, if there are others.
    """
    groups = [group for step in trained for group, _ in step]
    oldest = max(age for step in trained for _, age in step)
    assert oldest <= settings.max_staleness, f"a group was {oldest} versions old"
    if not settings.window:
        assert len(set(groups)) == len(groups), "a group was trained twice"
    counted = [pair for step in trained[settings.num_warm :] for pair in step]
    ages = [age for _, age in counted]
    in_order = range(settings.num_warm * settings.prompts, settings.num_steps * settings.prompts)
    fresh = in_order if first_groups is None else set(in_order) & set(first_groups.values())
    sampled = [length for group in sorted(fresh) for length in lengths.get(group, ())]
    bias = float(np.mean([lengths[group] for group, _ in counted]) / np.mean(sampled) - 1)
    return Outcome(
        step=float(np.mean(steps[settings.num_warm :])),
        wait=float(np.mean(waits[settings.num_warm :])),
        mean_age=float(np.mean(ages)),
        oldest=oldest,
        ages={age: ages.count(age) / len(ages) for age in sorted(set(ages))},
        length_bias=None if settings.window else bias,
        tokens_computed_again=computed_again,
        engines_busy=busy,
    )


def disaggregated(settings: Settings) -> Outcome:
    """Train with engines on separate GPUs, up to `max_staleness` batches ahead."""
    return Run(settings, is_colocated=False).outcome()


def colocated(settings: Settings) -> Outcome:
    """Train with engines on the trainer's GPUs, in turns."""
    return Run(settings, is_colocated=True).outcome()
