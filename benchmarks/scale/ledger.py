"""Payload bytes, messages and connections of one rank: groups that count, over gloo or without any neighbor.

gloo's algorithms decide how often a payload leaves a rank: all_gather and all_reduce pass it around a ring, a broadcast goes
down a binomial tree.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

SHORT_BYTES, LENGTH_BYTES = 1024, 8  # frames of megatron_dapo.parallel.coordination


@dataclass
class Ledger:
    """Counts of one rank, in total and, as `away`, to and from other nodes."""

    node_of: Callable[[int], int]  # rank of the world -> node
    rank: int
    sent: Counter[str] = field(default_factory=Counter)  # kind -> bytes
    sent_away: Counter[str] = field(default_factory=Counter)
    received: Counter[str] = field(default_factory=Counter)
    messages: Counter[str] = field(default_factory=Counter)
    connections: set[tuple[str, int]] = field(default_factory=set)  # (group, rank of the world)

    def connect(self, group: str, rank: int) -> None:
        """Count one connection of a group."""
        self.connections.add((group, rank))

    def send(self, kind: str, rank: int, num_bytes: int) -> None:
        """Count a message to a rank of the world."""
        self.sent[kind] += num_bytes
        self.messages[kind] += 1
        if self.node_of(rank) != self.node_of(self.rank):
            self.sent_away[kind] += num_bytes

    def forget_bytes(self) -> None:
        """Begin to count bytes and messages anew; connections stay."""
        for counter in (self.sent, self.sent_away, self.received, self.messages):
            counter.clear()

    def to_json(self) -> dict[str, Any]:
        """Return the counts."""
        away = {entry for entry in self.connections if self.node_of(entry[1]) != self.node_of(self.rank)}
        return {
            "connections": len(self.connections),
            "connections_away": len(away),
            "sent": dict(self.sent),
            "sent_away": dict(self.sent_away),
            "received": dict(self.received),
            "messages": dict(self.messages),
        }


class Done:
    """A finished operation."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return at once."""
        return True


class Neighbors:
    """Stand-ins for all other ranks: they hold what this rank holds, but for what `answer` changes."""

    def __init__(self, answer: Callable[[Any, int, int], Any]) -> None:
        self.answer = (
            answer  # (this rank's value, first and last + 1 of the ranks that a neighbor speaks for) -> its value
        )
        self.own: Any = None  # value that this rank exchanges
        self.expected: Any = None  # value that comes down the tree next

    def frames(self, num_bytes: int, ranks: Sequence[int], stride: int) -> list[bytes]:
        """Return the frames of all ranks of a group in an exchange."""
        return [frame(self.answer(self.own, rank, rank + stride), num_bytes) for rank in ranks]


def frame(value: Any, num_bytes: int) -> bytes:
    """Return a value after its length, truncated or padded to `num_bytes`."""
    payload = json.dumps(value).encode()
    return (len(payload).to_bytes(LENGTH_BYTES, "little") + payload)[:num_bytes].ljust(num_bytes, b"\0")


class CountedGroup:
    """A gloo group of `ranks` of the world that counts; `inner` None: with `neighbors` in place of the others."""

    def __init__(
        self, ranks: Sequence[int], ledger: Ledger, inner: Any | None, neighbors: Neighbors | None, number: int
    ) -> None:
        self._ranks, self._ledger, self._inner, self._neighbors = list(ranks), ledger, inner, neighbors
        self._index = self._ranks.index(ledger.rank)
        self._stride = self._ranks[1] - self._ranks[0] if len(ranks) > 1 else 1
        self._rest = b""  # unread bytes of a value that comes down the tree
        for rank in self._ranks:
            if rank != ledger.rank:
                ledger.connect(f"coordination {number}", rank)

    def rank(self) -> int:
        """Return this process's rank in the group."""
        return self._index

    def size(self) -> int:
        """Return the number of ranks."""
        return len(self._ranks)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor]) -> Any:
        """Gather; every rank passes everything on to its neighbor, but the neighbor's own."""
        (own,), (gathered,) = inputs, outputs
        self._pass_around(own.nbytes, len(self._ranks) - 1)
        if self._inner is not None:
            return self._inner.allgather(outputs, inputs)
        assert self._neighbors is not None, "without a group there are neighbors"
        frames = self._neighbors.frames(own.numel(), self._ranks, self._stride)
        for index, found in enumerate(frames):
            other = torch.frombuffer(bytearray(found), dtype=torch.uint8)
            gathered[index].copy_(own if index == self._index else other)
        return Done()

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Any:
        """Reduce; two rounds of the ring, each of all parts but one."""
        share = -(-tensors[0].nbytes // len(self._ranks))
        self._pass_around(share, 2 * (len(self._ranks) - 1))
        return Done() if self._inner is None else self._inner.allreduce(tensors, options)

    def broadcast(self, tensor: torch.Tensor, root: int) -> Any:
        """Send down a binomial tree."""
        size, place = len(self._ranks), (self._index - root) % len(self._ranks)
        for step in reversed(range((size - 1).bit_length())):
            below = (1 << step) - 1
            if place & below == 0 and place & (1 << step) == 0 and place | (1 << step) < size:
                self._ledger.send("coordination", self._ranks[((place | (1 << step)) + root) % size], tensor.nbytes)
        self._ledger.received["coordination"] += tensor.nbytes if place else 0
        if self._inner is not None:
            return self._inner.broadcast(tensor, root)
        if place and tensor.dtype == torch.uint8:
            assert self._neighbors is not None, "without a group there are neighbors"
            whole = self._rest or frame(self._neighbors.expected, SHORT_BYTES)
            if not self._rest:
                payload = json.dumps(self._neighbors.expected).encode()
                self._rest = payload[SHORT_BYTES - LENGTH_BYTES :]
            else:
                self._rest = b""
            tensor.copy_(torch.frombuffer(bytearray(whole.ljust(tensor.numel(), b"\0")), dtype=torch.uint8))
        return Done()

    def monitored_barrier(self, timeout: timedelta, wait_all_ranks: bool) -> None:
        """Meet; each rank sends a message to the first one and gets an answer."""
        for rank in self._ranks[1:] if self._index == 0 else self._ranks[:1]:
            self._ledger.send("coordination", rank, 4)
        if self._inner is not None:
            self._inner.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)

    def _pass_around(self, num_bytes: int, times: int) -> None:
        for _ in range(times):
            self._ledger.send("coordination", self._ranks[(self._index + 1) % len(self._ranks)], num_bytes)
        self._ledger.received["coordination"] += num_bytes * times


class CountedPeers:
    """A group of all ranks in which two connect when they first exchange a message."""

    def __init__(self, ledger: Ledger, inner: Any | None) -> None:
        self._ledger, self._inner = ledger, inner

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        """Send to a rank."""
        self._ledger.connect("forwarding", rank)
        self._ledger.send("forwarding", rank, tensors[0].nbytes)
        return Done() if self._inner is None else self._inner.send(tensors, rank, tag)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        """Receive from a rank."""
        self._ledger.connect("forwarding", rank)
        self._ledger.received["forwarding"] += tensors[0].nbytes
        return Done() if self._inner is None else self._inner.recv(tensors, rank, tag)
