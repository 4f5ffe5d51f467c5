"""Coordination of ranks through host memory: commands, reports, and waits for each other.

An NCCL collective that waits for a late rank spins on the GPU, which the rollout engine may be using, and NCCL's watchdog
ends the run at its timeout. So everything that may wait long goes over gloo, through this one class; tensors go over the
group of their device. The full mesh of connections behind it belongs to this class alone and can become node leaders.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_dapo.parallel.collectives import all_gather_json, broadcast_json


class Progress:
    """The last moment at which this process saw progress. Any thread may call it."""

    def __init__(self) -> None:
        self._at = time.monotonic()

    def mark(self) -> None:
        """Note progress: a finished response, a command of rank 0, the begin of a phase."""
        self._at = time.monotonic()

    @property
    def idle_s(self) -> float:
        """Seconds since the last progress."""
        return time.monotonic() - self._at


class Coordination:
    """JSON exchanges among the ranks of a gloo group. Every rank of it must call; each exchange counts as progress.

    Args:
        group: a gloo group; None for one process alone, which needs no default group.
        timeout_s: longest wait for the others in an exchange, in seconds.
        progress: marked by every exchange.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, timeout_s: float = 1800.0, progress: Progress | None = None
    ) -> None:
        assert group is None or dist.get_backend(group) == "gloo", "host waits must not spin on a GPU"
        self.group = group
        self.timeout_s = timeout_s
        self.progress = progress or Progress()

    @property
    def rank(self) -> int:
        """This process's rank among them."""
        return dist.get_rank(self.group) if self.group is not None else 0

    @property
    def size(self) -> int:
        """Number of ranks."""
        return dist.get_world_size(self.group) if self.group is not None else 1

    def broadcast(self, value: Any | None, source: int = 0) -> Any:
        """Return the JSON value of rank `source` on every rank; the others pass None."""
        found = broadcast_json(value, source, self.group) if self.size > 1 else value
        self.progress.mark()
        return found

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's JSON value, in rank order. Tuples arrive as lists."""
        found = all_gather_json(value, self.group) if self.size > 1 else [value]
        self.progress.mark()
        return found

    def all_true(self, value: bool) -> bool:
        """Return True on every rank if every rank passed True. Also a barrier."""
        return all(self.gather(bool(value)))

    def barrier(self, waiting_for: str) -> None:
        """Wait until every rank is here. TimeoutError names the wait and the ranks that are missing."""
        try:
            if self.size > 1:
                dist.monitored_barrier(self.group, timeout=timedelta(seconds=self.timeout_s), wait_all_ranks=True)
        except RuntimeError as error:
            problem = f"rank {self.rank} of {self.size} waited {self.timeout_s:g} s for {waiting_for}: {error}"
            raise TimeoutError(problem) from error
        self.progress.mark()


def coordinate(ranks: Sequence[int], timeout_s: float, progress: Progress | None = None) -> Coordination | None:
    """Return the coordination of some ranks of the world, None in a process that is none of them. Collective."""
    group = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s), backend="gloo")
    return Coordination(group, timeout_s, progress) if dist.get_rank() in ranks else None


def collective_timeout(wait_timeout_s: float) -> float:
    """Return the timeout of process groups, in seconds.

    The watchdog acts first, because it names the phase and writes stacks; the groups' own timeout only backs it up.
    """
    return 2 * wait_timeout_s + 60.0
