"""The processes of the world that hold a model: consecutive ranks, numbered from 0 within the set, and their group.

A layout is arithmetic over its own ranks; only this module knows where they are in the world.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from megatron_dapo.parallel.coordination import Coordination, Progress, coordinate


@dataclass(frozen=True)
class RankSet:
    """Ranks [first_rank, first_rank + num_ranks) of the world, as the process of rank `world_rank` sees them."""

    first_rank: int
    num_ranks: int
    world_rank: int
    group: dist.ProcessGroup | None  # group of these ranks; None in a process outside the set
    coordination: Coordination | None = None  # coordination of these ranks through host memory

    @property
    def ranks(self) -> range:
        """Ranks of the world."""
        return range(self.first_rank, self.first_rank + self.num_ranks)

    @property
    def is_member(self) -> bool:
        """True if this process is one of them."""
        return self.world_rank in self.ranks

    @property
    def rank(self) -> int:
        """This process's number among them."""
        assert self.is_member, f"rank {self.world_rank} of the world is none of {self.ranks}"
        return self.world_rank - self.first_rank

    @property
    def collective_group(self) -> dist.ProcessGroup | None:
        """The group for collectives among more than one rank; None if there is only one."""
        return self.group if self.num_ranks > 1 else None


def all_ranks() -> RankSet:
    """All processes, in the default group."""
    return RankSet(0, dist.get_world_size(), dist.get_rank(), dist.group.WORLD)


def partition_ranks(num_last: int, timeout_s: float, progress: Progress | None = None) -> tuple[RankSet, RankSet]:
    """Return the world without its last `num_last` ranks, and the last `num_last` ranks. Collective: every process
    makes both groups.

    Waits within a set end after `timeout_s` seconds. Exchanges mark `progress`. Raise ValueError if either set would be
    empty.
    """
    world_size, rank = dist.get_world_size(), dist.get_rank()
    if not 0 < num_last < world_size:
        raise ValueError(f"{num_last} of {world_size} processes cannot be a separate part: both parts need some")
    parts = []
    for first, count in ((0, world_size - num_last), (world_size - num_last, num_last)):
        # Every process of the world must call new_group for every group, in the same order.
        group = dist.new_group(list(range(first, first + count)), timeout=timedelta(seconds=timeout_s))
        coordination = coordinate(range(first, first + count), timeout_s, progress)
        parts.append(RankSet(first, count, rank, group if coordination is not None else None, coordination))
    return parts[0], parts[1]
