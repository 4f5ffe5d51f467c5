"""Which groups are trained where a collection makes more windows than a step trains (T-PPO, arXiv 2506.15050)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class GroupProgress:
    """What decides on a group that has windows in a collection. Counts are over all steps, this one included."""

    num_windows: int  # in this collection
    num_finished: int
    accuracy_sum: float  # of the finished responses
    num_unfinished: int  # responses that have not come to their end

    @property
    def has_contrast(self) -> bool:
        """Its finished responses are neither all wrong nor all right."""
        return 0 < self.accuracy_sum < self.num_finished


# Groups in order of their start -> their indices, the most wanted first.
GroupPriority = Callable[[Sequence[GroupProgress]], list[int]]


def contrast_first(groups: Sequence[GroupProgress]) -> list[int]:
    """Groups whose finished responses differ, then those with the most unfinished ones (whose outcome is open), then
    the rest; among equals in order of their start.
    """

    def rank(index: int) -> tuple[bool, int]:
        group = groups[index]
        return not group.has_contrast, 0 if group.has_contrast else -group.num_unfinished

    return sorted(range(len(groups)), key=rank)


def choose_groups(
    groups: Sequence[GroupProgress], num_windows: int, priority: GroupPriority = contrast_first
) -> set[int]:
    """Indices of the groups to train: the most wanted whose windows are together at most `num_windows`. A group is
    taken with all its windows or not at all; one that does not fit any more is passed over.
    """
    chosen: set[int] = set()
    for index in priority(groups):
        if groups[index].num_windows <= num_windows:
            chosen.add(index)
            num_windows -= groups[index].num_windows
    return chosen
