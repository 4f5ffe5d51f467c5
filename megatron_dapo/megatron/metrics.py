"""Sums of named scalars over micro-batches and ranks, told to every pipeline stage."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from megatron_dapo.megatron.parallel_state import Groups


def sum_metrics(parts: Sequence[Mapping[str, torch.Tensor]], groups: Groups) -> dict[str, float]:
    """Sum the micro-batches' scalars over data x context ranks of the last pipeline stage; all stages get the sums.

    `parts` is empty off the last stage. All data and context ranks must name the same metrics.
    """
    names = sorted(parts[0]) if parts else []
    device = torch.cuda.current_device()
    totals = torch.zeros(len(names), dtype=torch.float64, device=device)
    for part in parts:
        assert sorted(part) == names, f"micro-batches disagree on metrics: {sorted(part)} and {names}"
        for place, name in enumerate(names):
            totals[place] += part[name].detach()
    if groups.pipeline.rank() == groups.pipeline.size() - 1:
        dist.all_reduce(totals, group=groups.data_context)
    if groups.pipeline.size() > 1:
        names, totals = _broadcast(names, totals, groups.pipeline)
    return dict(zip(names, totals.tolist(), strict=True))


def _broadcast(names: list[str], totals: torch.Tensor, group: dist.ProcessGroup) -> tuple[list[str], torch.Tensor]:
    """Names (as JSON) and totals from the last rank of `group` to the others."""
    source = dist.get_global_rank(group, group.size() - 1)
    text = torch.frombuffer(bytearray(json.dumps(names).encode()), dtype=torch.uint8).to(totals.device)
    sizes = torch.tensor([text.numel(), totals.numel()], device=totals.device)
    dist.broadcast(sizes, src=source, group=group)
    if group.rank() != group.size() - 1:
        text, totals = text.new_empty(int(sizes[0])), totals.new_empty(int(sizes[1]))
    dist.broadcast(text, src=source, group=group)
    dist.broadcast(totals, src=source, group=group)
    return json.loads(bytes(text.tolist())), totals
