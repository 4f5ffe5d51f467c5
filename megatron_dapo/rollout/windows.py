"""T-PPO windows (arXiv 2506.15050): the pool of begun responses, a collection of windows, and the choice of groups.

Every response is a separate item. It waits in one of two queues, both in start order, with unfinished responses ahead
of those not yet started:

    fresh prompt -> not started -> window -> unfinished -> window -> ... -> finished: leaves the pool
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from megatron_dapo.engines.base import RolloutEngine
from megatron_dapo.rollout.batch import Exhaustion
from megatron_dapo.rollout.collector import sample_seed
from megatron_dapo.rollout.open_group import (
    OpenGroup,
    is_lost,
    is_partial,
    next_request,
    num_attempts,
    open_group_from_json,
    open_group_to_json,
    settled,
)
from megatron_dapo.rollout.scoring import SampleScorer
from megatron_dapo.types import Completion, GenerationRequest, Prompt, SamplingParams, ScoredSample, Window

# (group id, index in the group) of a response.
ResponseKey = tuple[str, int]


@dataclass(eq=False)
class WindowGroup(OpenGroup):
    """A group with at least one response that has not ended. `completions` has the begun, unfinished ones."""

    num_begun: int = 0  # indices below are begun
    # Begun, unfinished response -> tokens of each of its streams before the window.
    starts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    num_finished: int = 0  # total of all steps
    accuracy_sum: float = 0.0  # sum over those responses

    @property
    def num_not_started(self) -> int:
        """Responses without a window so far."""
        return self.size - self.num_begun

    @property
    def num_waiting(self) -> int:
        """Responses that have not ended."""
        return len(self.starts) + self.num_not_started

    @property
    def has_contrast(self) -> bool:
        """True if the finished responses of all steps are neither all wrong nor all right."""
        return 0 < self.accuracy_sum < self.num_finished

    def add(self, index: int, completion: Completion) -> int:
        """See `OpenGroup`. An episode that began anew has no earlier window."""
        held = self.completions.get(index)
        if held is not None and num_attempts(completion) > num_attempts(held):
            self.starts[index] = ()
        return super().add(index, completion)

    def end_window(self, index: int) -> None:
        """Make the tokens of response `index` so far the context of its next window."""
        held = self.completions[index]
        self.starts[index] = tuple(len(held.stream(number).token_ids) for number in range(1 + held.num_segments))

    def window(self, index: int, is_finished: bool) -> Window:
        """Return the current window of response `index`."""
        start, *segment_starts = self.starts[index] or (0,)
        return Window(start, is_finished, tuple(segment_starts))

    def lose(self, index: int) -> None:
        """Drop response `index`, which has no outcome."""
        del self.starts[index], self.completions[index]

    def finish(self, index: int, accuracy: float) -> None:
        """Drop response `index`, which has ended, and count its accuracy."""
        del self.starts[index], self.completions[index]
        self.num_finished += 1
        self.accuracy_sum += accuracy


class WindowPool:
    """Begun groups in start order."""

    def __init__(self) -> None:
        self._groups: dict[str, WindowGroup] = {}

    def __getitem__(self, group_id: str) -> WindowGroup:
        return self._groups[group_id]

    @property
    def groups(self) -> Sequence[WindowGroup]:
        """All groups, in start order."""
        return tuple(self._groups.values())

    @property
    def num_not_started(self) -> int:
        """Responses without a window so far, over all groups."""
        return sum(group.num_not_started for group in self._groups.values())

    @property
    def num_waiting(self) -> int:
        """Responses that have not ended, including those not yet started."""
        return sum(group.num_waiting for group in self._groups.values())

    def begin(self, group_id: str, prompt: Prompt, generation_step: int, size: int) -> None:
        """Add a group with no response started."""
        assert group_id not in self._groups, f"group {group_id} is already in the pool"
        self._groups[group_id] = WindowGroup(group_id, prompt, generation_step, size=size)

    def take(self, num_items: int) -> list[ResponseKey]:
        """Return the next responses to work on, at most `num_items`: unfinished ones, then the first not yet started.

        The latter then count as begun.
        """
        unfinished = ((group_id, index) for group_id, group in self._groups.items() for index in sorted(group.starts))
        keys = list(islice(unfinished, num_items))
        for group_id, group in self._groups.items():
            num_new = min(group.num_not_started, num_items - len(keys))
            new = range(group.num_begun, group.num_begun + num_new)
            group.num_begun += num_new
            group.starts.update(dict.fromkeys(new, ()))
            keys += [(group_id, index) for index in new]
        return keys

    def drop_finished(self) -> None:
        """Forget the groups whose responses have all ended."""
        self._groups = {group_id: group for group_id, group in self._groups.items() if group.num_waiting}

    def state_dict(self) -> list[dict[str, Any]]:
        """Return values for `serialization.split_state`, with every token, log-prob and version; prompts by their ids."""
        return [_group_to_json(group) for group in self._groups.values()]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]], prompts: Mapping[str, Prompt]) -> None:
        """Invert `state_dict`. Raises KeyError for a prompt that is not in `prompts`."""
        groups = [_group_from_json(value, prompts) for value in state]
        self._groups = {group.group_id: group for group in groups}


def sampled_in(completion: Completion, window: Window) -> int:
    """Return the number of sampled tokens of a response in `window`, which is its last one."""
    if completion.episode is None:
        return completion.num_tokens - window.start
    return sum(
        run.end - max(run.start, window.start_of(number))
        for number in range(1 + completion.num_segments)
        for run in completion.stream(number).runs
        if run.is_sampled and run.end > window.start_of(number)
    )


def behind_window(completion: Completion, limit: int, sampling: SamplingParams) -> Completion:
    """Apply the limits of the whole response to a completion that an engine generated up to `limit` tokens.

    A response that only filled its window becomes partial ("abort") and continues from there. An episode does so by itself.
    """
    if completion.episode is None and completion.finish_reason == "length" and completion.num_tokens >= limit:
        completion = replace(completion, finish_reason="abort")
    return settled(completion, sampling)


def _group_to_json(group: WindowGroup) -> dict[str, Any]:
    # Sort by index, not by the engine's order, so that equal pools have equal states.
    return {
        **open_group_to_json(replace(group, completions=dict(sorted(group.completions.items())))),
        "num_begun": group.num_begun,
        "starts": {str(index): list(starts) for index, starts in group.starts.items()},
        "num_finished": group.num_finished,
        "accuracy_sum": group.accuracy_sum,
    }


def _group_from_json(value: Mapping[str, Any], prompts: Mapping[str, Prompt]) -> WindowGroup:
    return WindowGroup(
        **vars(open_group_from_json(value, prompts)),
        num_begun=value["num_begun"],
        # A number: from a time without episodes of several streams.
        starts={
            int(index): (starts,) if isinstance(starts, int) else tuple(starts)
            for index, starts in value["starts"].items()
        },
        num_finished=value["num_finished"],
        accuracy_sum=value["accuracy_sum"],
    )


class WindowCollection:
    """One collection: one window for each response in `keys`, in this order.

    The pool has the tokens as the engine returns them, so a collection can be rebuilt from its keys; finished responses
    are then scored again.
    """

    def __init__(
        self,
        keys: Sequence[ResponseKey],
        exhausted: Exhaustion,
        pool: WindowPool,
        engine: RolloutEngine,
        scorer: SampleScorer,
        sampling: SamplingParams,
        window_tokens: int,
        seed: int,
        with_routing: bool = False,
        on_lost: Callable[[Completion], None] = lambda lost: None,
    ) -> None:
        """`on_lost` is called with each episode whose environment failed; it leaves the pool and the keys."""
        self.keys = list(keys)
        self.exhausted = exhausted
        self.num_new_tokens = 0  # `generate` resets it.
        self.num_lost = 0  # episodes whose environments failed
        self.scored: dict[ResponseKey, ScoredSample] = {}  # finished ones
        self._pool = pool
        self._engine = engine
        self._scorer = scorer
        self._sampling = sampling
        self._window_tokens = window_tokens
        self._seed = seed
        self._with_routing = with_routing
        self._on_lost = on_lost
        self._in_flight: set[ResponseKey] = set()  # submitted and not returned
        self._returned: list[ResponseKey] = []  # not yet scored or resubmitted

    @property
    def num_in_flight(self) -> int:
        """Responses that the engine works on."""
        return len(self._in_flight)

    def generate(self) -> Iterator[None]:
        """Generate every response to the end of its window or its own end; yields after every poll.

        The caller may call `hold` while the generator is suspended.
        """
        self.num_new_tokens = 0
        self._returned = list(self.keys)
        self._forget_fruitless()
        self._settle()
        while self._in_flight:
            self._take(self._engine.poll())
            self._settle()
            yield
            self._settle()  # responses held meanwhile continue

    def hold(self) -> None:
        """Stop the engine and keep the tokens of every window so far."""
        if self._in_flight:
            self._take(self._engine.abort())
            # Responses that the engine lost continue from the tokens held.
            self._returned += sorted(self._in_flight)
            self._in_flight.clear()
            self._forget_fruitless()

    def samples(self) -> dict[ResponseKey, ScoredSample]:
        """Return every window, in order of the keys. Call it when `generate` has ended."""
        return {key: self._sample(key) for key in sorted(self.keys)}

    def _forget_fruitless(self) -> None:
        # A stop that this side requested is not an engine failure.
        for group in self._pool.groups:
            group.num_fruitless.clear()

    def _take(self, completions: Sequence[Completion]) -> None:
        for completion in completions:
            group_id, _, index = completion.request_id.rpartition("/")
            key = (group_id, int(index))
            assert key in self._in_flight, f"the engine returned {completion.request_id}, which is not in flight"
            ended = behind_window(completion, self._limit(key), self._sampling)
            self.num_new_tokens += self._pool[group_id].add(key[1], ended)
            self._in_flight.remove(key)
            self._returned.append(key)

    def _settle(self) -> None:
        """Score the responses that ended and submit the others up to the end of their window."""
        returned, self._returned = self._returned, []
        held = {key: self._pool[key[0]].completions.get(key[1]) for key in returned}
        requests = {
            key: self._request(key)
            for key, so_far in held.items()
            if so_far is None or (is_partial(so_far) and not self._is_full(key, so_far))
        }
        if requests:
            self._in_flight.update(requests)
            self._engine.submit(list(requests.values()))
        ended = {key: so_far for key, so_far in held.items() if so_far is not None and not is_partial(so_far)}
        for key in [key for key, so_far in ended.items() if is_lost(so_far)]:
            self.keys.remove(key)
            self._pool[key[0]].lose(key[1])
            self.num_lost += 1
            self._on_lost(ended.pop(key))
        finished = {key: (self._pool[key[0]].prompt, one) for key, one in ended.items() if key not in self.scored}
        if finished:
            samples = self._scorer.score(list(finished.values()))
            self.scored.update((key, samples[response.request_id]) for key, (_, response) in finished.items())

    def _limit(self, key: ResponseKey) -> int:
        """Return the number of sampled tokens of the response at the end of the window."""
        group, index = self._pool[key[0]], key[1]
        so_far = group.completions.get(index)
        start = so_far.num_sampled - sampled_in(so_far, group.window(index, False)) if so_far is not None else 0
        return min(self._sampling.max_new_tokens, start + self._window_tokens)

    def _is_full(self, key: ResponseKey, so_far: Completion) -> bool:
        """Return True if the window of a response that continues has ended; an episode's turn does with its answer."""
        is_waiting = so_far.episode is not None and so_far.episode.end != "window"
        return so_far.num_sampled >= self._limit(key) and not is_waiting

    def _request(self, key: ResponseKey) -> GenerationRequest:
        group_id, index = key
        group, limit = self._pool[group_id], self._limit(key)
        is_episode, seed = group.prompt.begins_episode, sample_seed(self._seed, group_id, index)
        sampling = self._sampling if is_episode else replace(self._sampling, max_new_tokens=limit)
        return replace(
            next_request(group, index, sampling, seed, self._with_routing), window_end=limit if is_episode else 0
        )

    def _sample(self, key: ResponseKey) -> ScoredSample:
        group_id, index = key
        group, scored = self._pool[group_id], self.scored.get(key)
        if scored is not None:
            return replace(scored, window=group.window(index, is_finished=True))
        return self._scorer.unfinished(group.completions[index], group.window(index, is_finished=False))


def contrast_first(groups: Sequence[WindowGroup]) -> list[int]:
    """Return the indices of `groups` by priority.

    Groups whose finished responses differ come first, then those with the most unfinished responses (whose outcome is
    open), then the rest; equals keep their order.
    """

    def rank(index: int) -> tuple[bool, int]:
        group = groups[index]
        return not group.has_contrast, 0 if group.has_contrast else -group.num_waiting

    return sorted(range(len(groups)), key=rank)


def choose_groups(groups: Sequence[WindowGroup], sizes: Sequence[int], num_windows: int) -> set[int]:
    """Return the indices of the groups to train: by `contrast_first`, at most `num_windows` windows together.

    `sizes`: each group's windows in this collection. A group is taken with all of them or not at all; one that no longer
    fits is skipped.
    """
    chosen: set[int] = set()
    for index in contrast_first(groups):
        if sizes[index] <= num_windows:
            chosen.add(index)
            num_windows -= sizes[index]
    return chosen
