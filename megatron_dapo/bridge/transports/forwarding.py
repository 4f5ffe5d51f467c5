"""Placement of engines on nodes, and forwarding of chunks whose source is on another node than their engine.

Such chunks go to a relay rank on the engine's node, once for all engines of the node that are alike: the relay writes
them into the slot of each. There is one message a round and pair of ranks. Rounds overlap: the messages of the next
ones are under way while a bucket is written. Later rounds and syncs use their memory again: the system clears fresh pages,
which takes longer than to fill them, and a GPU copies directly only from pages that are locked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from megatron_dapo.bridge.protocol.messages import Bucket
from megatron_dapo.bridge.protocol.p2p_stream import Staging
from megatron_dapo.bridge.protocol.peer_group import PeerGroup, Pending
from megatron_dapo.bridge.sync_plan import ExpectedChecksums, SyncPlan, write_chunks
from megatron_dapo.bridge.transports.base import EngineHandles, ServerControl, SyncDeadline, SyncRequest
from megatron_dapo.parallel.nodes import NodeTopology
from megatron_dapo.reshard.execution import Buffers

# (first engine rank of those alike, source on another node) -> memory for its bytes of a bucket, and their message
Incoming = dict[tuple[int, int], tuple[torch.Tensor, Pending]]

_ROUNDS_AHEAD = 2  # rounds with messages under way at either end; each holds its bytes a second time


class _Message(NamedTuple):
    block: torch.Tensor  # uint8, memory of its bytes
    pending: Pending


@dataclass(frozen=True)
class EngineNodes:
    """Nodes of the engines, as one trainer rank sees them. An engine lives on the node of its leader."""

    plan: SyncPlan
    handles: EngineHandles[ServerControl]
    nodes: NodeTopology
    rank: int

    def node_of(self, engine: int) -> int:
        return self.nodes.node_of(self.handles.leaders[engine])

    def is_here(self, engine: int) -> bool:
        """Return True if an engine is on this rank's node."""
        return self.node_of(engine) == self.nodes.node_of(self.rank)

    def engines_here(self, request: SyncRequest) -> tuple[int, ...]:
        """Return the engines of a request that are on this rank's node."""
        here = self._here
        return tuple(engine for engine in request.engines if engine in here)

    @cached_property
    def _here(self) -> frozenset[int]:
        return frozenset(engine for engine in range(self.plan.num_engines) if self.is_here(engine))

    def sets_here(self, engines: Sequence[int]) -> list[list[int]]:
        """Return the ranks of these engines of this node, those alike together, in order."""
        return self._sets(rank for engine in engines for rank in self.plan.ranks_of(engine))

    def sets_away(self, request: SyncRequest) -> list[list[int]]:
        """Return the engine ranks of other nodes that this rank writes into, those alike together, in order."""
        size, engines = self.plan.engines.tensor_parallel, set(request.engines) - self._here
        return self._sets(rank for rank in self.plan.destinations(self.rank) if rank // size in engines)

    def _sets(self, engine_ranks: Iterable[int]) -> list[list[int]]:
        found: dict[int, list[int]] = {}
        for rank in engine_ranks:
            found.setdefault(self.plan.alike(rank)[0], []).append(rank)
        return [found[first] for first in sorted(found)]

    def engine_of(self, bucket: Bucket) -> int:
        return bucket.engine_rank // self.plan.engines.tensor_parallel

    def beside(self, engine_rank: int) -> int:
        """Return the trainer rank whose device an engine rank shares: engines fill the devices of their node in order."""
        size = self.plan.engines.tensor_parallel
        engine, number = divmod(engine_rank, size)
        node = self.node_of(engine)
        before = sum(self.node_of(other) == node for other in range(engine))
        ranks = self.nodes.ranks_of(node)
        return ranks[(before * size + number) % len(ranks)]


class Forwarding:
    """This rank's messages to and from other nodes; `peers`: all trainer ranks, None if there is one node.

    A rank goes through all rounds of what it handles, also for engines that failed: the other nodes do not know of the
    failure. Between two ranks messages leave and arrive in the order of rounds, and within one of engine ranks.
    """

    def __init__(self, nodes: EngineNodes, peers: PeerGroup | None) -> None:
        self._nodes = nodes
        self._peers = peers
        self._memory = Staging(torch.device("cpu"), 0)
        self._handed_out: list[_Message] = []  # messages of the round that is being written
        self.begin(SyncRequest("", "", 0, ()))

    def begin(self, request: SyncRequest) -> None:
        """Arrange the rounds of a sync; forget messages that an earlier, failed one had in flight, and their memory."""
        self._coming: list[list[tuple[Bucket, int]]] = []  # round -> (bucket, source on another node)
        self._leaving: list[list[tuple[Bucket, list[int]]]] = []  # round -> (bucket, engine ranks that get it)
        self._arriving: deque[tuple[Incoming, list[_Message]]] = deque()  # messages of the next rounds
        self._next = 0  # round to be received
        self._sending: deque[list[_Message]] = deque()
        nodes = self._nodes
        self.num_rounds = 0
        node = nodes.nodes.node_of(nodes.rank)
        for ranks in nodes.sets_here(nodes.engines_here(request)):
            buckets = nodes.plan.buckets(ranks[0])
            self._arrange(self._coming, len(buckets))
            for bucket in buckets if self._peers is not None else ():
                far = (source for source in bucket.segments if nodes.nodes.node_of(source) != node)
                coming = [(bucket, source) for source in far if self._relay(bucket, source) == nodes.rank]
                self._coming[bucket.index] += coming
        for ranks in nodes.sets_away(request):
            buckets = nodes.plan.buckets(ranks[0])
            self._arrange(self._leaving, len(buckets))
            for bucket in buckets:
                if nodes.rank in bucket.segments:
                    self._leaving[bucket.index].append((bucket, ranks))
        self.num_rounds = max(len(self._coming), len(self._leaving))
        self._arrange_memory()

    def _arrange_memory(self) -> None:
        """Keep the memory of the last sync if it is enough and no message can still write into it."""
        self._give_back(self._handed_out)
        self._handed_out = []
        coming = (sum(_size(bucket, source) for bucket, source in found) for found in self._coming)
        leaving = (sum(_size(bucket, self._nodes.rank) for bucket, _ in found) for found in self._leaving)
        # Under way are those of the rounds ahead and of this one; one more round is being written.
        budget = (_ROUNDS_AHEAD + 2) * (max(coming, default=0) + max(leaving, default=0))
        if budget > self._memory.budget or (self._peers is not None and self._peers.in_flight):
            self._memory = Staging(torch.device("cpu"), budget, pinned=torch.cuda.is_initialized())

    def _arrange(self, rounds: list, count: int) -> None:
        rounds += [[] for _ in range(count - len(rounds))]

    def receive(self) -> Incoming:
        """Return what other nodes send through this rank in the next round, on its way."""
        self._give_back(self._handed_out)
        while len(self._arriving) <= _ROUNDS_AHEAD:
            self._arriving.append(self._start_receiving())
        incoming, self._handed_out = self._arriving.popleft()
        return incoming

    def _start_receiving(self) -> tuple[Incoming, list[_Message]]:
        incoming: Incoming = {}
        messages: list[_Message] = []
        index, self._next = self._next, self._next + 1
        for bucket, source in self._coming[index] if index < len(self._coming) else ():
            assert self._peers is not None, "nothing comes without other nodes"
            block = self._memory.take(_size(bucket, source))
            data = block[: _size(bucket, source)]
            messages.append(_Message(block, self._peers.receive(data, source)))
            first = self._nodes.plan.alike(bucket.engine_rank)[0]
            incoming[first, source] = (data, messages[-1].pending)
        return incoming, messages

    def send(self, index: int, sources: Buffers, expected: ExpectedChecksums, deadline: SyncDeadline) -> None:
        """Start to send this rank's chunks for engines of other nodes, once those of earlier rounds have left."""
        while len(self._sending) >= _ROUNDS_AHEAD:
            self._wait_for_oldest(deadline)
        plan, rank = self._nodes.plan, self._nodes.rank
        messages: list[_Message] = []
        for bucket, engine_ranks in self._leaving[index] if index < len(self._leaving) else ():
            assert self._peers is not None, "nothing leaves without other nodes"
            block = self._memory.take(_size(bucket, rank))
            data, start = block[: _size(bucket, rank)], bucket.segments[rank][0]
            write_chunks(plan, bucket, rank, sources, data, expected, origin=start, engine_ranks=engine_ranks)
            messages.append(_Message(block, self._peers.send(data, self._relay(bucket, rank))))
        self._sending.append(messages)

    def wait(self, deadline: SyncDeadline) -> None:
        """Wait until everything sent has left."""
        while self._sending:
            self._wait_for_oldest(deadline)

    def _wait_for_oldest(self, deadline: SyncDeadline) -> None:
        messages = self._sending.popleft()
        for message in messages:
            message.pending.wait(deadline.at)
        self._give_back(messages)

    def _give_back(self, messages: Iterable[_Message]) -> None:
        """Let other messages use the memory of those that have left or arrived. A failed one may still be under way."""
        for message in messages:
            if self._peers is not None and message.pending not in self._peers.in_flight:
                self._memory.give_back(message.block)

    def _relay(self, bucket: Bucket, source: int) -> int:
        """Rank of the engine's node that receives a source's bytes; sources are spread over the node's ranks."""
        nodes = self._nodes
        ranks = nodes.nodes.ranks_of(nodes.node_of(nodes.engine_of(bucket)))
        return ranks[(source + nodes.plan.alike(bucket.engine_rank)[0]) % len(ranks)]


def _size(bucket: Bucket, source: int) -> int:
    """Return the bytes that a source writes into a bucket."""
    start, stop = bucket.segments[source]
    return stop - start


def arrivals(bucket: Bucket, first: int, incoming: Incoming) -> list[tuple[int, int]]:
    """Return the keys of what comes for a bucket of the engine ranks like `first` through this rank."""
    return [key for source in bucket.segments if (key := (first, source)) in incoming]
