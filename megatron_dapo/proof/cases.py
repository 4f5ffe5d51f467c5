"""What is compared: every layout the number of processes allows, times every cut into micro-batches, packing and
aggregation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product

from megatron_dapo.algorithms.aggregation import AGGREGATIONS
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.parallel.mini_batch import Packing
from megatron_dapo.parallel.packing import MicroBatchLimits, pack, pad_to_longest

# Padded tokens of the batch's longest sequence -> limits. A dynamic micro-batch holds it and a few short ones.
MICRO_BATCHES: Mapping[str, Callable[[int], MicroBatchLimits]] = {
    "1": lambda longest: MicroBatchLimits(max_sequences=1),
    "2": lambda longest: MicroBatchLimits(max_sequences=2),
    "4": lambda longest: MicroBatchLimits(max_sequences=4),
    "dynamic": lambda longest: MicroBatchLimits(max_tokens=longest * 5 // 4),
}
PACKINGS: Mapping[str, Packing] = {"packed": pack, "padded": pad_to_longest}


@dataclass(frozen=True)
class Cut:
    """How the mini-batch is cut and laid out."""

    micro_batch: str  # key of MICRO_BATCHES
    packing: str  # key of PACKINGS


def cuts() -> list[Cut]:
    """Every cut; one sequence a micro-batch is the same packed and padded, so it is listed once."""
    return [
        Cut(size, packing) for size, packing in product(MICRO_BATCHES, PACKINGS) if (size, packing) != ("1", "padded")
    ]


def aggregations() -> list[str]:
    return list(AGGREGATIONS)


def expert_cuts() -> list[Cut]:
    """What is compared for layouts of experts, which see tokens only: ranks with different numbers of them."""
    return [Cut("dynamic", "packed")]


def expert_layouts(world_size: int) -> list[ParallelLayout]:
    """Layouts of exactly `world_size` processes that deal out experts: every size of the expert axis, experts cut as
    dense layers and not cut, over data, context and tensor ranks, with and without a pipeline."""
    sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
    return [
        ParallelLayout(
            world_size,
            tensor,
            pipeline,
            context=context,
            expert=expert,
            sequence_parallel=tensor > 1,
            expert_tensor=expert_tensor,
        )
        for tensor, pipeline, context, expert in product(sizes, repeat=4)
        if expert > 1 and world_size % (tensor * pipeline * context) == 0
        for expert_tensor in ((1, tensor) if tensor > 1 else (1,))
        if world_size // pipeline % (expert * expert_tensor) == 0
    ]


def layouts(world_size: int) -> list[ParallelLayout]:
    """Every TP x PP x CP x DP of exactly `world_size` processes, with and without sequence parallelism and two virtual
    stages."""
    sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
    return [
        ParallelLayout(world_size, tensor, pipeline, virtual, context, sequence_parallel=sequence)
        for tensor, pipeline, context in product(sizes, repeat=3)
        if world_size % (tensor * pipeline * context) == 0
        for virtual in ((1, 2) if pipeline > 1 else (1,))
        for sequence in ((False, True) if tensor > 1 else (False,))
    ]
