"""The pool of T-PPO: begun groups whose responses have not all come to their end, and which of them goes on next.

Every response is an item of its own. It waits in one of two queues, unfinished ones ahead of those not yet started,
each in order of their start:

    fresh prompt -> not started -> window -> unfinished -> window -> ... -> finished: leaves the pool
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from megatron_dapo.rollout.continuation import OpenGroup, open_group_from_json, open_group_to_json, settled
from megatron_dapo.types import Completion, Prompt, SamplingParams

# A response: its group's id and its index in the group.
Place = tuple[str, int]


@dataclass(eq=False)
class BegunGroup:
    """A group of which at least one response has not come to its end."""

    responses: OpenGroup  # what there is of the responses begun and not finished
    size: int  # responses it has in all
    num_begun: int = 0  # indices below are begun
    starts: dict[int, int] = field(default_factory=dict)  # of those begun and not finished: tokens before the window
    num_finished: int = 0  # of all steps
    accuracy_sum: float = 0.0  # of those

    @property
    def num_not_started(self) -> int:
        return self.size - self.num_begun

    @property
    def num_waiting(self) -> int:
        """Responses that have not come to their end."""
        return len(self.starts) + self.num_not_started

    def completion(self, index: int) -> Completion | None:
        """All tokens of response `index` so far; None where no engine has returned any of it yet."""
        return self.responses.completions.get(index)

    def end_window(self, index: int) -> None:
        """What there is of the response becomes the context of its next window."""
        self.starts[index] = len(self.responses.completions[index].token_ids)

    def finish(self, index: int, accuracy: float) -> None:
        """The response has come to its end."""
        del self.starts[index], self.responses.completions[index]
        self.num_finished += 1
        self.accuracy_sum += accuracy


class WindowPool:
    """Begun groups in order of their start."""

    def __init__(self) -> None:
        self._groups: dict[str, BegunGroup] = {}

    def __getitem__(self, group_id: str) -> BegunGroup:
        return self._groups[group_id]

    @property
    def groups(self) -> Sequence[BegunGroup]:
        return tuple(self._groups.values())

    @property
    def num_not_started(self) -> int:
        return sum(group.num_not_started for group in self._groups.values())

    @property
    def num_waiting(self) -> int:
        """Responses that have not come to their end, those not yet started included."""
        return sum(group.num_waiting for group in self._groups.values())

    def begin(self, group_id: str, prompt: Prompt, generation_step: int, size: int) -> None:
        """Add a group, none of its responses started."""
        assert group_id not in self._groups, f"group {group_id} is already in the pool"
        self._groups[group_id] = BegunGroup(OpenGroup(group_id, prompt, generation_step), size)

    def take(self, num_items: int) -> list[Place]:
        """The next responses to work on, at most `num_items`: unfinished ones, then the first that are not started,
        which count as begun from here on.
        """
        places = list(islice(self._unfinished(), num_items))
        for group_id, group in self._groups.items():
            num_new = min(group.num_not_started, num_items - len(places))
            new = range(group.num_begun, group.num_begun + num_new)
            group.num_begun += num_new
            group.starts.update(dict.fromkeys(new, 0))
            places += [(group_id, index) for index in new]
        return places

    def _unfinished(self) -> Iterator[Place]:
        return ((group_id, index) for group_id, group in self._groups.items() for index in sorted(group.starts))

    def drop_finished(self) -> None:
        """Forget the groups all of whose responses have come to their end."""
        self._groups = {group_id: group for group_id, group in self._groups.items() if group.num_waiting}

    def state_dict(self) -> list[dict[str, Any]]:
        """JSON-serializable, with every token, log-prob and version; prompts by their ids."""
        return [_group_to_json(group) for group in self._groups.values()]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]], prompts: Mapping[str, Prompt]) -> None:
        groups = [_group_from_json(value, prompts) for value in state]
        self._groups = {group.responses.group_id: group for group in groups}


def behind_window(completion: Completion, limit: int, sampling: SamplingParams) -> Completion:
    """What an engine returned of a response that was asked for up to `limit` tokens, judged by the limits of the whole
    response: where only the window is full, it is partial ("abort") and goes on from there.
    """
    if completion.finish_reason == "length" and len(completion.token_ids) >= limit:
        completion = replace(completion, finish_reason="abort")
    return settled(completion, sampling)


def _group_to_json(group: BegunGroup) -> dict[str, Any]:
    # By index, not as the engine returned them: equal pools have equal states.
    completions = dict(sorted(group.responses.completions.items()))
    return {
        "responses": open_group_to_json(replace(group.responses, completions=completions)),
        "size": group.size,
        "num_begun": group.num_begun,
        "starts": {str(index): start for index, start in group.starts.items()},
        "num_finished": group.num_finished,
        "accuracy_sum": group.accuracy_sum,
    }


def _group_from_json(value: Mapping[str, Any], prompts: Mapping[str, Prompt]) -> BegunGroup:
    return BegunGroup(
        responses=open_group_from_json(value["responses"], prompts),
        size=value["size"],
        num_begun=value["num_begun"],
        starts={int(index): start for index, start in value["starts"].items()},
        num_finished=value["num_finished"],
        accuracy_sum=value["accuracy_sum"],
    )
