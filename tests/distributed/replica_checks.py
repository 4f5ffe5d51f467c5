"""Compare all copies of a weight: norms on tensor-parallel ranks, a tied embedding on two stages, data-parallel replicas."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_dapo.reshard.checksum import slice_checksum
from megatron_dapo.reshard.execution import Buffers
from megatron_dapo.reshard.layout import Layout, shard_view
from megatron_dapo.reshard.regions import ReplicaGroups, partition


def drifted_replicas(layout: Layout, parameters: Buffers, group: dist.ProcessGroup | None) -> list[str]:
    """Return the sorted names of tensors of which two ranks hold different bits; the same on every rank of the group.

    A weight sync or an export reads one of several copies, so a missing gradient all-reduce would go unnoticed there.
    """
    if group is None:
        return []
    rank = dist.get_rank(group)
    groups = ReplicaGroups(layout)
    held = groups.by_tensor()
    regions = [(tensor, region) for tensor in layout.tensors for region in partition(held.get(tensor, ()))]
    limits = torch.iinfo(torch.int64)
    low = torch.full((len(regions),), limits.max, dtype=torch.int64)
    high = torch.full((len(regions),), limits.min, dtype=torch.int64)
    for index, (tensor, (bounds, holders)) in enumerate(regions):
        shard = holders.get(groups.group_of[rank])
        if shard is not None:
            values = shard_view(parameters[shard.local], shard, bounds)
            low[index] = high[index] = slice_checksum(values, bounds, layout.tensors[tensor].shape)
    dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
    return sorted({regions[index][0] for index in (low != high).nonzero().flatten().tolist()})
