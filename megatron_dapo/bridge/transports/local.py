"""Transport to engines embedded in the trainer's processes: every rank holds shards of the actor and one whole model.

Engine r lives in trainer rank r. Chunks travel by torch.distributed point-to-point, all ranks in the same round: in round
k every rank receives bucket k of its own engine and sends its segments of bucket k of all others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron_dapo.bridge.protocol.messages import Bucket, Command, Reply
from megatron_dapo.bridge.protocol.receiver import Channel, Receiver
from megatron_dapo.bridge.sync_plan import DEFAULT_BUCKET_BYTES, ExpectedChecksums, SyncPlan, write_chunks
from megatron_dapo.bridge.transports.base import (
    Coordinator,
    EngineHandles,
    GroupCoordinator,
    SyncDeadline,
    SyncRequest,
    TransferResult,
)
from megatron_dapo.bridge.weight_sync import WeightSync
from megatron_dapo.reshard.execution import Buffers
from megatron_dapo.reshard.layout import Layout, ReplicatedLayout, TensorSpec
from megatron_dapo.reshard.planner import plan

if TYPE_CHECKING:
    from megatron_dapo.bridge.sources import WeightSource
    from megatron_dapo.engines.distributed_embedded import DistributedEmbeddedEngine


class ReplicaLayout(ReplicatedLayout):
    """`EngineLayout` of embedded engines: each rank is an engine of its own with every tensor whole."""

    tensor_parallel = 1

    def local_specs(self, rank: int) -> Mapping[str, TensorSpec]:
        """Shape and element type of every tensor; the same on all ranks."""
        return self.tensors


class EmbeddedControl:
    """`EngineControl` of the engine in this process, which generates nothing while a weight sync runs."""

    def __init__(self, engine: DistributedEmbeddedEngine) -> None:
        self._engine = engine

    def pause(self, mode: str) -> None: ...

    def flush_cache(self) -> None: ...

    def begin_weight_update(self) -> None: ...

    def update_weights_from_tensor(self, payloads, load_format=None, *, flush_cache: bool = False) -> None:
        raise NotImplementedError("an embedded engine is written in place")

    def update_weights_from_disk(self, directory: str, *, flush_cache: bool = True) -> None:
        raise NotImplementedError("an embedded engine is written in place")

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
        self._receiver = Receiver(parameters)
        self._device = next(iter(parameters.values())).device

    def begin(self, request: SyncRequest, deadline: SyncDeadline) -> None:
        """Open the sync in this process's engine."""
        self._request = request
        self._result = TransferResult(ExpectedChecksums(self.plan))
        self._num_bytes = 0
        manifest = self.plan.manifest(self.rank, request.sync_id, request.session, request.version, request.number)
        self._handle(Command(request.sync_id, "begin", request.sync_id, manifest), Channel())

    def send(self, sources: Buffers) -> None:
        """Exchange all buckets, round after round."""
        expected = self.plan.reshard.source.buffer_names(self.rank)
        if expected != sources.keys():
            raise ValueError(
                f"weight sync: the source has {len(sources)} tensors, its layout {len(expected)}; only one of them has "
                f"{sorted(expected ^ sources.keys())[:5]}"
            )
        with torch.no_grad():
            for index in range(max(self.plan.num_buckets(engine) for engine in range(self.plan.num_engines))):
                self._round(index, sources)

    def finish(self) -> TransferResult:
        """Close the sync: check coverage and read the checksums back."""
        result, sync_id = self._result, self._request.sync_id
        reply = self._handle(Command(sync_id, "finish", sync_id), Channel())
        result.replies[self.rank], result.num_bytes[self.rank] = (reply,), self._num_bytes
        return result

    def close(self) -> None:
        """Do nothing: no memory or connection outlives a sync."""

    def _round(self, index: int, sources: Buffers) -> None:
        operations: list[dist.P2POp] = []
        own = self._bucket(self.rank, index)
        if own is not None:
            data = torch.empty(own.num_bytes, dtype=torch.uint8, device=self._device)
            for source, (start, stop) in own.segments.items():
                if source != self.rank:
                    operations.append(self._operation(dist.irecv, data[start:stop], source))
        for other in range(self.plan.num_engines):
            bucket = self._bucket(other, index)
            if other == self.rank or bucket is None or self.rank not in bucket.segments:
                continue
            start, stop = bucket.segments[self.rank]
            message = torch.zeros(stop - start, dtype=torch.uint8, device=self._device)
            write_chunks(self.plan, bucket, self.rank, sources, message, self._result.expected, origin=start)
            operations.append(self._operation(dist.isend, message, other))
        # One batch a round: under NCCL separate sends and receives between two ranks would wait for each other.
        pending = dist.batch_isend_irecv(operations) if operations else []
        if own is not None:
            write_chunks(self.plan, own, self.rank, sources, data, self._result.expected)
        for work in pending:
            work.wait()
        if own is not None:
            command = Command(self._request.sync_id, "bucket", self._request.sync_id, bucket=own)
            self._num_bytes += self._handle(command, _InMemory(data)).num_bytes

    def _bucket(self, engine_rank: int, index: int) -> Bucket | None:
        buckets = self.plan.buckets(engine_rank)
        return buckets[index] if index < len(buckets) else None

    def _operation(self, function: Callable, tensor: torch.Tensor, rank: int) -> dist.P2POp:
        return dist.P2POp(function, tensor, dist.get_global_rank(self.group, rank), self.group)

    def _handle(self, command: Command, channel: Channel) -> Reply:
        """Carry a command out in this process's engine. A failure is this engine's; the exchange continues."""
        reply = self._receiver.handle(command, channel)
        if not reply.ok:
            self._result.fail(self.rank, f"{reply.op}: {reply.message}")
        return reply


class _InMemory(Channel):
    def __init__(self, data: torch.Tensor) -> None:
        self._data = data

    def data(self, bucket: Bucket) -> torch.Tensor:
        return self._data


def local_weight_sync(
    source: Layout,
    engine: DistributedEmbeddedEngine,
    group: dist.ProcessGroup | None,
    coordinator: Coordinator | None = None,
    *,
    weights: WeightSource | None = None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> WeightSync:
    """Return the weight sync into engines embedded in the trainer's processes, one in each rank of `group`.

    Args:
        source: layout of the actor's parameters over the ranks of `group`.
        group: carries the bytes. coordinator: the same ranks; over `group` if None.
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
    coordinator = coordinator or GroupCoordinator(group)
    handles = EngineHandles(range(source.num_ranks), {coordinator.rank: EmbeddedControl(engine)})
    transport = LocalTransport(sync_plan, parameters, group)
    return WeightSync(sync_plan, handles, transport, coordinator, weights=weights)
