"""Responses that go on where they were stopped: what is held, what of it may go on, and the request that goes on.

A response is stopped before its end when a batch is full, when the weights move or when its engine dies. It comes back
as a completion with finish_reason "abort": its tokens, log-probs and versions so far. Nothing of it is generated twice:
the next request carries it as `prefix`, and the engine returns the whole response with the versions joined. Keys and
values are computed anew by the weights that go on.

How old a token may be is a statement about training: one of version v may train policy version t if t - v is at most
the staleness bound. So everything here asks for the oldest version allowed, t - bound, where t is the version that the
batch will train. A response over it starts again from its prompt with its own seed: a long response stays long, where a
fresh draw would favor short ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_dapo.rollout.group_json import completion_from_json, completion_to_json
from megatron_dapo.types import Completion, GenerationRequest, Prompt, SamplingParams

# Times in a row an engine may return the same response unfinished and without a new token: requests that wait in the
# queue of an engine that dies come back so, but no sane engine does it for ever.
MAX_FRUITLESS = 16


@dataclass(eq=False)
class OpenGroup:
    """A group that is not complete: the engine works on it, or it waits for the next collection."""

    group_id: str
    prompt: Prompt
    generation_step: int
    completions: dict[int, Completion] = field(default_factory=dict)  # by index; finish_reason "abort": to go on from
    num_fruitless: Counter[int] = field(default_factory=Counter)  # by index, see MAX_FRUITLESS

    def is_complete(self, group_size: int) -> bool:
        """Every response has come to its end."""
        return len(self.completions) == group_size and not any(map(is_partial, self.completions.values()))

    def missing(self, group_size: int) -> list[int]:
        """Indices of the responses that have not come to their end."""
        held = self.completions
        return [index for index in range(group_size) if index not in held or is_partial(held[index])]

    def has_returned(self, group_size: int) -> bool:
        """The engine works on none of it any more."""
        return len(self.completions) == group_size

    def add(self, index: int, completion: Completion) -> int:
        """Take what an engine returned for response `index`; the number of tokens that are new.

        Raises RuntimeError where an engine keeps returning it without a new token, ValueError where what came back is
        not a continuation of what was held.
        """
        held = self.completions.get(index)
        start = len(held.token_ids) if held is not None and is_partial(held) else 0
        if held is not None and completion.token_ids[:start] != held.token_ids[:start]:
            raise ValueError(
                f"response {completion.request_id}: the engine was to go on behind {start} tokens and returned others; "
                "an engine returns the prefix it was given and the new tokens behind it"
            )
        num_new = len(completion.token_ids) - start
        fruitless = self.num_fruitless[index] + 1 if is_partial(completion) and not num_new else 0
        if fruitless > MAX_FRUITLESS:
            raise RuntimeError(
                f"response {completion.request_id}: the engine gave up {fruitless} times in a row without a new token "
                f"(at {start} tokens); see the engine's log"
            )
        self.num_fruitless[index] = fruitless
        self.completions[index] = completion
        return num_new


def is_partial(completion: Completion) -> bool:
    """Stopped before its end."""
    return completion.finish_reason == "abort"


def settled(completion: Completion, sampling: SamplingParams) -> Completion:
    """`completion`; one that was stopped just when it came to its end counts as finished."""
    if not is_partial(completion) or not completion.token_ids:
        return completion
    if completion.token_ids[-1] in sampling.stop_token_ids:
        return replace(completion, finish_reason="stop")
    if len(completion.token_ids) >= sampling.max_new_tokens:
        return replace(completion, finish_reason="length")
    return completion


def oldest_version(completion: Completion, serving: int) -> int:
    """The oldest version that sampled a token of it; without tokens, the version that would sample the first."""
    return min((tokens.version for tokens in completion.versions), default=serving)


# Completions of an open group by index, the oldest version allowed, the version being served -> those that stay.
Survivors = Callable[[Mapping[int, Completion], int, int], dict[int, Completion]]


def none_survive(completions: Mapping[int, Completion], oldest_allowed: int, serving: int) -> dict[int, Completion]:
    """Unfinished groups start again from their prompts."""
    return {}


def fresh_survive(completions: Mapping[int, Completion], oldest_allowed: int, serving: int) -> dict[int, Completion]:
    """Finished and partial responses stay if none of their tokens is too old."""
    return {
        index: completion
        for index, completion in completions.items()
        if oldest_version(completion, serving) >= oldest_allowed
    }


SURVIVORS: dict[str, Survivors] = {"restart": none_survive, "continue": fresh_survive}


def next_request(group: OpenGroup, index: int, sampling: SamplingParams, seed: int) -> GenerationRequest:
    """The request that brings response `index` to its end: behind what there is of it, or from the prompt."""
    held = group.completions.get(index)
    return GenerationRequest(
        request_id=f"{group.group_id}/{index}",
        prompt_ids=group.prompt.token_ids,
        sampling=sampling,
        seed=seed,
        prefix=held if held is not None and held.token_ids else None,
    )


def open_group_to_json(group: OpenGroup) -> dict[str, Any]:
    """JSON-serializable, with every token, log-prob and version; the prompt by its id."""
    return {
        "group_id": group.group_id,
        "prompt_id": group.prompt.prompt_id,
        "generation_step": group.generation_step,
        "completions": {str(index): completion_to_json(held) for index, held in group.completions.items()},
    }


def open_group_from_json(value: Mapping[str, Any], prompts: Mapping[str, Prompt]) -> OpenGroup:
    """The group `open_group_to_json` was given. KeyError where the value or the prompt is something else."""
    return OpenGroup(
        group_id=value["group_id"],
        prompt=prompts[value["prompt_id"]],
        generation_step=value["generation_step"],
        completions={int(index): completion_from_json(held) for index, held in value["completions"].items()},
    )
