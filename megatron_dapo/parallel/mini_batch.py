"""Mini-batches of a rollout batch, one optimizer step each, and their micro-batches.

A mini-batch's loss weights are computed from all its samples on all ranks before it is cut into micro-batches, so that
no later cut can change the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.parallel.packing import MicroBatchLimits, pack, plan_micro_batches
from megatron_dapo.types import MicroBatch, TrainSample

SPLITS = ("groups", "samples")

Packing = Callable[[Sequence[TrainSample], Sequence[float], ParallelLayout], MicroBatch]


def split_mini_batches(
    group_indices: Sequence[int], size: int, *, split: str = "groups", seed: int | None = None
) -> list[list[int]]:
    """Return the sample indices of each mini-batch; every sample is in exactly one.

    group_indices: the group of each sample of the rollout batch. size: maximum size of a mini-batch in the units of
    `split`: "groups" keeps groups whole, "samples" lets them straddle. seed: seed of the shuffle; None keeps the order
    of the rollout batch.
    """
    if split not in SPLITS:
        raise ValueError(f"mini-batch split {split!r} does not exist; there are: {', '.join(SPLITS)}")
    if size < 1:
        raise ValueError(f"mini-batch: {size} {split} a mini-batch, must be at least 1")
    units: dict[int, list[int]] = {}  # samples that stay together
    for sample, group in enumerate(group_indices):
        # A group may straddle, because its advantages were already computed on the whole group.
        units.setdefault(group if split == "groups" else sample, []).append(sample)
    chosen = list(units.values())
    if seed is not None:
        Random(seed).shuffle(chosen)
    num_parts = -(-len(chosen) // size)
    # Use even parts: a short last mini-batch would give its few samples the weight of a full one.
    bounds = [len(chosen) * part // max(num_parts, 1) for part in range(num_parts + 1)]
    return [
        [sample for unit in chosen[start:end] for sample in unit]
        for start, end in zip(bounds, bounds[1:], strict=False)
    ]


def build_micro_batches(
    samples: Sequence[TrainSample],
    loss_weights: Sequence[float],
    layout: ParallelLayout,
    data_rank: int,
    limits: MicroBatchLimits,
    pack: Packing = pack,
) -> list[MicroBatch]:
    """Return the micro-batches of data-parallel rank `data_rank` for one mini-batch, on the host.

    A rollout batch would take gigabytes of a GPU, so the model moves each micro-batch when it computes it.
    samples: ALL samples of the mini-batch, the same on every rank, because the weights are global and the plan is
    shared. loss_weights: weight of each sample's trained tokens. pack: lays out a micro-batch's sequences.
    """
    if len(loss_weights) != len(samples):
        raise ValueError(f"mini-batch: {len(loss_weights)} loss weights for {len(samples)} samples")
    plan = plan_micro_batches([sample.num_tokens for sample in samples], layout, limits)
    # Pack only this rank's share: planning just needs the lengths.
    return [
        pack([samples[index] for index in part], [float(loss_weights[index]) for index in part], layout)
        for part in plan[data_rank]
    ]
