"""Placement of engines on nodes, and forwarding of chunks whose source is on another node than their engine.

Such chunks go to a relay rank on the engine's node, which writes them into the engine's slot: one message a round and
pair of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_dapo.bridge.protocol.messages import Bucket
from megatron_dapo.bridge.protocol.peer_group import PeerGroup, Pending
from megatron_dapo.bridge.sync_plan import ExpectedChecksums, SyncPlan, write_chunks
from megatron_dapo.bridge.transports.base import EngineHandles, SyncDeadline, SyncRequest
from megatron_dapo.parallel.nodes import NodeTopology
from megatron_dapo.reshard.execution import Buffers

# (engine rank, source on another node) -> memory for its bytes of a bucket, and their message
Incoming = dict[tuple[int, int], tuple[torch.Tensor, Pending]]


@dataclass(frozen=True)
class EngineNodes:
    """Nodes of the engines, as one trainer rank sees them. An engine lives on the node of its leader."""

    plan: SyncPlan
    handles: EngineHandles
    nodes: NodeTopology
    rank: int

    def node_of(self, engine: int) -> int:
        return self.nodes.node_of(self.handles.leaders[engine])

    def is_here(self, engine: int) -> bool:
        """Return True if an engine is on this rank's node."""
        return self.node_of(engine) == self.nodes.node_of(self.rank)

    def engines_here(self, request: SyncRequest) -> tuple[int, ...]:
        """Return the engines of a request that are on this rank's node."""
        return tuple(engine for engine in request.engines if self.is_here(engine))

    def away(self, request: SyncRequest) -> tuple[int, ...]:
        """Return the engine ranks of other nodes that this rank writes into, in order."""
        size, engines = self.plan.engines.tensor_parallel, set(request.engines)
        return tuple(
            rank
            for rank in self.plan.destinations(self.rank)
            if rank // size in engines and not self.is_here(rank // size)
        )

    def num_rounds(self, request: SyncRequest) -> int:
        """Return the number of buckets of the engine rank with the most, of those whose bytes this rank handles."""
        ranks = [rank for engine in self.engines_here(request) for rank in self.plan.ranks_of(engine)]
        return max((len(self.plan.buckets(rank)) for rank in [*ranks, *self.away(request)]), default=0)

    def engine_of(self, bucket: Bucket) -> int:
        return bucket.engine_rank // self.plan.engines.tensor_parallel

    def buckets(self, engines: Sequence[int], index: int) -> list[Bucket]:
        """Return bucket number `index` of every rank of these engines that has so many."""
        ranks = [rank for engine in engines for rank in self.plan.ranks_of(engine)]
        return [self.plan.buckets(rank)[index] for rank in ranks if index < len(self.plan.buckets(rank))]

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
        self._sending: list[Pending] = []

    def begin(self) -> None:
        """Forget messages that an earlier, failed sync had in flight."""
        self._sending.clear()

    def receive(self, request: SyncRequest, index: int) -> Incoming:
        """Start to receive what other nodes send through this rank in round `index`."""
        incoming: Incoming = {}
        if self._peers is None:
            return incoming
        for bucket, source in self._forwarded(request, index):
            if self._relay(bucket, source) == self._nodes.rank:
                start, stop = bucket.segments[source]
                data = torch.empty(stop - start, dtype=torch.uint8)
                incoming[bucket.engine_rank, source] = (data, self._peers.receive(data, source))
        return incoming

    def send(
        self, request: SyncRequest, index: int, sources: Buffers, expected: ExpectedChecksums, deadline: SyncDeadline
    ) -> None:
        """Start to send this rank's chunks for engines of other nodes, once those of the last round have left."""
        if self._peers is None:
            return
        self.wait(deadline)
        plan, rank = self._nodes.plan, self._nodes.rank
        for engine_rank in self._nodes.away(request):
            buckets = plan.buckets(engine_rank)
            if index < len(buckets) and rank in (bucket := buckets[index]).segments:
                start, stop = bucket.segments[rank]
                data = torch.zeros(stop - start, dtype=torch.uint8)
                write_chunks(plan, bucket, rank, sources, data, expected, origin=start)
                self._sending.append(self._peers.send(data, self._relay(bucket, rank)))

    def wait(self, deadline: SyncDeadline) -> None:
        """Wait until everything sent has left."""
        for message in self._sending:
            message.wait(deadline.at)
        self._sending.clear()

    def _forwarded(self, request: SyncRequest, index: int) -> list[tuple[Bucket, int]]:
        """(bucket of an engine of this node, source on another node) pairs of round `index`, in the senders' order."""
        nodes = self._nodes
        node, here = nodes.nodes.node_of(nodes.rank), nodes.engines_here(request)
        return [
            (bucket, source)
            for bucket in nodes.buckets(here, index)
            for source in bucket.segments
            if nodes.nodes.node_of(source) != node
        ]

    def _relay(self, bucket: Bucket, source: int) -> int:
        """Rank of the engine's node that receives a source's bytes; sources are spread over the node's ranks."""
        nodes = self._nodes
        ranks = nodes.nodes.ranks_of(nodes.node_of(nodes.engine_of(bucket)))
        return ranks[(source + bucket.engine_rank) % len(ranks)]


def arrivals(bucket: Bucket, incoming: Incoming) -> list[tuple[int, int]]:
    """Return the keys of what comes for a bucket through this rank."""
    return [key for source in bucket.segments if (key := (bucket.engine_rank, source)) in incoming]
