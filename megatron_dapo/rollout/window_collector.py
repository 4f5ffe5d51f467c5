"""Successive batching from T-PPO (arXiv 2506.15050): every collection works on the same number of responses and gives
each at most one window of new tokens. A step never waits for the longest response.

    prompt stream -> not started -> window of this collection -> scored or unfinished -> batch for the trainer
                         ^                   ^                          |
                         +-------- pool -----+--------------------------+  (unfinished: to the head of the queue)

A collection of `num_groups` works on num_groups x group_size responses: first the unfinished ones in start order, then
responses to fresh prompts in the slots that finished ones have freed. Each response is a separate item: a group may
begin in one collection and complete in a later one, and nothing waits for it to be complete. With group size G, the
pool never holds more than num_groups x G + G - 1 responses (unfinished, or of the last group and not yet started),
because a prompt is drawn only while fewer than num_groups x G responses wait.

The batch holds all windows of the collection. The policy trains on the tokens of the window (earlier ones are
context), the critic on finished responses from their first token. With `window.windows_per_step`, the batch holds the
windows of the groups that `contrast_first` ranks highest. The filter decision on the others is "not_chosen": their
unfinished responses continue as usual, but the window is never trained, and the critic never sees a response that
finished in it. Because groups without contrast are the ones left out, the critic then sees fewer of the prompts that
are always or never solved, and its values for those lag behind.

A window of an episode has `window.tokens` sampled tokens. It may end inside a turn, or at its end: with the environment's
answer, so that the value of the state after it is known. An episode that is lost to its environment leaves the pool.

With max_staleness = 1 a collection may begin by the version before the one that it trains, while the windows before are
trained (`AsyncCollector`); if new weights come in between, the rest of its tokens is theirs.

A response's random numbers depend only on (run seed, group, index) and the position, so with unchanged weights its
windows hold the tokens that it would have without windows.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_dapo.config.algorithm_schema import WindowConfig
from megatron_dapo.config.rollout_schema import RolloutConfig
from megatron_dapo.rollout.batch import (
    CollectionExhausted,
    CollectProgress,
    Exhaustion,
    RolloutBatch,
    batch_from_json,
    batch_to_json,
)
from megatron_dapo.rollout.collector import Collector, CollectorInputs, EpisodesLost, ResponseAccounting, WindowCounters
from megatron_dapo.rollout.open_group import is_partial
from megatron_dapo.rollout.scoring import warn_of_lost
from megatron_dapo.rollout.statistics import KEPT, CollectStatistics, StatisticsBuilder, WindowSummary
from megatron_dapo.rollout.windows import ResponseKey, WindowCollection, WindowPool, choose_groups, sampled_in
from megatron_dapo.types import Completion, Group, SamplingParams, ScoredSample, VersionRange, Window

logger = logging.getLogger(__name__)

STATE_VERSION = "windows-4"  # not a number, so that a group collector refuses it
READABLE_VERSIONS = ("windows-3", STATE_VERSION)
NOT_CHOSEN = "not_chosen"


class WindowCollector(Collector):
    """Collects batches of windows.

    Args:
        inputs: see `CollectorInputs`.
        config, window: the [rollout] and [window] sections.
        sampling: the sampling parameters of the whole response, with the model's stop tokens.
        seed: the run's seed, from which, with group id and index, each response's seed is made.
    """

    _counters: WindowCounters

    def __init__(
        self, inputs: CollectorInputs, config: RolloutConfig, window: WindowConfig, sampling: SamplingParams, seed: int
    ) -> None:
        super().__init__(inputs, WindowCounters())
        self._config = config
        self._window = window
        self._sampling = sampling
        self._seed = seed
        self._pool = WindowPool()
        self._collection: WindowCollection | None = None  # the current one
        self._given_back: list[RolloutBatch] = []
        self._max_lost_in_row = inputs.losses.max_in_row
        self._lost_in_row: list[Completion] = []
        self._num_scored = 0  # the current collection's, at the last look

    # Collecting

    def _collect(self, num_groups: int, training_version: int | None, part_size: int) -> RolloutBatch:
        """Return one window for each of num_groups x group_size responses, or for fewer if prompts run out.

        The batch's groups hold the responses worked on, so a group may lack some and appear again later. A collection
        interrupted by an error or a restart is completed first, at its original size.
        """
        version = self._checked_version(training_version, self._config.max_staleness)
        if self._given_back:
            self._require_fresh([group.policy_version for group in self._given_back[0].groups], version)
            return self._hand_out(replace(self._given_back.pop(0), training_version=version))
        self.hold()  # a collection that an error interrupted may be in flight
        if self._collection is None and not self._open(num_groups):
            return RolloutBatch((), self._builder([]).build(), "prompts", True, version)
        self._require_fresh(self._versions_so_far(), version)
        self._num_scored = 0
        for _ in self._current.generate():
            self._after_poll(self._progress_of(num_groups))
            self._check_lost()
        self._check_lost()
        return self._hand_out(self._close(version))

    def hold(self) -> None:
        """See `Collector`. Keeps the tokens of every window so far."""
        if self._collection is not None:
            self._collection.hold()

    def give_back(self, batch: RolloutBatch) -> None:
        """See `Collector`. The next call returns the batch."""
        if batch.groups:
            self._given_back.insert(0, batch)
            self._take_back(batch)

    @staticmethod
    def _num_trained_by(batch: RolloutBatch) -> int:
        return sum(sample.window.is_finished for group in batch.groups for sample in group.samples)

    @property
    def _current(self) -> WindowCollection:
        assert self._collection is not None, "no collection is running"
        return self._collection

    def _require_fresh(self, versions: Sequence[int], version: int) -> None:
        """Raise ValueError if a window that `version` trains has tokens of an older version than the bound allows."""
        oldest, bound = min(versions, default=version), self._config.max_staleness
        if version - oldest > bound:
            raise ValueError(
                f"the checkpoint has windows by policy version {oldest} for a step of version {version}, and "
                f"rollout.max_staleness = {bound}: resume with rollout.max_staleness = {version - oldest}"
            )

    def _versions_so_far(self) -> list[int]:
        """Return the versions of all tokens that the windows of the current collection have."""
        pool = self._pool
        held = [(pool[group_id].completions.get(index), pool[group_id], index) for group_id, index in self._current.keys]
        runs = [_window_versions(so_far, group.window(index, False)) for so_far, group, index in held if so_far is not None]
        return [run.version for each in runs for run in each]

    # Beginning a collection

    def _open(self, num_groups: int) -> bool:
        """Begin a collection; return False if there is nothing to begin with."""
        num_items = num_groups * self._config.group_size
        num_before = self._pool.num_waiting
        exhausted = self._draw(num_items)
        bound = num_items + self._config.group_size - 1
        assert self._pool.num_waiting <= max(num_before, bound), f"{self._pool.num_waiting} responses wait, not {bound}"
        if exhausted and not self._begins_smaller(num_items):
            return False
        self._collection = self._collection_of(self._pool.take(num_items), exhausted)
        self._counters.generation_step += 1
        return True

    def _collection_of(self, keys: Sequence[ResponseKey], exhausted: Exhaustion) -> WindowCollection:
        return WindowCollection(
            keys,
            exhausted,
            self._pool,
            self._engine,
            self._scorer,
            self._sampling,
            self._window.tokens,
            self._seed,
            self._config.routing_replay,
            self._lose,
        )

    def _lose(self, episode: Completion) -> None:
        self._counters.num_lost += 1
        self._lost_in_row.append(episode)

    def _check_lost(self) -> None:
        """Raise EpisodesLost if too many episodes were lost one after another."""
        lost, num_scored = self._lost_in_row, len(self._current.scored)
        if len(lost) >= self._max_lost_in_row:
            self._lost_in_row = []
            assert lost[-1].episode is not None, "a lost episode is an episode"
            raise EpisodesLost(
                f"{len(lost)} episodes in a row were lost to a failure of their environment, the last one {lost[-1].request_id}: "
                f"{lost[-1].episode.lost}; mend the environment, or what it needs, and start again"
            )
        if num_scored > self._num_scored:
            self._lost_in_row = []
        self._num_scored = num_scored

    def _draw(self, num_items: int) -> Exhaustion:
        """Begin groups from fresh prompts until `num_items` responses wait; return the reason if too few do."""
        while self._pool.num_waiting < num_items:
            prompt_id = self._stream.next()
            if prompt_id is None:
                return "prompts"
            # Fixed width, so that group ids sort in start order.
            group_id = f"{self._counters.num_groups:012d}"
            step = self._counters.generation_step + 1
            self._pool.begin(group_id, self._prompts[prompt_id], step, self._config.group_size)
            self._counters.num_groups += 1
            self._counters.num_drawn += self._config.group_size
        return ""

    def _begins_smaller(self, num_items: int) -> bool:
        """Return True if rollout.on_exhausted lets a collection begin with fewer than `num_items` responses."""
        shortage = self._describe_shortage(num_items)
        logger.warning("%s", shortage)
        if self._config.on_exhausted == "error":
            raise CollectionExhausted(shortage)
        # With "stop", waiting responses stay in the pool for a later run.
        return self._config.on_exhausted == "train_partial" and self._pool.num_waiting > 0

    def _describe_shortage(self, num_items: int) -> str:
        return (
            f"only {self._pool.num_waiting} of {num_items} responses to work on: prompts are exhausted after "
            f"{self._counters.num_groups} groups; raise data.max_epochs, add data, or let "
            "rollout.on_exhausted train partial batches"
        )

    def _progress_of(self, num_groups: int) -> CollectProgress:
        size, collection = self._config.group_size, self._current
        num_done = len(collection.keys) - collection.num_in_flight
        return CollectProgress(
            num_accepted=min(num_groups, num_done // size),
            num_groups=num_groups,
            num_in_flight=math.ceil(collection.num_in_flight / size),
            num_filtered=0,
            num_responses=len(collection.scored),
            num_tokens=collection.num_new_tokens,
        )

    # The batch

    def _close(self, version: int) -> RolloutBatch:
        """Turn the collection into a batch; its unfinished responses go to the head of the queue."""
        collection = self._current
        samples = collection.samples()
        # The critic's advantages need no whole groups.
        lost = warn_of_lost(samples.values())
        groups = self._groups({key: sample for key, sample in samples.items() if not sample.score.is_lost}, version)
        for (group_id, index), sample in samples.items():
            if sample.window.is_finished:
                self._pool[group_id].finish(index, sample.score.accuracy)
            else:
                self._pool[group_id].end_window(index)
        chosen = set(range(len(groups)))
        if self._window.windows_per_step:
            begun, sizes = [self._pool[group.group_id] for group in groups], [len(group.samples) for group in groups]
            chosen = choose_groups(begun, sizes, self._window.windows_per_step)
        statistics = self._statistics(groups, chosen)
        self._pool.drop_finished()
        self._counters.num_not_chosen += lost + sum(
            sample.window.is_finished
            for index, group in enumerate(groups)
            if index not in chosen
            for sample in group.samples
        )
        self._collection = None
        trained = tuple(group for index, group in enumerate(groups) if index in chosen)
        return RolloutBatch(trained, statistics, collection.exhausted, training_version=version)

    def _groups(self, samples: Mapping[ResponseKey, ScoredSample], version: int) -> list[Group]:
        """Return the collection's groups in start order."""
        by_group: dict[str, list[ScoredSample]] = {}
        for (group_id, _), sample in samples.items():
            by_group.setdefault(group_id, []).append(sample)
        groups = []
        for group_id, members in by_group.items():
            prompt = self._pool[group_id].prompt
            runs = [run for each in members for run in _window_versions(each.completion, each.window)]
            oldest = min((run.version for run in runs), default=version)  # version of the window's oldest tokens
            groups.append(Group(group_id, prompt, tuple(members), oldest, self._counters.generation_step))
        return groups

    def _statistics(self, groups: Sequence[Group], chosen: set[int]) -> CollectStatistics:
        builder = self._builder([sample for group in groups for sample in group.samples])
        for index, group in enumerate(groups):
            builder.add_scored(group, KEPT if index in chosen else NOT_CHOSEN)
        waiting = [group for group in self._pool.groups if group.num_waiting]
        begun_at = [self._pool[groups[index].group_id].generation_step for index in chosen]
        return builder.build(
            num_begun_earlier=sum(step < self._counters.generation_step for step in begun_at),
            num_unfinished=len(waiting),
        )

    def _builder(self, samples: Sequence[ScoredSample]) -> StatisticsBuilder:
        """Count the windows `samples`. The counts depend only on the collection, so a restart during it keeps them."""
        step = self._counters.generation_step
        in_window = [sampled_in(sample.completion, sample.window) for sample in samples]
        num_before = sum(sample.completion.num_sampled for sample in samples) - sum(in_window)
        finished = [sample.completion.num_sampled for sample in samples if sample.window.is_finished]
        num_windows = [math.ceil(length / self._window.tokens) for length in finished]
        num_continued = sum(sample.window.start > 0 for sample in samples)
        return StatisticsBuilder(
            num_started=sum(bool(samples) and group.generation_step == step for group in self._pool.groups),
            num_continued=num_continued,
            num_tokens=sum(in_window),
            num_lost=self._collection.num_lost if self._collection else 0,
            windows=WindowSummary(
                num_windows=len(samples),
                num_finished=len(finished),
                windows_per_finished=sum(num_windows) / max(1, len(finished)),
                num_waiting=self._pool.num_waiting,
                num_continued=num_continued,
                num_prefix_tokens=num_before,
            ),
        )

    # State

    def accounting(self) -> ResponseAccounting:
        """See `Collector`."""
        num_in_flight = len(self._collection.keys) if self._collection else 0
        num_not_started = self._pool.num_not_started
        return ResponseAccounting(
            drawn=self._counters.num_drawn,
            trained=self._counters.num_trained,
            not_chosen=self._counters.num_not_chosen,
            lost=self._counters.num_lost,
            given_back=sum(map(self._num_trained_by, self._given_back)),
            in_flight=num_in_flight,
            unfinished=self._pool.num_waiting - num_not_started - num_in_flight,
            not_started=num_not_started,
        )

    def state_dict(self, untrained: Sequence[RolloutBatch] = ()) -> dict[str, Any]:
        """See `Collector`. Unfinished responses are saved with all their tokens.

        A state taken in the middle of a collection (on a signal) has those tokens of its windows that the engine has
        returned; call `hold` first to save them all.
        """
        untrained = [batch for batch in untrained if batch.groups]
        collection = self._collection
        return {
            "version": STATE_VERSION,
            "stream": self._stream.state_dict(),
            "pool": self._pool.state_dict(),
            "collection": collection
            and {"keys": [list(key) for key in collection.keys], "exhausted": collection.exhausted},
            "given_back": [batch_to_json(batch) for batch in [*untrained, *self._given_back]],
            "counters": self._counters_without(untrained),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Collector`.

        Raises ValueError for the state of another kind of collector, or if an unfinished response is longer than this
        run allows.
        """
        if state.get("version") not in READABLE_VERSIONS:
            raise ValueError(
                f"collector state has version {state.get('version')}, windows are read from {STATE_VERSION}; "
                "resume with the algorithm and the release that wrote it"
            )
        num_in_flight = self._collection.num_in_flight if self._collection else 0
        assert not num_in_flight, f"{num_in_flight} responses are in flight; load the state before collecting"
        self._stream.load_state_dict(state["stream"])
        self._pool.load_state_dict(state["pool"], self._prompts)
        self._check_lengths()
        saved = state["collection"]
        self._collection = None
        if saved is not None:
            keys = [(name, index) for name, index in saved["keys"]]
            self._collection = self._collection_of(keys, saved["exhausted"])
        self._given_back = [batch_from_json(batch) for batch in state["given_back"]]
        self._counters = WindowCounters(**state["counters"])

    def _check_lengths(self) -> None:
        limit = self._sampling.max_new_tokens
        held = [completion for group in self._pool.groups for completion in group.completions.values()]
        longest = max((completion.num_sampled for completion in held if is_partial(completion)), default=0)
        if longest >= limit:
            raise ValueError(
                f"the checkpoint has an unfinished response of {longest} tokens, this run ends responses at {limit}; "
                f"resume with rollout.max_response_tokens above {longest}"
            )


def _window_versions(completion: Completion, window: Window) -> list[VersionRange]:
    """Return the ranges of versions in the current window of each of a response's streams."""
    return [
        run
        for number in range(1 + completion.num_segments)
        for run in completion.stream(number).versions
        if run.end > window.start_of(number)
    ]
