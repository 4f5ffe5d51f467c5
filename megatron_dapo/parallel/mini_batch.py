"""Mini-batches of a rollout batch, one optimizer step each, and their micro-batches.

A rollout batch is cut into mini-batches, one optimizer step each, by a rule from a table; then every mini-batch's loss
weights are computed once, from all of its samples on all ranks, and only then is it cut into micro-batches. So no later
cut can change the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import TypeVar

import torch

from megatron_dapo.parallel.collectives import computing_device
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.parallel.packing import MicroBatchLimits, pack, plan_micro_batches, to_device
from megatron_dapo.types import MicroBatch, TrainSample

T = TypeVar("T")

# All samples of one mini-batch -> the weight of each trained token of each sample in that optimizer step's loss.
WeighSamples = Callable[[Sequence[TrainSample]], Sequence[float]]
Packing = Callable[[Sequence[TrainSample], Sequence[float], ParallelLayout], MicroBatch]


def split_by_groups(group_indices: Sequence[int], groups_per_mini_batch: int, order: Random | None) -> list[list[int]]:
    """Whole groups a mini-batch. The order of groups is shuffled where `order` is given."""
    groups: dict[int, list[int]] = {}
    for sample, group in enumerate(group_indices):
        groups.setdefault(group, []).append(sample)
    chosen = list(groups.values())
    if order is not None:
        order.shuffle(chosen)
    parts = _even_parts(chosen, -(-len(chosen) // groups_per_mini_batch))
    return [[sample for group in part for sample in group] for part in parts]


def split_by_samples(
    group_indices: Sequence[int], samples_per_mini_batch: int, order: Random | None
) -> list[list[int]]:
    """Samples by their number alone: a group may straddle mini-batches (its advantages were computed before, on the
    whole group)."""
    samples = list(range(len(group_indices)))
    if order is not None:
        order.shuffle(samples)
    return _even_parts(samples, -(-len(samples) // samples_per_mini_batch))


SPLITS = {"groups": split_by_groups, "samples": split_by_samples}


def _even_parts(items: list[T], num_overlaps: int) -> list[list[T]]:
    """Consecutive parts whose sizes differ by at most one: a partial rollout batch leaves no tiny last mini-batch,
    which would give its few samples the weight of a full one."""
    bounds = [len(items) * part // max(num_overlaps, 1) for part in range(num_overlaps + 1)]
    return [items[start:end] for start, end in zip(bounds, bounds[1:], strict=False)]


def split_mini_batches(
    group_indices: Sequence[int], size: int, *, split: str = "groups", seed: int | None = None
) -> list[list[int]]:
    """Sample indices of each mini-batch; every sample is in exactly one.

    group_indices: the group of each sample of the rollout batch. size: of a mini-batch, at most, in what `split` names:
    "groups" keeps groups whole, "samples" lets them straddle. seed: shuffles, differently for every seed; None keeps
    the order of the rollout batch.
    """
    if split not in SPLITS:
        raise ValueError(f"mini-batch split {split!r} does not exist; there are: {', '.join(SPLITS)}")
    if size < 1:
        raise ValueError(f"mini-batch: {size} {split} a mini-batch, must be at least 1")
    return SPLITS[split](group_indices, size, None if seed is None else Random(seed))


def build_micro_batches(
    samples: Sequence[TrainSample],
    weigh: WeighSamples,
    layout: ParallelLayout,
    data_rank: int,
    limits: MicroBatchLimits,
    pack: Packing = pack,
    device: torch.device | None = None,
) -> list[MicroBatch]:
    """The micro-batches of data-parallel rank `data_rank` for one mini-batch.

    samples: ALL samples of the mini-batch, the same on every rank: the weights are global and the plan is common. pack:
    how a micro-batch's sequences are laid out. device: where its tensors lie (None: where this process computes), so
    that the model and whatever is computed beside it find them there.
    """
    weights = weigh(samples)
    if len(weights) != len(samples):
        raise ValueError(f"mini-batch: {len(weights)} loss weights for {len(samples)} samples")
    plan = plan_micro_batches([sample.num_tokens for sample in samples], layout, limits)
    place = device or computing_device()
    return [
        to_device(pack([samples[index] for index in part], [float(weights[index]) for index in part], layout), place)
        for part in plan[data_rank]
    ]
