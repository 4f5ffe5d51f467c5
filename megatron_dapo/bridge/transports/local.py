"""Transport to engines embedded in the trainer's processes: every rank holds shards of the actor and one whole model.

Engine r lives in trainer rank r and is written in place, by the executor of reshard plans.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron_dapo.bridge.protocol.messages import Command
from megatron_dapo.bridge.protocol.receiver import Channel, Receiver
from megatron_dapo.bridge.sync_plan import DEFAULT_BUCKET_BYTES, ExpectedChecksums, SyncPlan
from megatron_dapo.bridge.transports.base import (
    EngineHandles,
    SyncDeadline,
    SyncRequest,
    TransferResult,
)
from megatron_dapo.bridge.weight_sync import WeightSync
from megatron_dapo.parallel.coordination import Coordination
from megatron_dapo.reshard.execution import Buffers, execute_distributed
from megatron_dapo.reshard.layout import Layout, ReplicatedLayout, TensorSpec
from megatron_dapo.reshard.planner import plan

if TYPE_CHECKING:
    from megatron_dapo.bridge.sources import WeightSource
    from megatron_dapo.engines.distributed_embedded import DistributedEmbeddedEngine


class ReplicaLayout(ReplicatedLayout):
    """`EngineLayout` of embedded engines: each rank is one engine with every tensor whole."""

    tensor_parallel = 1

    def local_specs(self, rank: int) -> Mapping[str, TensorSpec]:
        """Shape and element type of every tensor; the same on all ranks."""
        return self.tensors


class EmbeddedControl:
    """`EngineControl` of the engine in this process, which generates nothing while a weight sync runs."""

    def __init__(self, engine: DistributedEmbeddedEngine) -> None:
        self._engine = engine

    def pause(self) -> None: ...

    def flush_cache(self) -> None: ...

    def begin_weight_update(self) -> None: ...

    def end_weight_update(self) -> None: ...

    def update_weight_version(self, version: int) -> None:
        self._engine.set_policy_version(version)

    def resume(self) -> None: ...


class LocalTransport:
    """`Transport` within one process group (None: one process). Rank r of the plan's engines is rank r of the group."""

    def __init__(self, plan: SyncPlan, parameters: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None) -> None:
        self.plan = plan
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self._parameters = parameters
        self._receiver = Receiver(parameters)

    def begin(self, request: SyncRequest, deadline: SyncDeadline) -> None:
        """Prepare the result: there is nothing to connect."""
        self._request = request
        self._result = TransferResult(ExpectedChecksums(self.plan))

    def send(self, sources: Buffers) -> None:
        """Reshard the actor's parameters into the engines' and count what this rank has sent."""
        expected = self.plan.reshard.source.buffer_names(self.rank)
        if expected != sources.keys():
            raise ValueError(
                f"weight sync: the source has {len(sources)} tensors, its layout {len(expected)}; only one of them has "
                f"{sorted(expected ^ sources.keys())[:5]}"
            )
        with torch.no_grad():
            execute_distributed(
                self.plan.reshard, sources, self._parameters, self.group, bucket_bytes=self.plan.bucket_bytes
            )
            # From the sources, not from what arrived: an error on the way must differ from the engine's own checksum.
            for engine_rank in self.plan.destinations(self.rank):
                self._result.expected.add_plan(engine_rank, self.rank, sources)

    def finish(self) -> TransferResult:
        """Read the checksums back from the engine's parameters."""
        request, result = self._request, self._result
        manifest = request.manifest(self.plan, self.rank)
        reply = self._receiver.handle(Command(request.sync_id, "adopt", request.sync_id, manifest), Channel())
        if not reply.ok:
            result.fail(self.rank, f"{reply.op}: {reply.message}")
        result.replies[self.rank] = (reply,)
        result.num_bytes[self.rank] = sum(parameter.nbytes for parameter in self._parameters.values())
        return result

    def close(self) -> None:
        """Do nothing: no memory or connection outlives a sync."""


def local_weight_sync(
    source: Layout,
    engine: DistributedEmbeddedEngine,
    group: dist.ProcessGroup | None,
    coordination: Coordination | None = None,
    *,
    weights: WeightSource | None = None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> WeightSync:
    """Return the weight sync into engines embedded in the trainer's processes, one in each rank of `group`.

    Args:
        source: layout of the actor's parameters over the ranks of `group`.
        group: carries the bytes; None for one process. coordination: the same ranks; None: over `group`, which is gloo then.
        engine: of this process. Its parameters have Hugging Face names, without aliases: a tied lm_head is the embedding.
    """
    parameters = engine.parameters_by_name()
    different = sorted(source.tensors.keys() ^ parameters.keys())
    if different:
        raise ValueError(
            f"weight sync: the actor has {len(source.tensors)} tensors, the embedded engine {len(parameters)}; only one of "
            f"them has {different[:5]}"
        )
    specs = {name: TensorSpec(spec.shape, parameters[name].dtype) for name, spec in source.tensors.items()}
    engines = ReplicaLayout(specs, source.num_ranks)
    sync_plan = SyncPlan(plan(source, engines), engines, bucket_bytes)
    coordination = coordination or Coordination(group)
    handles = EngineHandles(range(source.num_ranks), {coordination.rank: EmbeddedControl(engine)})
    transport = LocalTransport(sync_plan, parameters, group)
    return WeightSync(sync_plan, handles, transport, coordination, weights=weights)
