"""Gradients of a layout's ranks against whole gradients by Hugging Face name; every replica and every padding row takes
part."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megatron_dapo.checkpoints.megatron_layout import MegatronLayout
from megatron_dapo.parallel.collectives import communication_device, sum_over
from megatron_dapo.reshard.layout import Shard, local_holes, shard_view
from megatron_dapo.reshard.slices import Slice


@dataclass(frozen=True)
class GradientDifference:
    """Largest over tensors of |ours - right| / |right|, 2-norms over all ranks' pieces, and the tensor it is of."""

    relative: float
    tensor: str


def global_part(whole: torch.Tensor, piece: Shard) -> torch.Tensor:
    """The part of the whole tensor that `piece` holds."""
    return whole[
        tuple(slice(start, start + size) for start, size in zip(piece.global_offset, piece.shape, strict=True))
    ]


def fill_from_whole(
    parameters: Mapping[str, torch.Tensor], layout: MegatronLayout, rank: int, whole: Mapping[str, torch.Tensor]
) -> None:
    """Set a rank's local parameters from whole tensors; padding becomes zero."""
    for parameter in parameters.values():
        parameter.zero_()
    for piece in layout.shards(rank):
        shard_view(parameters[piece.local], piece).copy_(global_part(whole[piece.tensor], piece))


def compare_gradients(
    gradients: Mapping[str, torch.Tensor], layout: MegatronLayout, rank: int, right: Mapping[str, torch.Tensor]
) -> GradientDifference:
    """Collective over the default group: all ranks call it with their local gradients. A gradient of padding that is
    not zero, or one that is not finite, makes the difference the largest float (JSON knows no infinity)."""
    names = list(right)
    sums = torch.zeros(2, len(names), dtype=torch.float64, device=communication_device())
    place = {name: index for index, name in enumerate(names)}
    for piece in layout.shards(rank):
        wanted = global_part(right[piece.tensor], piece).double()
        ours = shard_view(gradients[piece.local], piece).to(wanted.device, torch.float64)
        sums[0, place[piece.tensor]] += (ours - wanted).square().sum()
        sums[1, place[piece.tensor]] += wanted.square().sum()
    totals = sum_over({"sums": sums, "padding": _padding_sum(gradients, layout, rank)})
    error, norm = totals["sums"]
    relative = (error / norm.clamp(min=torch.finfo(torch.float64).tiny)).sqrt()
    if not torch.isfinite(relative).all() or totals["padding"] != 0:
        return GradientDifference(
            sys.float_info.max,
            "padding" if torch.isfinite(relative).all() else names[int((~torch.isfinite(relative)).int().argmax())],
        )
    worst = int(relative.argmax())
    return GradientDifference(float(relative[worst]), names[worst])


def _padding_sum(gradients: Mapping[str, torch.Tensor], layout: MegatronLayout, rank: int) -> float:
    """Sum of absolute gradients of everything that no piece covers."""
    shapes = {name: tuple(gradient.shape) for name, gradient in gradients.items()}
    holes = local_holes(layout.shards(rank), shapes)
    return sum(
        float(_region(gradients[name], box).abs().double().sum()) for name, boxes in holes.items() for box in boxes
    )


def _region(buffer: torch.Tensor, box: Slice) -> torch.Tensor:
    return buffer[tuple(slice(start, start + size) for start, size in zip(box.offset, box.shape, strict=True))]
