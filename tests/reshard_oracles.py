"""Layouts written out by hand and a plan carried out in one process: what the planner and its transports are held against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_dapo.reshard.layout import Shard, TensorSpec, shard_view
from megatron_dapo.reshard.planner import ANYWHERE, ReshardPlan
from megatron_dapo.reshard.slices import flat_range_slices

Buffers = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class ExplicitLayout:
    """A layout written out: one tuple of shards a rank."""

    tensors: Mapping[str, TensorSpec]
    shards_of: tuple[tuple[Shard, ...], ...]

    @property
    def num_ranks(self) -> int:
        return len(self.shards_of)

    def shards(self, rank: int) -> tuple[Shard, ...]:
        return self.shards_of[rank]

    def buffer_names(self, rank: int) -> frozenset[str]:
        return frozenset(shard.local for shard in self.shards_of[rank])


def flat_range_shards(
    tensor: str, shape: tuple[int, ...], start: int, stop: int, local: str, local_start: int
) -> tuple[Shard, ...]:
    """Elements [start, stop) of the flattened tensor that lie at [local_start, ...) of the flat buffer `local`."""
    shards, position = [], local_start
    for bounds in flat_range_slices(shape, start, stop):
        shards.append(Shard(tensor, bounds.offset, bounds.shape, local, (position,)))
        position += bounds.volume
    return tuple(shards)


def execute_in_memory(plan: ReshardPlan, sources: Sequence[Buffers], destinations: Sequence[Buffers]) -> None:
    """Copy every transfer between buffers of one process, one mapping a rank."""
    for rank in range(plan.destination.num_ranks):
        for transfer in plan.receives(rank):
            source, destination = transfer.source_shard, transfer.destination_shard
            values = shard_view(sources[transfer.source][source.local], source, transfer.bounds)
            shard_view(destinations[rank][destination.local], destination, transfer.bounds).copy_(values)


def sent_bound(plan: ReshardPlan, rank: int) -> int:
    """Return the bytes that `rank` cannot exceed in sending: the sum over the sets of holders it is in of (bytes requested
    from the set / ranks in it + the largest overlap requested from it)."""
    bound = 0
    for node, groups in plan._keys_of(rank):
        balancer = plan.balancer((node, groups))
        classes = (
            plan._far_receivers[groups]
            if node == ANYWHERE
            else {plan.receiver(other) for other in plan._node(node, plan.destination)}
        )
        requests = (plan.requests(receiver)[node == ANYWHERE].get(groups) for receiver in classes)
        largest = max(max(request.sizes) for request in requests if request is not None)
        bound += -(-balancer.num_bytes // len(balancer.members)) + largest
    return bound
