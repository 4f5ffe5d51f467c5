"""megatron-core's process groups for a parallel layout."""

from __future__ import annotations

import math
from collections.abc import Collection
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
    """Join the default group (NCCL with CUDA, else gloo) that torchrun describes, if this process has not yet.

    A collective that waits longer than `timeout_s` seconds for a peer raises instead of hanging.
    """
    if not dist.is_initialized():
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", timeout=timedelta(seconds=timeout_s))


def initialize_parallel_state(layout: ParallelLayout, seed: int = 0, timeout_s: float = 1800.0) -> Groups:
    """Make the process groups of `layout` and seed the random-number tracker. Collective.

    The default process group must exist. Groups of the same layout are used again, so that several models can share
    them; those of another layout are destroyed, and models built on them can no longer run. Raises ValueError where
    the layout is for another number of processes.
    """
    install_cpu_platform()
    num_processes = dist.get_world_size()
    if num_processes != layout.world_size:
        raise ValueError(
            f"parallel layout {layout.describe()} is for {layout.world_size} processes, "
            f"but {num_processes} were started"
        )
    if not _is_current(layout):
        _destroy_groups()
        _create_groups(layout, timeout_s)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    groups = current_groups()
    _check_order(layout, groups)
    return groups


def _create_groups(layout: ParallelLayout, timeout_s: float) -> None:
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=_virtual(layout),
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor_size,
        distributed_timeout_minutes=max(1, math.ceil(timeout_s / 60)),
        create_gloo_process_groups=False,
    )


def _virtual(layout: ParallelLayout) -> int | None:
    return layout.virtual_pipeline if layout.virtual_pipeline > 1 else None


def _is_current(layout: ParallelLayout) -> bool:
    """Whether the groups that exist are those of `layout`, in the default group that exists now."""
    if not mpu.model_parallel_is_initialized() or mpu.get_tensor_model_parallel_group() not in _living_groups():
        return False
    current = (
        mpu.get_tensor_model_parallel_world_size(),
        mpu.get_pipeline_model_parallel_world_size(),
        mpu.get_virtual_pipeline_model_parallel_world_size(),
        mpu.get_context_parallel_world_size(),
        mpu.get_expert_model_parallel_world_size(),
        mpu.get_expert_tensor_parallel_world_size(),
    )
    return current == (
        layout.tensor,
        layout.pipeline,
        _virtual(layout),
        layout.context,
        layout.expert,
        layout.expert_tensor_size,
    )


def _living_groups() -> Collection[dist.ProcessGroup]:
    return dist.distributed_c10d._world.pg_map.keys()


def _destroy_groups() -> None:
    """Destroy megatron-core's groups: each holds threads and sockets, and megatron-core itself only forgets them."""
    groups = [group for group in mpu._global_process_group_list or () if group in _living_groups()]
    if groups:
        dist.barrier()  # nobody may still be talking in them
    for group in groups:
        dist.destroy_process_group(group)
    mpu.destroy_model_parallel()


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
    assert (here.tensor, here.context, here.data, here.pipeline) == theirs, (
        f"rank order: layout says {here}, megatron-core {theirs}"
    )
    experts = layout.expert_coordinates(dist.get_rank())
    theirs = (
        mpu.get_expert_tensor_parallel_rank(),
        mpu.get_expert_model_parallel_rank(),
        mpu.get_expert_data_parallel_rank(),
    )
    assert (experts.tensor, experts.expert, experts.data) == theirs, (
        f"rank order of experts: layout says {experts}, megatron-core {theirs}"
    )
