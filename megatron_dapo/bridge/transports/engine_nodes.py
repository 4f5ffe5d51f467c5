"""Which engines live on which machine, and which trainer ranks are near them, as one rank sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_dapo.bridge.sync_plan import PlannedBucket, SyncPlan
from megatron_dapo.bridge.transports.base import EngineHandles, SyncRequest
from megatron_dapo.parallel.nodes import NodeTopology


@dataclass(frozen=True)
class EngineNodes:
    """An engine lives on the machine of its leader."""

    plan: SyncPlan
    handles: EngineHandles
    nodes: NodeTopology
    rank: int

    def node_of(self, engine: int) -> int:
        return self.nodes.node_of(self.handles.leaders[engine])

    def is_here(self, engine: int) -> bool:
        """Whether an engine is on this rank's machine."""
        return self.node_of(engine) == self.nodes.node_of(self.rank)

    def engines_here(self, order: SyncRequest) -> tuple[int, ...]:
        """Those of an order that are on this rank's machine."""
        return tuple(engine for engine in order.engines if self.is_here(engine))

    def engine_of(self, bucket: PlannedBucket) -> int:
        return bucket.engine_rank // self.plan.engines.tensor_parallel

    def buckets(self, engines: Sequence[int], index: int) -> list[PlannedBucket]:
        """Bucket number `index` of every rank of these engines that has so many."""
        ranks = [rank for engine in engines for rank in self.plan.ranks_of(engine)]
        return [self.plan.buckets(rank)[index] for rank in ranks if index < len(self.plan.buckets(rank))]

    def beside(self, engine_rank: int) -> int:
        """The trainer rank whose device an engine rank shares: engines lie on the devices of their machine one behind the
        other."""
        size = self.plan.engines.tensor_parallel
        engine, number = divmod(engine_rank, size)
        node = self.node_of(engine)
        before = sum(self.node_of(other) == node for other in range(engine))
        ranks = self.nodes.ranks_of(node)
        return ranks[(before * size + number) % len(ranks)]
