"""Complete groups between the collector and the trainer: first in first out, none split, none too stale."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_dapo.rollout.group_json import group_from_json, group_to_json
from megatron_dapo.types import Group

STATE_VERSION = 1

# Of the groups that are fresh enough, in order of arrival: indices of at most `num_groups` to hand out.
TakeStrategy = Callable[[Sequence[Group], int], list[int]]


def oldest_first(groups: Sequence[Group], num_groups: int) -> list[int]:
    """In order of arrival."""
    return list(range(min(num_groups, len(groups))))


def newest_policy_first(groups: Sequence[Group], num_groups: int) -> list[int]:
    """The least stale ones; among equals, in order of arrival."""
    return sorted(range(len(groups)), key=lambda index: -groups[index].policy_version)[:num_groups]


TAKE_STRATEGIES: dict[str, TakeStrategy] = {"oldest_first": oldest_first, "newest_policy_first": newest_policy_first}


@dataclass(frozen=True)
class BufferStatistics:
    """What is inside, and what went through since the run began."""

    num_groups: int
    num_samples: int
    num_tokens: int  # response tokens
    oldest_policy_version: int | None
    num_put: int
    num_taken: int
    num_evicted: int


class ReplayBuffer:
    """Groups waiting to be trained. Wherever a policy version is asked for, it is the one that the batch being made will train.

    Args:
        max_staleness: policy versions a group may be behind the one it trains; 0: only groups of that version.
        strategy: name in TAKE_STRATEGIES.
    """

    def __init__(self, max_staleness: int = 0, strategy: str = "oldest_first") -> None:
        if max_staleness < 0:
            raise ValueError(f"replay buffer: max_staleness = {max_staleness}, must be at least 0")
        if strategy not in TAKE_STRATEGIES:
            raise ValueError(f"replay buffer: unknown strategy {strategy!r}; there are {', '.join(TAKE_STRATEGIES)}")
        self.max_staleness = max_staleness
        self._choose = TAKE_STRATEGIES[strategy]
        self._groups: list[Group] = []
        self._num_put = self._num_taken = self._num_evicted = 0

    def __len__(self) -> int:
        return len(self._groups)

    def put(self, group: Group) -> None:
        """Append a complete group."""
        assert all(group.group_id != other.group_id for other in self._groups), (
            f"group {group.group_id} is already in the buffer"
        )
        self._groups.append(group)
        self._num_put += 1

    def put_back(self, groups: Sequence[Group]) -> None:
        """Undo a `take` whose groups were not trained: they go ahead of everything else."""
        self._groups[:0] = groups
        self._num_taken -= len(groups)

    def num_available(self, policy_version: int) -> int:
        """Groups that may still be trained at `policy_version`."""
        return sum(self._is_fresh(group, policy_version) for group in self._groups)

    def take(self, num_groups: int, policy_version: int) -> list[Group]:
        """Remove and return at most `num_groups` whole groups that are fresh enough for `policy_version`."""
        fresh = [group for group in self._groups if self._is_fresh(group, policy_version)]
        taken = [fresh[index] for index in self._choose(fresh, num_groups)]
        self._remove(taken)
        self._num_taken += len(taken)
        return taken

    def evict(self, policy_version: int) -> list[Group]:
        """Remove and return the groups that have become too stale, so that their prompts can be queued again."""
        stale = [group for group in self._groups if not self._is_fresh(group, policy_version)]
        self._remove(stale)
        self._num_evicted += len(stale)
        return stale

    def statistics(self) -> BufferStatistics:
        return BufferStatistics(
            num_groups=len(self._groups),
            num_samples=sum(len(group.samples) for group in self._groups),
            num_tokens=sum(len(sample.completion.token_ids) for group in self._groups for sample in group.samples),
            oldest_policy_version=min((group.policy_version for group in self._groups), default=None),
            num_put=self._num_put,
            num_taken=self._num_taken,
            num_evicted=self._num_evicted,
        )

    def state_dict(self, put_back: Sequence[Group] = ()) -> dict[str, Any]:
        """JSON-serializable: the groups with every token, log-prob, score and version, and the counters. As if the
        groups `put_back` had been put back before.
        """
        return {
            "version": STATE_VERSION,
            "groups": [group_to_json(group) for group in [*put_back, *self._groups]],
            "num_put": self._num_put,
            "num_taken": self._num_taken - len(put_back),
            "num_evicted": self._num_evicted,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("version") != STATE_VERSION:
            raise ValueError(
                f"replay buffer state has version {state.get('version')}, this program reads {STATE_VERSION}"
            )
        self._groups = [group_from_json(group) for group in state["groups"]]
        self._num_put, self._num_taken, self._num_evicted = state["num_put"], state["num_taken"], state["num_evicted"]

    def _is_fresh(self, group: Group, policy_version: int) -> bool:
        return policy_version - group.policy_version <= self.max_staleness

    def _remove(self, groups: Sequence[Group]) -> None:
        gone = {group.group_id for group in groups}
        self._groups = [group for group in self._groups if group.group_id not in gone]
