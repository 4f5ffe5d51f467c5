"""Coordination of ranks through host memory: commands, reports and barriers.

An NCCL collective that waits for a late rank spins on the GPU, which the rollout engine may be using, and NCCL's watchdog
ends the run at its timeout. So every potentially long wait goes over gloo, through this class; tensors go over the
group of their device.

gloo connects every rank of a group to every other one, so many ranks form a tree of small groups:

    level 0   8 consecutive ranks, the size of most nodes
    level 1   the first ranks of 4 groups of level 0
    level 2   the first ranks of 4 groups of level 1, and so on

Values climb the tree and are combined at each level, and the result comes back down. With 16,384 ranks, rank 0 has 16
connections to other nodes and most ranks have none. Up to 8 ranks form one group and need one collective per exchange.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_dapo.rounding import round_up

GROUP_SIZE = 8  # ranks of a level 0 group
FAN_OUT = 4  # groups of one level below a group of the next
_ALLOWANCE_S = 2.0  # each barrier level waits this much longer than the one below, whose verdict it passes on
_VERDICT_S = 20.0  # extra time, beyond the wait itself, for a verdict to arrive from the top of the tree
_SHORTEST_WAIT = timedelta(milliseconds=1)  # gloo treats zero as its default
_NEVER_SENT_TAG = 2


class Progress:
    """The time of this process's last progress, and a count. Any thread may call it."""

    def __init__(self) -> None:
        self.count = 0
        self._at = time.monotonic()

    def mark(self) -> None:
        """Note progress: a finished response, a command from rank 0, the start of a phase."""
        self.count += 1
        self._at = time.monotonic()

    @property
    def idle_s(self) -> float:
        """Seconds since the last progress."""
        return time.monotonic() - self._at


class CoordinationError(RuntimeError):
    """A rank did not reach an exchange in time: it is gone or late."""


class Level(NamedTuple):
    """One group of the tree that this process belongs to."""

    group: Any  # torch's ProcessGroupGloo, or a ProcessGroup over it
    ranks: range  # ranks in the coordination; each is the first of its group on the level below
    height: int = 0


class Coordination:
    """JSON exchanges among ranks. Every rank must make each call; each exchange counts as progress.

    Args:
        group: a gloo group; None for a single process, which needs no default group.
        timeout_s: longest wait for the others, in seconds, in an exchange without its own timeout.
        progress: marked by every exchange.
        levels: the groups that this process belongs to, from level 0 up, instead of one `group` of all ranks.
        rank: this process's rank, with `levels`.
        size: number of ranks, with `levels`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        timeout_s: float = 1800.0,
        progress: Progress | None = None,
        *,
        levels: Sequence[Level] = (),
        rank: int = 0,
        size: int = 1,
    ) -> None:
        if group is not None:
            assert dist.get_backend(group) == "gloo", "host waits must not spin on a GPU"
            rank, size = group.rank(), group.size()
            levels = [Level(group, range(size))] if size > 1 else []
        self.timeout_s = timeout_s
        self.progress = progress or Progress()
        self.rank = rank  # this process's rank among them
        self.size = size  # number of ranks
        self._levels = levels
        # The highest group has a rank from every part of the tree, so all its ranks know an exchange's result.
        self._is_on_top = not levels or _covers(levels[-1].ranks, size)
        self._lost = ""  # the wait that failed: gloo breaks its connections at a timeout, so no later one can succeed

    def broadcast(self, value: Any | None, source: int = 0) -> Any:
        """Return the JSON value of rank `source` on every rank; the others pass None."""
        waiting_for, end = f"the value of rank {source}", time.monotonic() + self.timeout_s
        received = value
        senders = [_holder(level.ranks, source) for level in self._levels]
        for level, sender in zip(self._levels, senders):
            if sender is not None:
                received = self._spread(level, received, sender, waiting_for, end)
        for level, sender in zip(reversed(self._levels), reversed(senders)):
            if sender is None:
                received = self._spread(level, received, level.ranks[0], waiting_for, end)
        self.progress.mark()
        return value if self.rank == source else received

    def merge(
        self,
        value: Any,
        combine: Callable[[list], Any],
        waiting_for: str,
        timeout_s: float | None = None,
        down: Callable[[Any], Any] | None = None,
    ) -> Any:
        """Return `combine` of every rank's JSON value, the same on every rank. Tuples arrive as lists.

        Args:
            combine: maps the values of some ranks, in rank order, to one value that represents them; it is applied to
            its own
                results level by level.
            down: reduces the result for all ranks below the highest group of the tree, to which rank 0 belongs.

        Raise CoordinationError, which names the wait, after `timeout_s` (None: the coordination's timeout), or
        immediately if an earlier wait failed.
        """
        end = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        merged = combine([json.loads(json.dumps(value))])
        for level in self._levels:
            merged = combine(self._exchange(level, merged, waiting_for, end))
        lower = self._levels[:-1]
        if not self._is_on_top:
            merged = self._spread(self._levels[-1], None, self._levels[-1].ranks[0], waiting_for, end)
        reduced = down(merged) if down is not None and self._is_on_top and lower else merged
        for level in reversed(lower):
            self._spread(level, reduced, level.ranks[0], waiting_for, end)
        return merged

    def gather(self, value: Any, waiting_for: str = "the values of all ranks", timeout_s: float | None = None) -> list:
        """Return every rank's JSON value, in rank order, by `merge`. Use it for few or short values."""
        return self.merge([value], lambda parts: list(chain.from_iterable(parts)), waiting_for, timeout_s)

    def sum(self, values: torch.Tensor, waiting_for: str, timeout_s: float) -> torch.Tensor:
        """Return the element-wise sum of int64 vectors of equal length on the CPU; wraps modulo 2^64."""
        return self._reduce(values, dist.ReduceOp.SUM, waiting_for, timeout_s)

    def maximum(self, values: torch.Tensor, waiting_for: str, timeout_s: float | None = None) -> torch.Tensor:
        """Return the element-wise maximum of vectors of equal length on the CPU."""
        return self._reduce(values, dist.ReduceOp.MAX, waiting_for, self.timeout_s if timeout_s is None else timeout_s)

    def all_true(self, value: bool) -> bool:
        """Return True on every rank if every rank passed True. Also a barrier."""
        return self.merge(bool(value), all, "the agreement of all ranks")

    def barrier(self, waiting_for: str) -> None:
        """Wait until every rank is here. TimeoutError names the wait and the ranks that are missing."""
        problem, whole = "", []  # groups whose barrier failed are broken: their ranks have failed with this one
        for level in self._levels:
            seconds = self.timeout_s + level.height * _ALLOWANCE_S
            try:
                level.group.monitored_barrier(timedelta(seconds=seconds), wait_all_ranks=True)
                whole.append(level)
                if level.height:  # a rank of this level knows which ranks below it are missing
                    verdicts = self._exchange(level, problem, waiting_for, time.monotonic() + seconds)
                    problem = next((verdict for verdict in verdicts if verdict), "")
            except RuntimeError as error:
                problem = problem or self._missing(level, seconds, waiting_for, error)
        for level in reversed(whole):
            # The highest group of the tree already knows.
            if not (self._is_on_top and level is self._levels[-1]):
                problem = self._verdict(level, problem, waiting_for) or problem
        if problem:
            raise TimeoutError(problem)
        self.progress.mark()

    def _verdict(self, level: Level, problem: str, waiting_for: str) -> str:
        """Pass on to one group which ranks are missing at a barrier."""
        end = time.monotonic() + self.timeout_s + _VERDICT_S
        try:
            return self._spread(level, problem, level.ranks[0], waiting_for, end)
        except CoordinationError as error:
            return problem or str(error)

    def _missing(self, level: Level, seconds: float, waiting_for: str, error: RuntimeError) -> str:
        problem = f"rank {self.rank} of {self.size} waited {seconds:g} s for {waiting_for}: {error}"
        if level.ranks != range(len(level.ranks)):
            problem += f" (ranks there are numbered {level.ranks.start}, {level.ranks.start + level.ranks.step}, ...)"
        return problem

    def _reduce(self, values: torch.Tensor, operation: Any, waiting_for: str, timeout_s: float) -> torch.Tensor:
        total, end, options = values.clone(), time.monotonic() + timeout_s, dist.AllreduceOptions()
        options.reduceOp = operation
        for level in self._levels:
            self._finish(partial(level.group.allreduce, [total], options), waiting_for, end)
        below = self._levels if not self._is_on_top else self._levels[:-1]
        for level in reversed(below):
            self._finish(partial(level.group.broadcast, total, 0), waiting_for, end)
        return total

    def _exchange(self, level: Level, value: Any, waiting_for: str, end: float) -> list:
        """Return the JSON values of all ranks of one group, in rank order."""
        payload = json.dumps(value).encode()
        # Most values are short and fit after their length, which takes one collective instead of two.
        frames = self._gather_bytes(level, _framed(payload, _SHORT_BYTES), waiting_for, end)
        longest = max(_length(frame) for frame in frames)
        if longest > _SHORT_BYTES - _LENGTH_BYTES:
            num_bytes = round_up(_LENGTH_BYTES + longest, _SHORT_BYTES)
            frames = self._gather_bytes(level, _framed(payload, num_bytes), waiting_for, end)
        return [json.loads(frame[_LENGTH_BYTES : _LENGTH_BYTES + _length(frame)]) for frame in frames]

    def _gather_bytes(self, level: Level, own: bytearray, waiting_for: str, end: float) -> list[bytes]:
        """Return the bytes of every rank of one group; all send equally many."""
        tensor = torch.frombuffer(own, dtype=torch.uint8)
        gathered = [torch.empty_like(tensor) for _ in level.ranks]
        self._finish(partial(level.group.allgather, [gathered], [tensor]), waiting_for, end)
        return [frame.numpy().tobytes() for frame in gathered]

    def _spread(self, level: Level, value: Any, sender: int, waiting_for: str, end: float) -> Any:
        """Return the JSON value of `sender` on all ranks of one group."""
        payload = json.dumps(value).encode() if self.rank == sender else b""
        frame, root = _framed(payload, _SHORT_BYTES), level.ranks.index(sender)
        tensor = torch.frombuffer(frame, dtype=torch.uint8)
        self._finish(partial(level.group.broadcast, tensor, root), waiting_for, end)
        num_first, num_bytes = _SHORT_BYTES - _LENGTH_BYTES, _length(frame)
        if num_bytes <= num_first:
            return json.loads(frame[_LENGTH_BYTES : _LENGTH_BYTES + num_bytes])
        rest = bytearray(payload[num_first:].ljust(round_up(num_bytes - num_first, _SHORT_BYTES), b"\0"))
        tensor = torch.frombuffer(rest, dtype=torch.uint8)
        self._finish(partial(level.group.broadcast, tensor, root), waiting_for, end)
        return json.loads((frame[_LENGTH_BYTES:] + rest)[:num_bytes])

    def _finish(self, collective: partial, waiting_for: str, end: float) -> None:
        """Run a collective of one group up to `end`, on the monotonic clock."""
        if self._lost:
            raise CoordinationError(f"{waiting_for}: not tried, the ranks have lost each other ({self._lost})")
        start = time.monotonic()
        try:
            collective().wait(max(_SHORTEST_WAIT, timedelta(seconds=end - start)))
        except RuntimeError as error:
            self._lost = waiting_for
            self._break_connections()
            first_line = (str(error).splitlines() or ["no reason given"])[0][:300]
            raise CoordinationError(
                f"{waiting_for}: rank {self.rank} of {self.size} waited {time.monotonic() - start:.1f} s for the others: "
                f"{first_line}"
            ) from error
        self.progress.mark()

    def _break_connections(self) -> None:
        """End the waits of ranks in all groups of this process: the other groups cannot see what broke this one."""
        if len(self._levels) < 2:
            return
        for level in self._levels:
            for number in range(len(level.ranks)):
                # gloo has no call to break all of a group's connections, but breaks them once a receive times out.
                if level.ranks[number] != self.rank:
                    with contextlib.suppress(RuntimeError):
                        never_sent = level.group.recv([torch.zeros(1, dtype=torch.uint8)], number, _NEVER_SENT_TAG)
                        never_sent.wait(_SHORTEST_WAIT)


_SHORT_BYTES = 1024
_LENGTH_BYTES = 8  # bytes of the little-endian length in front


def _framed(payload: bytes, num_bytes: int) -> bytearray:
    """Return the length of a payload and as much of it as fits, in exactly `num_bytes`."""
    framed = len(payload).to_bytes(_LENGTH_BYTES, "little") + payload[: num_bytes - _LENGTH_BYTES]
    return bytearray(framed.ljust(num_bytes, b"\0"))


def _length(framed: bytes | bytearray) -> int:
    return int.from_bytes(framed[:_LENGTH_BYTES], "little")


def coordinate(
    ranks: Sequence[int],
    timeout_s: float,
    progress: Progress | None = None,
    *,
    group_size: int = GROUP_SIZE,
    fan_out: int = FAN_OUT,
) -> Coordination | None:
    """Return the coordination of some ranks of the world; None in any other process.

    Collective among these ranks; the default process group must exist.
    """
    if dist.get_rank() not in ranks:
        return None
    own = ranks.index(dist.get_rank())
    levels = [
        Level(_join([ranks[member] for member in members], timeout_s), members, height)
        for height, members in enumerate(groups_of(own, len(ranks), group_size, fan_out))
        if len(members) > 1
    ]
    return Coordination(None, timeout_s, progress, levels=levels, rank=own, size=len(ranks))


def groups_of(rank: int, num_ranks: int, group_size: int = GROUP_SIZE, fan_out: int = FAN_OUT) -> Iterator[range]:
    """Yield the ranks of each group of the tree that a rank belongs to, from level 0 up."""
    stride, count = 1, group_size
    while True:
        first = rank // (stride * count) * stride * count
        yield range(first, min(num_ranks, first + stride * count), stride)
        stride *= count
        if rank != first or stride >= num_ranks:
            return
        count = fan_out


def _covers(ranks: range, num_ranks: int) -> bool:
    """Return True if all ranks are below a group of the tree."""
    return ranks[0] == 0 and ranks[-1] + ranks.step >= num_ranks


def _holder(ranks: range, rank: int) -> int | None:
    """Return the rank of a group that another rank is below in the tree; None if it is outside the group."""
    if not ranks[0] <= rank < ranks[-1] + ranks.step:
        return None
    return ranks[(rank - ranks[0]) // ranks.step]


def default_store() -> dist.Store:
    """Return the key-value store through which the run's processes met; each is already connected to it."""
    return dist.distributed_c10d._get_default_store()


def _join(ranks: Sequence[int], timeout_s: float) -> Any:
    """Return a gloo group of ranks of the world. Collective only among them, unlike `torch.distributed.new_group`."""
    store, own = default_store(), dist.get_rank()
    name = f"coordination of {len(ranks)} ranks from {ranks[0]} to {ranks[-1]}"
    # The same ranks may form several groups; all of them count the same way.
    number = store.add(f"{name}, joined by {own}", 1)
    store = dist.PrefixStore(f"{name}, number {number}", store)
    return dist.ProcessGroupGloo(store, ranks.index(own), len(ranks), timedelta(seconds=timeout_s + _VERDICT_S))


def collective_timeout(wait_timeout_s: float) -> float:
    """Return the timeout of process groups, in seconds.

    The watchdog acts first, because it names the phase and writes stacks; the groups' own timeout only backs it up.
    """
    return 2 * wait_timeout_s + 60.0
