"""The age guard (rollout.order = "guarded"): groups are trained as they end, and none later than the staleness bound allows.

A group may be trained by batches up to its deadline, the version of its oldest token plus max_staleness. Every group can be
if, for every version d,

    slack(d) = places of the batches up to d - number of groups with a deadline up to d >= 0

A group with deadline e that is trained now takes a place from the others with earlier deadlines: slack(d) falls by 1 for
every d < e. So this batch takes decided groups while those slacks are positive, and keeps its other places for groups that
must be trained now and are not decided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class DatedGroup:
    """A group that is to be trained. Groups with equal deadlines are trained in order of their ids."""

    deadline: int  # last policy version that may train it
    group_id: str
    is_decided: bool


def trainable(groups: Sequence[DatedGroup], version: int, num_left: int, num_groups: int) -> list[str]:
    """Return the ids of the decided groups that the batch of `version` may train now, those with early deadlines first.

    `num_left`: places of this batch that are not taken; `num_groups`: places of each later batch.
    """
    last = max((group.deadline for group in groups), default=version)
    slack = {
        place: num_left + num_groups * (place - version) - sum(group.deadline <= place for group in groups)
        for place in range(version, last)
    }
    chosen: list[str] = []
    for group in sorted(groups):
        earlier = range(version, group.deadline)
        if group.is_decided and len(chosen) < num_left and all(slack[place] > 0 for place in earlier):
            chosen.append(group.group_id)
            slack |= {place: slack[place] - 1 for place in earlier}
    return chosen
