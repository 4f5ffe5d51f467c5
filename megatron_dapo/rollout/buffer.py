"""Replay buffer between collector and trainer: holds complete groups in start order, never split, never too stale."""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from megatron_dapo.rollout.serialization import group_from_json, group_to_json
from megatron_dapo.types import Group

STATE_VERSION = 2


def _spread(group: Group) -> float:
    """Return the standard deviation of the group's rewards, with which its mean unscaled |advantage| grows."""
    return statistics.pstdev(sample.reward for sample in group.samples)


def _group_id(group: Group) -> str:
    return group.group_id


# Orders in which groups can be taken. Ties are broken by start order.
ORDERS: Mapping[str, Callable[[Group], Any]] = {
    "oldest": _group_id,
    "newest": lambda group: -int(group.group_id),
    "advantage": lambda group: (-_spread(group), group.group_id),
    "staleness": lambda group: (-group.policy_version, group.group_id),
}


class ReplayBuffer:
    """Groups waiting to be trained.

    Every `policy_version` argument is the version that the batch being collected will train. A group is fresh while it
    is at most `max_staleness` versions behind it; 0 allows only groups of that version.
    """

    def __init__(self, max_staleness: int = 0, order: str = "oldest") -> None:
        self.max_staleness = max_staleness
        self._order = ORDERS[order]
        self._groups: list[Group] = []

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)

    def put(self, group: Group) -> None:
        """Add a complete group."""
        assert all(group.group_id != other.group_id for other in self._groups), (
            f"group {group.group_id} is already in the buffer"
        )
        bisect.insort(self._groups, group, key=_group_id)

    def give_back(self, groups: Sequence[Group]) -> None:
        """Undo a `take` of groups that were not trained."""
        self._groups = sorted([*groups, *self._groups], key=_group_id)

    def num_available(self, policy_version: int, before: str | None = None) -> int:
        """Return the number of groups that are still fresh at `policy_version`, started before group `before`."""
        return len(self._available(policy_version, before))

    def take(self, num_groups: int, policy_version: int, before: str | None = None) -> list[Group]:
        """Remove and return the first `num_groups` fresh groups, or fewer, that started before group `before`."""
        taken = sorted(self._available(policy_version, before), key=self._order)[:num_groups]
        self._remove(taken)
        return taken

    def take_these(self, group_ids: Collection[str]) -> list[Group]:
        """Remove and return the groups with these ids."""
        taken = [group for group in self._groups if group.group_id in group_ids]
        self._remove(taken)
        return taken

    def evict(self, policy_version: int) -> list[Group]:
        """Remove and return the groups that are too stale, so that their prompts can be queued again."""
        stale = [group for group in self._groups if not self._is_fresh(group, policy_version)]
        self._remove(stale)
        return stale

    def state_dict(self, given_back: Sequence[Group] = ()) -> dict[str, Any]:
        """Return the groups as after `give_back(given_back)`, with every token and score, for `serialization.split_state`."""
        return {
            "version": STATE_VERSION,
            "groups": [group_to_json(group) for group in sorted([*given_back, *self._groups], key=_group_id)],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned. Raises ValueError for a state of another version."""
        if state.get("version") != STATE_VERSION:
            raise ValueError(
                f"replay buffer state has version {state.get('version')}, this program reads {STATE_VERSION}; "
                "resume with the release that wrote it"
            )
        self._groups = [group_from_json(group) for group in state["groups"]]

    def _available(self, policy_version: int, before: str | None) -> list[Group]:
        return [
            group
            for group in self._groups
            if self._is_fresh(group, policy_version) and (before is None or group.group_id < before)
        ]

    def _is_fresh(self, group: Group, policy_version: int) -> bool:
        return policy_version - group.policy_version <= self.max_staleness

    def _remove(self, groups: Sequence[Group]) -> None:
        removed = {group.group_id for group in groups}
        self._groups = [group for group in self._groups if group.group_id not in removed]
