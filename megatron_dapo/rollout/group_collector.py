"""Group collector: fills a rollout batch with groups worth training on (dynamic sampling).

The life of a group, open until it is scored:

    prompt stream -> in flight -> scored -> filter -> buffered -> batch, given back if it is not trained
          ^           |    ^                   |         |
          |      stop v    | resume            |         | too stale
          |          held (partial_rollout)    v         |
          |           | none of its responses  filtered  |
          +-----------+ may still be trained             |
          +---- queued again, before fresh prompts ------+

With rollout.order = "start", groups are trained in the order in which they started, not in which they finished: a batch is complete once every group
started before its last one is decided. So trained responses are as long as sampled ones. With oversample = 1 the batch
depends only on the prompt stream, the seeds and the weights: it has the first groups, in start order, that pass the
filter. The choice of prompts learns from this collection's groups at its end, in order of group ids. A group is started
only if one is missing and none in flight may still supply it, so a rejected group costs one replacement, not a round.
With data.injection, the next collection starts with rewrites of prompts that this one rejected.

With oversample > 1, later groups are generated while the batch waits for its longest response. They belong to the next
batches; no more are started than those batches can train within max_staleness, given the recent share of groups that
passed the filter. With partial_rollout, groups unfinished when the batch is complete are held and continue in the next
collection, or stay in flight if it follows at once and may train them all; without it, the collection ends once they have
ended. With max_staleness = 0 nothing can be carried over: the few surplus groups are dropped, finished or not, and their
prompts are queued again.

With rollout.order = "guarded", a batch after the first max_staleness takes groups as they are decided, and waits only for
those that no later batch may train; see `age_guard`. rollout.ahead bounds how much is started for later batches. With
rollout.tail_rounds it takes the first that end, and the others' prompts wait for a long round; see `tail_rounds`.

A batch may be handed out in parts (training.stream): each has the next groups in start order, once those before them are
decided. So the parts of a batch have the same groups in the same order as the whole batch would.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_dapo.age_guard import DatedGroup, trainable
from megatron_dapo.algorithms.dynamic_sampling import FunctionFilter, GroupFilter
from megatron_dapo.config.distillation_schema import DistillationConfig
from megatron_dapo.config.rollout_schema import RolloutConfig
from megatron_dapo.data.injection import TEMPLATE
from megatron_dapo.rollout.batch import CollectionExhausted, CollectProgress, Exhaustion, RolloutBatch
from megatron_dapo.rollout.buffer import ReplayBuffer
from megatron_dapo.rollout.collector import (
    Collector,
    CollectorInputs,
    GroupCounters,
    PromptAccounting,
)
from megatron_dapo.rollout.lost_groups import LostGroups
from megatron_dapo.rollout.open_group import OpenGroup, OpenGroups, open_group_from_json, open_group_to_json
from megatron_dapo.rollout.prompt_source import PromptSource
from megatron_dapo.rollout.scoring import score_groups, warn_of_lost
from megatron_dapo.rollout.shortage import describe_shortage, round_size_of, rounds_are_exhausted
from megatron_dapo.rollout.statistics import KEPT, UNSCORED, CollectStatistics, StatisticsBuilder
from megatron_dapo.rollout.tail_rounds import TailRounds
from megatron_dapo.types import Completion, FilterDecision, GenerationRequest, Group, SamplingParams

logger = logging.getLogger(__name__)

STATE_VERSION = 3

# Weight of a collection's filter decisions in the estimate of the next one's.
_RECENT = 0.5

_WAIT_S = 0.01  # interval of the looks for newer weights, if nothing is in flight

_MAX_SHOWN = 2  # rejected groups of a collection that are kept for the records


def _group_id(group: Group | OpenGroup) -> str:
    return group.group_id


class GroupCollector(Collector):
    """Collects batches of whole groups.

    Args:
        inputs: see `CollectorInputs`.
        config: the [rollout] section.
        sampling: its sampling parameters with the model's stop tokens.
        seed: the run's seed, from which, with group id and index, each response's seed is made.
        distillation: the teachers; groups that only they teach are not filtered.
    """

    _counters: GroupCounters

    def __init__(
        self,
        inputs: CollectorInputs,
        config: RolloutConfig,
        sampling: SamplingParams,
        seed: int,
        distillation: DistillationConfig = DistillationConfig(),
    ) -> None:
        super().__init__(inputs, GroupCounters())
        self._rollout = config
        self._sampling = sampling
        self._filter = GroupFilter(config.accuracy_min, config.accuracy_max) if config.filter_groups else None
        self._distillation = distillation
        self._own_filter = FunctionFilter(config.group_filter) if config.group_filter else None
        self._buffer = ReplayBuffer(config.max_staleness, config.replay_order)
        self._source = PromptSource(self._stream, config, len(self._prompts), seed)
        self._open = OpenGroups(inputs.engine, config, sampling, seed)
        self._training_version = 0  # version that trains the batch being collected
        self._first_number = 0  # number of the first group that this collection starts
        self._num_groups = 0  # size of the batch being collected
        self._num_handed_out = 0  # groups in parts of the batch being collected
        self._num_begun_earlier = 0  # those that an earlier collection started
        self._num_up_to_kept = 0  # groups that this collection started, up to the last one kept
        self._runs_on = False  # groups stay in flight until the next collection, which follows at once
        self._builder = self._open.builder
        self._losses = LostGroups(inputs.losses, inputs.stream)
        self._on_kept = inputs.on_kept
        self._tail = TailRounds(config.tail_rounds)
        self._reported: set[Exhaustion] = set()  # shortages that this process has warned of
        self._shown: list[Group] = []  # the first groups that this collection left out

    # Collecting

    def _collect(self, num_groups: int, training_version: int | None, part_size: int) -> RolloutBatch:
        """Return exactly `num_groups` whole groups, or fewer if rounds or prompts run out; or a part of them."""
        if not self._num_handed_out:
            self._begin(training_version, num_groups)
        self._num_groups = num_groups
        num_left = num_groups - self._num_handed_out
        size = min(part_size or num_left, num_left)
        exhausted = self._fill(num_groups, size)
        if exhausted:
            return self._exhausted_batch(num_groups, exhausted)
        if size < num_left:
            return self._part(size)
        if not self._rollout.partial_rollout and self._buffer.max_staleness:
            while self._open:  # no group may be held
                self._receive_and_report(num_groups)
        return self._batch(num_groups, "")

    def _begin(self, training_version: int | None, num_groups: int) -> None:
        """Begin the collection of a batch."""
        self._training_version = self._checked_version(training_version, self._buffer.max_staleness)
        self._builder = self._open.builder = StatisticsBuilder()
        self._shown.clear()
        self._num_up_to_kept = self._num_begun_earlier = 0
        # After an error, groups may be in flight that the engine does not know.
        runs_on, self._runs_on = self._runs_on, False
        self._keep_for(self._training_version, stops=not runs_on)
        self._first_number = self._counters.num_started
        self._source.begin(self._training_version)
        self._tail.begin(num_groups)
        self._counters.num_recent_decided *= _RECENT
        self._counters.num_recent_kept *= _RECENT

    def hold(self) -> None:
        """See `Collector`. Keeps every unfinished response that may continue."""
        self._keep_for(self._training_version)

    def give_back(self, batch: RolloutBatch) -> None:
        """See `Collector`. The next call returns the batch's groups."""
        self._buffer.give_back(batch.groups)
        if not batch.is_last:
            self._num_handed_out = batch.num_before
            self._num_begun_earlier -= self._count_begun_earlier(batch.groups)
        self._take_back(batch)

    @staticmethod
    def _num_trained_by(batch: RolloutBatch) -> int:
        return len(batch.groups)

    def _fill(self, num_groups: int, size: int) -> Exhaustion:
        """Generate until the groups decided in start order supply `size` of the batch's `num_groups`; return the reason if
        they cannot."""
        exhausted: Exhaustion = ""
        while not self._is_complete(size):
            exhausted = self._start_groups(num_groups)
            if self._open.num_in_flight:
                serving = self._engine.policy_version
                while not (self._receive_and_report(num_groups) or self._open.is_held or self._engine.policy_version > serving):
                    pass  # nothing has changed that the batch, or what to start, depends on
            elif exhausted or not self._waits_for_weights:
                return exhausted
            else:
                time.sleep(_WAIT_S)
                self._after_poll(self._progress(num_groups))
        return ""

    @property
    def _waits_for_weights(self) -> bool:
        """True if rollout.ahead keeps the rest of the batch for the next policy version."""
        return bool(self._rollout.ahead) and self._training_version > self._engine.policy_version

    def _is_complete(self, num_groups: int) -> bool:
        if self._rollout.dynamic_sampling == "hard":
            if self._is_guarded:
                return len(self._buffer) >= num_groups and len(self._trainable()) >= num_groups
            return self._num_available(self._last_id) >= num_groups
        # Without a refill, all started groups must be decided. If none is, the groups come from a batch given back.
        num_decided = sum(self._builder.filter_decisions.values())
        has_ended = not self._open and (not num_decided or num_decided >= num_groups)
        return has_ended and self._num_available() > 0

    def _num_supplied(self, num_groups: int) -> int:
        """Return the number of groups that count towards the batch: those kept or, without a refill, those decided."""
        if self._rollout.dynamic_sampling == "hard":
            return self._num_handed_out + self._num_available()
        return sum(self._builder.filter_decisions.values()) % num_groups

    def _receive_and_report(self, num_groups: int) -> bool:
        """Poll the engine once; return True if a group was decided or given up."""
        num_open = len(self._open)
        self._receive(self._engine.poll())
        has_changed = len(self._open) < num_open
        self._after_poll(self._progress(num_groups))
        return has_changed

    @property
    def _is_guarded(self) -> bool:
        """True if the batch takes groups as they end. The first batches do not: short groups would come first."""
        return self._rollout.order == "guarded" and self._training_version >= self._buffer.max_staleness

    def _trainable(self) -> list[str]:
        """Return the ids of the groups that a guarded batch may take now."""
        bound, serving = self._buffer.max_staleness, self._engine.policy_version
        groups = [DatedGroup(one.oldest_version(serving) + bound, one.group_id, False) for one in self._open]
        groups += [DatedGroup(one.policy_version + bound, one.group_id, True) for one in self._buffer]
        num_left = self._num_groups - self._num_handed_out
        return trainable(groups, self._training_version, num_left, self._num_groups)

    @property
    def _last_id(self) -> str | None:
        """Id of the group before which the batch's were started; None if it takes those that end first."""
        return None if self._tail.takes_first_ended else self._open.first_id

    def _num_available(self, before: str | None = None) -> int:
        return self._buffer.num_available(self._training_version, before)

    def _start_groups(self, num_groups: int) -> Exhaustion:
        """Continue all unfinished groups, then start as many as the batches need; return the limit that was met."""
        requests = self._open.resume()
        num_in_flight = self._open.num_in_flight
        exhausted: Exhaustion = ""
        round_size = num_groups if self._tail.is_long else round_size_of(num_groups, self._rollout)
        num_kept = self._num_supplied(num_groups)
        # The number of batches that may train a group started now, or the part of it that rollout.ahead allows.
        num_ahead = self._rollout.ahead or self._buffer.max_staleness
        num_batches = 1 + num_ahead - (self._training_version - self._engine.policy_version)
        num_batches = self._rollout.oversample if self._tail.takes_first_ended else num_batches
        while num_kept + num_in_flight < round_size:
            if num_kept + self._keep_rate * num_in_flight >= num_batches * num_groups:
                break
            if rounds_are_exhausted(self._rollout, round_size, self._builder.num_started, self._num_up_to_kept):
                exhausted = "rounds"
                break
            drawn = self._tail.next(lambda: self._source.next(num_groups), self._rollout.group_size)
            if drawn is None:
                exhausted = "prompts"
                break
            requests.extend(self._start(*drawn, round_size))
            num_in_flight += 1
        if requests:
            self._engine.submit(requests)
        return exhausted

    @property
    def _keep_rate(self) -> float:
        """Upper estimate of the share of recently decided groups that passed the filter; 1 at the beginning."""
        return (self._counters.num_recent_kept + 1) / (self._counters.num_recent_decided + 1)

    def _start(self, prompt_id: str, size: int, round_size: int) -> list[GenerationRequest]:
        """Put a new group in flight and return its requests."""
        if self._builder.num_started % round_size == 0:
            self._counters.generation_step += 1
        # Fixed width, so that group ids sort in start order.
        group_id = f"{self._counters.num_started:012d}"
        group = OpenGroup(group_id, self._prompts[prompt_id], self._counters.generation_step, size=size)
        self._counters.num_started += 1
        self._builder.num_started += 1
        return self._open.start(group)

    def _receive(self, completions: Sequence[Completion]) -> None:
        """Sort completions into their groups and decide on complete groups in start order."""
        self._open.add(completions)
        # An engine may abort by itself (on a restart). A group never trains on responses cut off that way.
        if self._rollout.partial_rollout:
            self._open.resubmit_aborted(completions)
        else:
            for group in self._open.take_aborted():
                self._queue_again(group)
        complete = self._open.complete()
        self._decide([group for group in complete if not self._give_up_lost(group)])

    def _give_up_lost(self, group: OpenGroup) -> bool:
        """Drop a complete group with a lost episode, or only the episode; return True if the group is dropped."""
        if not (lost := group.lost_episodes):
            return False
        if self._losses.may_shrink(len(group.completions) - len(lost)):
            self._open.leave_out(group, lost)
            self._builder.add_left_out(lost)
            return False
        self._open.remove(group)
        self._builder.add_aborted(group.completions.values())
        self._builder.num_lost += 1
        assert lost[0].episode is not None, "a lost episode is an episode"
        self._losses.give_up(group.prompt.prompt_id, lost[0].episode.lost, self._counters)
        return True

    def _decide(self, complete: Sequence[OpenGroup]) -> None:
        """Score complete groups and keep or drop each."""
        if not complete:
            return
        scored = score_groups(self._scorer, complete, self._engine.policy_version)
        for open_group, group in zip(complete, scored, strict=True):
            self._open.remove(open_group)
            self._losses.end_streak(group.prompt.prompt_id, self._counters)
            decision = self._decision(group)
            self._builder.add_scored(group, decision)
            if decision != UNSCORED:  # a lost score says nothing about the prompt
                self._source.observe(group, decision)
            self._counters.num_recent_decided += 1
            self._counters.num_recent_kept += decision == KEPT
            if decision == KEPT:
                self._buffer.put(group)
                if self._on_kept is not None:
                    self._on_kept(group)
                self._num_up_to_kept = max(self._num_up_to_kept, int(group.group_id) - self._first_number + 1)
            else:
                self._counters.num_filtered += 1
                self._shown = sorted([*self._shown, group], key=_group_id)[:_MAX_SHOWN]

    def _decision(self, group: Group) -> FilterDecision:
        if warn_of_lost(group.samples):
            return UNSCORED
        if not self._distillation.learns_from_rewards(group.prompt.source_name):
            return KEPT  # rewards without contrast leave nothing to learn, a teacher does
        if self._own_filter is not None:
            return self._own_filter.decide(group)
        accuracies = [sample.score.accuracy for sample in group.samples]
        return KEPT if self._filter is None else self._filter.decide(accuracies)

    def _finish_source(self) -> None:
        num_rewrites = sum(TEMPLATE in group.prompt.extra for group in (*self._open, *self._buffer))
        self._source.finish(num_rewrites)

    # Holding and queueing again

    def _keep_for(self, training_version: int, stops: bool = True, puts_off: bool = False) -> None:
        """Keep every response and every buffered group that may train `training_version`.

        The other groups' prompts are queued again, ahead of fresh ones and in start order. `stops`: generation is stopped;
        otherwise only if a response may not be kept. `puts_off`: unfinished groups wait for a long round instead.
        """
        oldest_allowed = training_version - self._buffer.max_staleness
        given_up = self._open.hold(oldest_allowed) if stops or not self._open.are_fresh(oldest_allowed) else []
        stale = self._buffer.evict(training_version)
        for open_group in given_up:
            self._builder.add_aborted(open_group.completions.values())
        for stale_group in stale:
            self._builder.add_stale(stale_group)
        dropped: list[OpenGroup | Group] = [*given_up, *stale]
        for group in sorted(dropped, key=_group_id):
            is_put_off = puts_off and isinstance(group, OpenGroup)
            (self._tail.put_off if is_put_off else self._stream.requeue)(group.prompt.prompt_id)
            self._counters.num_queued_again += 1

    def _queue_again(self, group: OpenGroup) -> None:
        self._stream.requeue(group.prompt.prompt_id)
        self._counters.num_queued_again += 1
        self._builder.add_aborted(group.completions.values())

    # The batch

    def _batch(self, num_groups: int, exhausted: Exhaustion) -> RolloutBatch:
        """Hand out the last of a batch's at most `num_groups` groups, and with them what the batch reports."""
        groups = self._take(num_groups - self._num_handed_out)
        # The next batch is the earliest that can train what is left.
        self._runs_on = self._is_followed()
        self._keep_for(self._training_version + 1, not self._runs_on, self._tail.is_on)
        self._tail.end()
        self._finish_source()
        num_before, self._num_handed_out = self._num_handed_out, 0
        batch = RolloutBatch(
            groups,
            self._statistics(self._num_begun_earlier),
            exhausted,
            not num_before and not groups,
            self._training_version,
            num_before=num_before,
            filtered=tuple(self._shown),
        )
        return self._hand_out(batch)

    def _part(self, size: int) -> RolloutBatch:
        """Hand out the next `size` groups of a batch that is not complete."""
        num_before = self._num_handed_out
        groups = self._take(size)
        self._num_handed_out += len(groups)
        version, empty = self._training_version, StatisticsBuilder().build()
        return self._hand_out(
            RolloutBatch(groups, empty, training_version=version, is_last=False, num_before=num_before)
        )

    def _take(self, size: int) -> tuple[Group, ...]:
        """Remove at most `size` decided groups from the buffer and return them in start order."""
        if self._is_guarded:
            taken = self._buffer.take_these(self._trainable()[:size])
        else:
            taken = self._buffer.take(size, self._training_version, self._last_id)
        self._num_begun_earlier += self._count_begun_earlier(taken)
        return tuple(sorted(taken, key=_group_id))

    def _count_begun_earlier(self, groups: Sequence[Group]) -> int:
        return sum(int(group.group_id) < self._first_number for group in groups)

    def _statistics(self, num_begun_earlier: int) -> CollectStatistics:
        return self._builder.build(
            num_begun_earlier=num_begun_earlier,
            num_buffered=len(self._buffer),
            num_unfinished=len(self._open),
            prompts={**self._source.statistics(), **self._tail.statistics()},
        )

    def _exhausted_batch(self, num_groups: int, exhausted: Exhaustion) -> RolloutBatch:
        """Return the incomplete batch that rollout.on_exhausted asks for."""
        num_available = self._num_handed_out + self._num_available()
        shortage = describe_shortage(self._rollout, exhausted, self._builder, num_available, num_groups)
        # Expected of a run that trains partial batches: later ones of the kind are in its metrics.
        is_known = exhausted in self._reported
        logger.log(logging.DEBUG if is_known and self._rollout.on_exhausted == "train_partial" else logging.WARNING, "%s", shortage)
        self._reported.add(exhausted)
        if self._rollout.on_exhausted == "error":
            raise CollectionExhausted(shortage)
        if self._rollout.on_exhausted == "stop":  # kept groups stay in the buffer for a later run
            self._finish_source()
            return RolloutBatch(
                (), self._statistics(0), exhausted, True, self._training_version, filtered=tuple(self._shown)
            )
        return self._batch(num_groups, exhausted)

    def _progress(self, num_groups: int) -> CollectProgress:
        return CollectProgress(
            num_accepted=min(num_groups, self._num_handed_out + self._num_available()),
            num_groups=num_groups,
            num_in_flight=self._open.num_in_flight,
            num_filtered=sum(count for decision, count in self._builder.filter_decisions.items() if decision != KEPT),
            num_responses=self._builder.num_scored_responses + self._open.num_ended,
            num_tokens=self._builder.num_tokens,
        )

    # State

    def accounting(self) -> PromptAccounting:
        """See `Collector`."""
        return PromptAccounting(
            drawn=self._counters.num_started,
            trained=self._counters.num_trained,
            filtered=self._counters.num_filtered,
            queued_again=self._counters.num_queued_again,
            buffered=len(self._buffer),
            unfinished=self._open.num_held,
            in_flight=self._open.num_in_flight,
            lost=self._counters.num_lost,
        )

    def state_dict(self, untrained: Sequence[RolloutBatch] = ()) -> dict[str, Any]:
        """See `Collector`. Unfinished groups are saved with all their tokens.

        A state taken in the middle of a collection (on a signal) also has the groups in flight, with the tokens that
        the engine has returned so far.
        """
        groups = [group for batch in untrained for group in batch.groups]
        return {
            "version": STATE_VERSION,
            "stream": self._stream.state_dict(),
            "source": self._source.state_dict(),
            **({"tail": self._tail.state_dict()} if self._tail.is_on else {}),
            "buffer": self._buffer.state_dict(given_back=groups),
            "open_groups": [open_group_to_json(group) for group in self._open],
            "counters": self._counters_without(untrained),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Collector`. Raises ValueError for a state of another version."""
        if state.get("version") != STATE_VERSION:
            raise ValueError(
                f"collector state has version {state.get('version')}, this program reads {STATE_VERSION}; resume with the "
                "release (and the algorithm) that wrote it"
            )
        self._open.clear()
        self._stream.load_state_dict(state["stream"])
        self._source.load_state_dict(state["source"])
        self._tail.load_state_dict(state.get("tail", {}), self._stream.requeue)
        self._buffer.load_state_dict(state["buffer"])
        self._counters = GroupCounters(**state["counters"])
        self._num_handed_out = 0
        for value in state["open_groups"]:
            self._restore(open_group_from_json(value, self._prompts))

    def _restore(self, group: OpenGroup) -> None:
        """Hold a saved group, or queue its prompt again if this run has different sizes or no partial rollout."""
        is_size = group.size == self._rollout.group_size or self._rollout.budget.enabled
        fits = is_size and all(
            index < group.size and held.num_sampled <= self._sampling.max_new_tokens
            for index, held in group.completions.items()
        )
        if self._rollout.partial_rollout and fits:
            self._open.restore(group)
        else:
            self._queue_again(group)
