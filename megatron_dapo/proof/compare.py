"""Gradients of a layout's ranks against whole gradients by Hugging Face name, replicas and padding rows included."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megatron_dapo.checkpoints.megatron_layout import MegatronLayout
from megatron_dapo.parallel.collectives import communication_device, sum_over
from megatron_dapo.reshard.layout import local_holes, shard_view, slice_view


@dataclass(frozen=True)
class GradientDifference:
    """Largest |ours - expected| / |expected| over tensors (2-norms over the shards of all ranks), and its tensor."""

    relative: float
    tensor: str


def fill_from_whole(
    parameters: Mapping[str, torch.Tensor], layout: MegatronLayout, rank: int, whole: Mapping[str, torch.Tensor]
) -> None:
    """Set a rank's local parameters from whole tensors; padding becomes zero."""
    # First everything to zero: shards leave padding out.
    for parameter in parameters.values():
        parameter.zero_()
    for shard in layout.shards(rank):
        shard_view(parameters[shard.local], shard).copy_(slice_view(whole[shard.tensor], shard.bounds))


def compare_gradients(
    gradients: Mapping[str, torch.Tensor], layout: MegatronLayout, rank: int, expected: Mapping[str, torch.Tensor]
) -> GradientDifference:
    """Compare the local gradients of all ranks; collective over the default group.

    A gradient of padding that is not zero, or one that is not finite, makes the difference the largest float.
    """
    names = list(expected)
    sums = torch.zeros(2, len(names), dtype=torch.float64, device=communication_device())
    index = {name: number for number, name in enumerate(names)}
    for shard in layout.shards(rank):
        wanted = slice_view(expected[shard.tensor], shard.bounds).double()
        ours = shard_view(gradients[shard.local], shard).to(wanted.device, torch.float64)
        # Every replica adds to both sums, so one deviating replica changes the result.
        sums[0, index[shard.tensor]] += (ours - wanted).square().sum()
        sums[1, index[shard.tensor]] += wanted.square().sum()
    totals = sum_over({"sums": sums, "padding": _padding_sum(gradients, layout, rank)})
    error, norm = totals["sums"]
    relative = (error / norm.clamp(min=torch.finfo(torch.float64).tiny)).sqrt()
    broken = ~torch.isfinite(relative)
    # The largest float, because JSON has no infinity.
    if broken.any():
        return GradientDifference(sys.float_info.max, names[int(broken.int().argmax())])
    if totals["padding"] != 0:
        return GradientDifference(sys.float_info.max, "padding")
    worst = int(relative.argmax())
    return GradientDifference(float(relative[worst]), names[worst])


def _padding_sum(gradients: Mapping[str, torch.Tensor], layout: MegatronLayout, rank: int) -> float:
    """Return the sum of absolute gradients of everything that no shard covers."""
    shapes = {name: tuple(gradient.shape) for name, gradient in gradients.items()}
    holes = local_holes(layout.shards(rank), shapes)
    return sum(
        float(slice_view(gradients[name], hole).abs().double().sum()) for name, found in holes.items() for hole in found
    )
