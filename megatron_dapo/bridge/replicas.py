"""Do all copies of a weight agree: norms on tensor ranks, a tied embedding on two stages, data-parallel replicas."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_dapo.parallel.reshard.checksum import box_checksum
from megatron_dapo.parallel.reshard.executors import Buffers
from megatron_dapo.parallel.reshard.layout import Layout, piece_view
from megatron_dapo.parallel.reshard.regions import HolderGroups, held_regions


def drifted_replicas(layout: Layout, parameters: Buffers, group: dist.ProcessGroup | None) -> list[str]:
    """Names of tensors of which two ranks hold different bits, sorted, the same on every rank of the group.

    A sync or an export takes one of several copies, so copies that drifted apart (a missing gradient all-reduce) would
    go unnoticed there. Every rank calls it; it costs one pass over the rank's weights and two small all-reduces.
    """
    if group is None:
        return []
    rank = dist.get_rank(group)
    groups = HolderGroups(layout)
    regions = held_regions(layout, groups)
    limits = torch.iinfo(torch.int64)
    device = next(iter(parameters.values())).device
    low = torch.full((len(regions),), limits.max, dtype=torch.int64, device=device)
    high = torch.full((len(regions),), limits.min, dtype=torch.int64, device=device)
    for index, (tensor, (box, holders)) in enumerate(regions):
        piece = holders.get(groups.group_of[rank])
        if piece is not None:
            values = piece_view(parameters[piece.local], piece, box)
            low[index] = high[index] = box_checksum(values, box, layout.tensors[tensor].shape)
    dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
    return sorted({regions[index][0] for index in (low != high).nonzero().flatten().tolist()})
