"""Coordination of ranks through host memory: commands, reports, and waits for each other.

An NCCL collective that waits for a late rank spins on the GPU, which the rollout engine may be using, and NCCL's watchdog
ends the run at its timeout. So everything that may wait long goes over gloo, through this one class; tensors go over the
group of their device. The full mesh of connections behind it belongs to this class alone and can become node leaders.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_dapo.parallel.collectives import broadcast_json


class Progress:
    """The last moment at which this process saw progress, and how often it did. Any thread may call it."""

    def __init__(self) -> None:
        self.count = 0
        self._at = time.monotonic()

    def mark(self) -> None:
        """Note progress: a finished response, a command of rank 0, the begin of a phase."""
        self.count += 1
        self._at = time.monotonic()

    @property
    def idle_s(self) -> float:
        """Seconds since the last progress."""
        return time.monotonic() - self._at


class CoordinationError(RuntimeError):
    """Ranks did not meet in time: one is gone or late."""


class Coordination:
    """JSON exchanges among the ranks of a gloo group. Every rank of it must call; each exchange counts as progress.

    Args:
        group: a gloo group; None for one process alone, which needs no default group.
        timeout_s: longest wait for the others in an exchange that names no other, in seconds.
        progress: marked by every exchange.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, timeout_s: float = 1800.0, progress: Progress | None = None
    ) -> None:
        assert group is None or dist.get_backend(group) == "gloo", "host waits must not spin on a GPU"
        self.group = group
        self.timeout_s = timeout_s
        self.progress = progress or Progress()
        self._lost = ""  # the wait that failed: gloo breaks its connections at a timeout, so no later one can succeed

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

    def gather(self, value: Any, waiting_for: str = "the values of all ranks", timeout_s: float | None = None) -> list:
        """Return every rank's JSON value, in rank order. Tuples arrive as lists.

        CoordinationError, which names the wait, after `timeout_s` (None: that of the coordination), and at once after an
        earlier one.
        """
        payload = json.dumps(value).encode()
        if self.size == 1:
            return [json.loads(payload)]
        end = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        # Most values are short and fit behind their length: one collective instead of two.
        frames = self._gather_bytes(_framed(payload, _SHORT_BYTES), waiting_for, end)
        longest = max(_length(frame) for frame in frames)
        if longest > _SHORT_BYTES - _LENGTH_BYTES:
            frames = self._gather_bytes(_framed(payload, _LENGTH_BYTES + longest), waiting_for, end)
        return [json.loads(frame[_LENGTH_BYTES : _LENGTH_BYTES + _length(frame)]) for frame in frames]

    def sum(self, values: torch.Tensor, waiting_for: str, timeout_s: float) -> torch.Tensor:
        """Return the element-wise sum of int64 vectors of equal length on the CPU; wraps modulo 2^64."""
        total = values.clone()
        if self.size > 1:
            self._finish(partial(dist.all_reduce, total), waiting_for, time.monotonic() + timeout_s)
        return total

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

    def _gather_bytes(self, own: bytearray, waiting_for: str, end: float) -> list[bytes]:
        """Return every rank's bytes, equally many."""
        tensor = torch.frombuffer(own, dtype=torch.uint8)
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        self._finish(partial(dist.all_gather, gathered, tensor), waiting_for, end)
        return [bytes(frame.tolist()) for frame in gathered]

    def _finish(self, collective: partial, waiting_for: str, end: float) -> None:
        """Run a collective of this group up to `end`, on the monotonic clock."""
        if self._lost:
            raise CoordinationError(f"{waiting_for}: not tried, the ranks have lost each other ({self._lost})")
        start = time.monotonic()
        try:
            # At least a millisecond: gloo takes zero for its own default.
            seconds = timedelta(seconds=max(1e-3, end - start))
            collective(group=self.group, async_op=True).wait(seconds)
        except RuntimeError as error:
            self._lost = waiting_for
            first_line = (str(error).splitlines() or ["no reason given"])[0][:300]
            raise CoordinationError(
                f"{waiting_for}: rank {self.rank} of {self.size} waited {time.monotonic() - start:.1f} s for the others: "
                f"{first_line}"
            ) from error
        self.progress.mark()


_SHORT_BYTES = 1024
_LENGTH_BYTES = 8  # of the length in front, little-endian


def _framed(payload: bytes, num_bytes: int) -> bytearray:
    """Return the length of a payload and as much of it as fits, in exactly `num_bytes`."""
    framed = len(payload).to_bytes(_LENGTH_BYTES, "little") + payload[: num_bytes - _LENGTH_BYTES]
    return bytearray(framed.ljust(num_bytes, b"\0"))


def _length(framed: bytes) -> int:
    return int.from_bytes(framed[:_LENGTH_BYTES], "little")


def coordinate(ranks: Sequence[int], timeout_s: float, progress: Progress | None = None) -> Coordination | None:
    """Return the coordination of some ranks of the world, None in a process that is none of them. Collective."""
    group = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s), backend="gloo")
    return Coordination(group, timeout_s, progress) if dist.get_rank() in ranks else None


def collective_timeout(wait_timeout_s: float) -> float:
    """Return the timeout of process groups, in seconds.

    The watchdog acts first, because it names the phase and writes stacks; the groups' own timeout only backs it up.
    """
    return 2 * wait_timeout_s + 60.0
