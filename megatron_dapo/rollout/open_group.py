"""Partial rollout: groups with stopped responses, and the requests that continue them.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import numpy as np

from megatron_dapo.engines.base import completion_from_json, completion_to_json, finish_reason_of
from megatron_dapo.types import Completion, GenerationRequest, Prompt, SamplingParams

# How often in a row an engine may return the same response unfinished and without a new token. Requests queued in an
# engine that dies come back like that, but a working engine does not keep doing it.
MAX_FRUITLESS = 16


class GroupStage(Enum):
    """What happens to an open group; `group_collector` draws its whole life."""

    IN_FLIGHT = "the engine works on its missing responses"
    HELD = "stopped with its tokens, until the next collection continues it"


@dataclass(eq=False)
class OpenGroup:
    """A group with responses that have not ended."""

    group_id: str
    prompt: Prompt
    generation_step: int
    completions: dict[int, Completion] = field(default_factory=dict)  # by index; "abort" means to be continued
    num_fruitless: Counter[int] = field(default_factory=Counter)  # by index, see MAX_FRUITLESS
    size: int = 0  # responses it will have
    stage: GroupStage = GroupStage.IN_FLIGHT

    @property
    def missing(self) -> list[int]:
        """The indices of the responses that have not ended."""
        held = self.completions
        return [index for index in range(self.size) if index not in held or is_partial(held[index])]

    @property
    def is_complete(self) -> bool:
        """True if every response has ended."""
        return not self.missing

    def oldest_version(self, serving: int) -> int:
        """Return the version of its oldest token; without tokens `serving`, the version that would sample its first."""
        versions = (tokens.version for one in self.completions.values() for tokens in one.versions)
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
