"""Parts of a delivery whose source is on another machine than the engine: they go to a deputy there first, which writes
them into the engine's slot. One message a round and pair of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_dapo.bridge.protocol.peer_group import PeerGroup, Pending
from megatron_dapo.bridge.sync_plan import ExpectedChecksums, PlannedBucket, write_chunks
from megatron_dapo.bridge.transports.base import SyncDeadline, SyncRequest
from megatron_dapo.bridge.transports.engine_nodes import EngineNodes
from megatron_dapo.reshard.execution import Buffers

# (engine rank, source on another machine) -> where its bytes of a bucket go, and their message
Incoming = dict[tuple[int, int], tuple[torch.Tensor, Pending]]


class Forwarding:
    """This rank's messages to and from other machines; `peers`: all trainer ranks, None where there is one machine.

    Every rank goes through the same rounds, also for engines that failed: the others do not know of it.
    """

    def __init__(self, places: EngineNodes, peers: PeerGroup | None) -> None:
        self._places = places
        self._peers = peers
        self._sending: list[Pending] = []

    def begin(self) -> None:
        """A delivery: what an earlier one that failed had under way is nobody's business any more."""
        self._sending.clear()

    def receive(self, order: SyncRequest, index: int) -> Incoming:
        """Starts to receive what other machines send through this rank in round `index`."""
        incoming: Incoming = {}
        if self._peers is None:
            return incoming
        for bucket, source in self._forwarded(self._places.engines_here(order), index):
            if self._deputy(bucket, source) == self._places.rank:
                segment = bucket.segments[source]
                data = torch.empty(segment.stop - segment.start, dtype=torch.uint8)
                incoming[bucket.engine_rank, source] = (data, self._peers.receive(data, source))
        return incoming

    def send(
        self, order: SyncRequest, index: int, sources: Buffers, expected: ExpectedChecksums, deadline: SyncDeadline
    ) -> None:
        """Starts to send this rank's parts for engines of other machines; those of the round before have left."""
        if self._peers is None:
            return
        self.wait(deadline)
        away = [engine for engine in order.engines if not self._places.is_here(engine)]
        for bucket, source in self._forwarded(away, index):
            if source == self._places.rank:
                message = self._message(bucket, sources, expected)
                self._sending.append(self._peers.send(message, self._deputy(bucket, source)))

    def wait(self, deadline: SyncDeadline) -> None:
        """Until all that was sent has left."""
        for message in self._sending:
            message.wait(deadline.at)
        self._sending.clear()

    def _message(self, bucket: PlannedBucket, sources: Buffers, expected: ExpectedChecksums) -> torch.Tensor:
        """What this rank contributes to a bucket."""
        segment = bucket.segments[self._places.rank]
        data = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
        specs = self._places.plan.engines.local_specs(bucket.engine_rank)
        write_chunks(bucket, self._places.rank, sources, data, specs, expected)
        return data[segment.start : segment.stop].clone()

    def _forwarded(self, engines: Sequence[int], index: int) -> list[tuple[PlannedBucket, int]]:
        """(bucket, source) pairs of round `index` whose source is not on the engine's machine, in one order for all."""
        places, pairs = self._places, []
        for bucket in places.buckets(engines, index):
            node = places.node_of(places.engine_of(bucket))
            pairs += [(bucket, source) for source in bucket.segments if places.nodes.node_of(source) != node]
        return pairs

    def _deputy(self, bucket: PlannedBucket, source: int) -> int:
        """The rank of the engine's machine that takes a source's bytes in; sources are spread over its ranks."""
        places = self._places
        ranks = places.nodes.ranks_of(places.node_of(places.engine_of(bucket)))
        return ranks[(source + bucket.engine_rank) % len(ranks)]


def arrivals(bucket: PlannedBucket, incoming: Incoming) -> list[tuple[int, int]]:
    """The keys of what comes for a bucket through this rank."""
    return [key for source in bucket.segments if (key := (bucket.engine_rank, source)) in incoming]
