"""Open groups: what a collector holds of them, the requests that go to the engine, and the responses that come back.

`group_collector` draws the life of a group. All open groups are in flight, or all are held with the responses that they have:
`OpenGroups.hold` stops the engine and `resume` continues them. What a poll costs grows with the responses that it returns, not
with those in flight, because the thread that collects shares its process with the trainer.

A response is stopped before its end when a batch is full, when the weights change or when its engine dies. It comes
back as a completion with finish_reason "abort" that has its tokens, log-probs and versions so far. No token is
generated twice: the next request carries them as `prefix`, and the engine returns the whole response with the versions
joined. The weights that continue a response compute its keys and values anew.

The age of a token is relative to training: a token of version v may train policy version t if t - v is at most
max_staleness. So the functions here take the oldest allowed version, t - max_staleness, where t is the version that the
batch will train. A response older than that restarts from its prompt with its own seed, so that a long response stays
long; a fresh draw would favor short ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from megatron_dapo.config.rollout_schema import RolloutConfig
from megatron_dapo.engines.base import RolloutEngine, completion_from_json, completion_to_json, finish_reason_of
from megatron_dapo.rollout.collector import sample_seed
from megatron_dapo.rollout.statistics import StatisticsBuilder
from megatron_dapo.types import Completion, GenerationRequest, Prompt, SamplingParams

# How often in a row an engine may return the same response unfinished and without a new token. Requests queued in an
# engine that dies come back like that, but a working engine does not keep doing it.
MAX_FRUITLESS = 16


@dataclass(eq=False)
class OpenGroup:
    """A group with responses that have not ended."""

    group_id: str
    prompt: Prompt
    generation_step: int
    completions: dict[int, Completion] = field(default_factory=dict)  # keyed by index; "abort" means to be continued
    num_fruitless: Counter[int] = field(default_factory=Counter)  # keyed by index, see MAX_FRUITLESS
    size: int = 0  # responses it will have
    sent: int | None = None  # version served when its missing responses were requested; None: the engine works on none

    @property
    def missing(self) -> list[int]:
        """The indices of the responses that have not ended."""
        held = self.completions
        return [index for index in range(self.size) if index not in held or is_partial(held[index])]

    @property
    def is_complete(self) -> bool:
        """True if every response has ended."""
        return not self.missing

    @property
    def num_ended(self) -> int:
        """Responses that have ended."""
        return sum(not is_partial(completion) for completion in self.completions.values())

    def oldest_version(self, serving: int) -> int:
        """Return the version of its oldest token, or an older one while the engine works on it; without tokens `serving`, the
        version that would sample its first."""
        versions = [tokens.version for one in self.completions.values() for tokens in one.versions]
        if self.sent is not None and self.missing:
            versions.append(self.sent)  # an engine that keeps its requests over updates may have sampled by it
        return min(versions, default=serving)

    @property
    def lost_episodes(self) -> list[Completion]:
        """Episodes that a failure of the machine ended: they say nothing about the policy."""
        return [one for one in self.completions.values() if is_lost(one)]

    def leave_out(self, completions: Sequence[Completion]) -> None:
        """Make the group smaller. Its samples keep their ids."""
        names = {one.request_id for one in completions}
        kept = [self.completions[index] for index in sorted(self.completions)]
        self.completions = dict(enumerate(one for one in kept if one.request_id not in names))
        self.size = len(self.completions)

    @property
    def has_returned(self) -> bool:
        """True if the engine no longer works on any of its responses."""
        return len(self.completions) == self.size

    def add(self, index: int, completion: Completion) -> int:
        """Add an engine's completion of response `index` and return its number of newly sampled tokens.

        Raises RuntimeError if the engine keeps returning it without a new token, ValueError if the completion does not
        continue the tokens held.
        """
        held = self.completions.get(index)
        if held is not None and (not is_partial(held) or num_attempts(completion) > num_attempts(held)):
            held = None
        start = held.num_tokens if held is not None else 0
        if held is not None and not np.array_equal(completion.token_ids[:start], held.token_ids):
            raise ValueError(
                f"response {completion.request_id}: the engine was to continue after {start} tokens and returned others; "
                "an engine returns the prefix it was given and the new tokens after it"
            )
        # An episode whose environment is acting, which has no new token, is no fault of the engine.
        has_new = completion.num_tokens > start or completion.episode is not None
        fruitless = self.num_fruitless[index] + 1 if is_partial(completion) and not has_new else 0
        if fruitless > MAX_FRUITLESS:
            raise RuntimeError(
                f"response {completion.request_id}: the engine gave up {fruitless} times in a row without a new token "
                f"(at {start} tokens); see the engine's log"
            )
        self.num_fruitless[index] = fruitless
        self.completions[index] = completion
        return completion.num_sampled - (held.num_sampled if held is not None else 0)


def num_attempts(completion: Completion) -> int:
    """Return how often an episode began anew."""
    return 0 if completion.episode is None else completion.episode.attempt


def is_lost(completion: Completion) -> bool:
    """Return True for an episode that was given up because its environment failed."""
    return completion.episode is not None and completion.episode.end == "lost"


def is_partial(completion: Completion) -> bool:
    """Return True for a response that was stopped before its end."""
    return completion.finish_reason == "abort"


def settled(completion: Completion, sampling: SamplingParams) -> Completion:
    """Return `completion`, marked as finished if it was stopped exactly at its end.

    A stop token at the end of an episode's tokens ends a turn, not the episode.
    """
    if not is_partial(completion) or not completion.num_tokens or completion.episode is not None:
        return completion
    return replace(completion, finish_reason=finish_reason_of(sampling, completion.token_ids))


def fresh_completions(
    completions: Mapping[int, Completion], oldest_allowed: int, serving: int
) -> dict[int, Completion]:
    """Return the finished and partial responses, by index, that have no token older than `oldest_allowed`.

    A response without tokens is as old as `serving`, the version that would sample its first.
    """
    return {
        index: completion
        for index, completion in completions.items()
        if min((tokens.version for tokens in completion.versions), default=serving) >= oldest_allowed
    }


def next_request(
    group: OpenGroup, index: int, sampling: SamplingParams, seed: int, with_routing: bool = False
) -> GenerationRequest:
    """Return the request that completes response `index`, continuing the tokens held or starting from the prompt."""
    held = group.completions.get(index)
    return GenerationRequest(
        request_id=f"{group.group_id}/{index}",
        prompt_ids=group.prompt.token_ids,
        sampling=sampling,
        seed=seed,
        prefix=held if held is not None and held.num_tokens else None,
        with_routing=with_routing,
        task=group.prompt.task,
    )


def open_group_to_json(group: OpenGroup) -> dict[str, Any]:
    """Return values for `serialization.split_state`, with every token, log-prob and version, and the prompt's id."""
    return {
        "group_id": group.group_id,
        "prompt_id": group.prompt.prompt_id,
        "generation_step": group.generation_step,
        "size": group.size,
        "completions": {str(index): completion_to_json(held) for index, held in group.completions.items()},
    }


def open_group_from_json(value: Mapping[str, Any], prompts: Mapping[str, Prompt]) -> OpenGroup:
    """Invert `open_group_to_json`. Raises KeyError for an unknown prompt or any other value."""
    return OpenGroup(
        group_id=value["group_id"],
        prompt=prompts[value["prompt_id"]],
        generation_step=value["generation_step"],
        completions={int(index): completion_from_json(held) for index, held in value["completions"].items()},
        size=value["size"],
    )


class OpenGroups:
    """Groups that are not decided, in start order.

    Args:
        engine: generates their responses.
        config: the [rollout] section.
        sampling: its sampling parameters with the model's stop tokens.
        seed: the run's seed, from which, with group id and index, each response's seed is made.
    """

    def __init__(self, engine: RolloutEngine, config: RolloutConfig, sampling: SamplingParams, seed: int) -> None:
        self._engine = engine
        self._rollout = config
        self._sampling = sampling
        self._seed = seed
        self._groups: dict[str, OpenGroup] = {}  # keyed by group id, in start order
        self._returned: set[str] = set()  # groups in flight that may be complete
        self._num_ended = 0  # responses of groups in flight that have ended
        self.is_held = True  # the engine works on none of them
        self.builder = StatisticsBuilder()  # the current collection's

    def __iter__(self) -> Iterator[OpenGroup]:
        return iter(self._groups.values())

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def first_id(self) -> str | None:
        """The first group in start order; None without any."""
        return next(iter(self._groups), None)

    @property
    def num_in_flight(self) -> int:
        """Groups that the engine works on."""
        return 0 if self.is_held else len(self._groups)

    @property
    def num_held(self) -> int:
        """Groups that wait to be continued."""
        return len(self._groups) if self.is_held else 0

    @property
    def num_ended(self) -> int:
        """Responses of groups in flight that have ended."""
        return self._num_ended

    # Requests

    def start(self, group: OpenGroup) -> list[GenerationRequest]:
        """Put a new group in flight and return its requests."""
        assert not self.is_held, "new groups come after those that are continued"
        self._groups[group.group_id] = group
        return self._requests(group)

    def resume(self) -> list[GenerationRequest]:
        """Put all held groups in flight and return the requests that continue them."""
        if not self.is_held:
            return []
        self.is_held = False
        self._num_ended = sum(group.num_ended for group in self)
        return [request for group in self for request in self._requests(group)]

    def restore(self, group: OpenGroup) -> None:
        """Add a saved group, held."""
        assert self.is_held, "groups are in flight; load the state before collecting"
        self._groups[group.group_id] = group

    def clear(self) -> None:
        """Forget all groups, of which none may be in flight."""
        assert not self.num_in_flight, f"{self.num_in_flight} groups are in flight; load the state before collecting"
        self._groups, self.is_held = {}, True

    def _requests(self, group: OpenGroup) -> list[GenerationRequest]:
        group.num_fruitless.clear()
        group.sent = self._engine.policy_version
        missing = group.missing
        if not missing:  # its last response ended as the engine was stopped
            self._returned.add(group.group_id)
        return [self._request(group, index) for index in missing]

    def _request(self, group: OpenGroup, index: int) -> GenerationRequest:
        seed = sample_seed(self._seed, group.group_id, index)
        request = next_request(group, index, self._sampling, seed, self._rollout.routing_replay)
        self.builder.num_continued += request.prefix is not None
        return request

    # Responses

    def add(self, completions: Sequence[Completion]) -> None:
        """Sort completions into their groups."""
        for completion in completions:
            group, index = self._find(completion)
            before = group.completions.get(index)
            self.builder.num_tokens += group.add(index, settled(completion, self._sampling))
            ended = not is_partial(group.completions[index])
            self._num_ended += ended - (before is not None and not is_partial(before))
            self._returned.add(group.group_id)

    def _find(self, completion: Completion) -> tuple[OpenGroup, int]:
        group_id, index = completion.request_id.rsplit("/", 1)
        group = self._groups.get(group_id)
        assert group is not None and not self.is_held, (
            f"the engine returned {completion.request_id}, which is not in flight"
        )
        return group, int(index)

    def resubmit_aborted(self, completions: Sequence[Completion]) -> None:
        """Continue responses that the engine aborted by itself, at once."""
        pairs = [self._find(completion) for completion in completions]
        requests = [self._request(group, index) for group, index in pairs if is_partial(group.completions[index])]
        if requests:
            self._engine.submit(requests)

    def take_aborted(self) -> list[OpenGroup]:
        """Remove and return the groups with aborted responses once the engine works on none of their responses."""
        aborted = [group for group in self._in_order(self._returned) if group.has_returned and not group.is_complete]
        for group in aborted:
            self.remove(group)
        return aborted

    def complete(self) -> list[OpenGroup]:
        """Return the groups whose every response has ended, in start order."""
        complete = [group for group in self._in_order(self._returned) if group.is_complete]
        self._returned = {group.group_id for group in complete}
        return complete

    def _in_order(self, group_ids: set[str]) -> list[OpenGroup]:
        return [self._groups[group_id] for group_id in sorted(group_ids)]

    def leave_out(self, group: OpenGroup, completions: Sequence[Completion]) -> None:
        """Make a group smaller by some of its responses."""
        self._num_ended -= group.num_ended
        group.leave_out(completions)
        self._num_ended += group.num_ended

    def remove(self, group: OpenGroup) -> None:
        """Remove a group, which is decided or given up."""
        del self._groups[group.group_id]
        self._returned.discard(group.group_id)
        if not self.is_held:
            self._num_ended -= group.num_ended

    # Holding

    def are_fresh(self, oldest_allowed: int) -> bool:
        """Return True if each response, held or in flight, has only tokens of `oldest_allowed` and newer versions.

        A response in flight grows by the version that was served when it was requested, and by newer ones.
        """
        serving = self._engine.policy_version
        return self._rollout.partial_rollout and all(group.oldest_version(serving) >= oldest_allowed for group in self)

    def hold(self, oldest_allowed: int) -> list[OpenGroup]:
        """Stop the engine and hold every response without tokens older than `oldest_allowed`; return the groups that have
        none, which are removed."""
        if self.num_in_flight:
            self.add(self._engine.abort())
        self.is_held, self._num_ended = True, 0
        self._returned.clear()
        serving = self._engine.policy_version
        given_up = []
        for group in list(self):
            group.sent = None
            kept: dict[int, Completion] = {}
            if self._rollout.partial_rollout:
                kept = fresh_completions(group.completions, oldest_allowed, serving)
            if not kept:
                self.remove(group)
                given_up.append(group)
                continue
            dropped = [held for index, held in group.completions.items() if index not in kept]
            self.builder.num_discarded_tokens += sum(completion.num_sampled for completion in dropped)
            group.completions = kept
        return given_up
