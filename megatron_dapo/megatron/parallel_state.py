"""megatron-core's process groups for a parallel layout."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_dapo.megatron.platform import install_cpu_platform
from megatron_dapo.parallel.layout import ParallelLayout


@dataclass(frozen=True)
class Groups:
    """The process groups that this rank belongs to."""

    tensor: dist.ProcessGroup
    pipeline: dist.ProcessGroup
    context: dist.ProcessGroup
    data: dist.ProcessGroup
    data_context: dist.ProcessGroup  # all ranks whose gradients are summed


def initialize_process_group(timeout_s: float) -> None:
    """Join the default group (NCCL with CUDA, else gloo) described by the environment of torchrun, if this process has not yet.

    A collective that waits longer than `timeout_s` seconds for a peer raises instead of hanging.
    """
    if not dist.is_initialized():
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", timeout=timedelta(seconds=timeout_s))


def initialize_parallel_state(layout: ParallelLayout, seed: int = 0, timeout_s: float = 1800.0) -> Groups:
    """Make the process groups of `layout` (dropping those of an earlier layout) and seed the random-number tracker.

    The default process group must exist. Raises ValueError where the layout is for another number of processes.
    """
    install_cpu_platform()
    if dist.get_world_size() != layout.world_size:
        raise ValueError(f"parallel layout {layout.describe()} is for {layout.world_size} processes, but {dist.get_world_size()} were started")
    mpu.destroy_model_parallel()
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        distributed_timeout_minutes=max(1, math.ceil(timeout_s / 60)),
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    groups = current_groups()
    _check_order(layout, groups)
    return groups


def current_groups() -> Groups:
    """The groups made by the last `initialize_parallel_state`."""
    return Groups(
        tensor=mpu.get_tensor_model_parallel_group(),
        pipeline=mpu.get_pipeline_model_parallel_group(),
        context=mpu.get_context_parallel_group(),
        data=mpu.get_data_parallel_group(),
        data_context=mpu.get_data_parallel_group(with_context_parallel=True),
    )


def _check_order(layout: ParallelLayout, groups: Groups) -> None:
    """The layout's arithmetic and megatron-core's numbering of ranks must be the same."""
    here = layout.coordinates(dist.get_rank())
    theirs = (groups.tensor.rank(), groups.context.rank(), groups.data.rank(), groups.pipeline.rank())
    assert (here.tensor, here.context, here.data, here.pipeline) == theirs, f"rank order: layout says {here}, megatron-core {theirs}"
