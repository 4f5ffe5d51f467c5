"""megatron-core's process groups for a parallel layout, and for several layouts at once.

megatron-core takes a model's groups as an argument in many places, but its schedules, its optimizers and
finalize_model_grads still read sizes, ranks and groups from its module `parallel_state`. So a model keeps the variables of
that module that belong to its layout, and restores them before it runs. One model runs at a time in a process.

A model may also live on a subset of the world's processes. megatron-core numbers ranks from 0 and uses all of them, so
while it creates such groups it sees a world of that size, and its ranks are shifted. Every process of the world takes
part in creating every group, including groups it is not a member of (`join_as_nonmember`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_dapo.megatron.platform import Overlay, install_cpu_platform
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.parallel.rank_set import RankSet, all_ranks
from megatron_dapo.parallel.store import open_store

# megatron-core's descriptions of the groups that the memory plan (config.memory.communication.model_groups) counts.
_TRAINING_GROUPS = {
    "TENSOR_MODEL_PARALLEL_GROUP",
    "CONTEXT_PARALLEL_GROUP",
    "PIPELINE_MODEL_PARALLEL_GROUP",
    "DATA_PARALLEL_GROUP_WITH_CP",
    "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP",
}
_EXPERT_GROUPS = {
    "EXPERT_MODEL_PARALLEL_GROUP",
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP",
    "EXPERT_DATA_PARALLEL_GROUP",
}


@dataclass(frozen=True)
class Groups:
    """The process groups that this rank belongs to."""

    tensor: dist.ProcessGroup
    pipeline: dist.ProcessGroup
    context: dist.ProcessGroup
    data: dist.ProcessGroup
    data_context: dist.ProcessGroup  # all ranks whose gradients are summed


@dataclass(frozen=True)
class ParallelState:
    """The process groups of one layout on a subset of the world, and megatron-core's variables that hold them."""

    layout: ParallelLayout
    part: RankSet
    groups: Groups
    variables: Mapping[str, Any]

    def activate(self) -> None:
        """Make this the layout that megatron-core sees. Raise ValueError if its groups were destroyed."""
        if not self.is_alive:
            raise ValueError(
                f"the process groups of {self.layout.describe()} were destroyed when a model on another layout was "
                "built; pass the models that continue to run as that model's `running_models`"
            )
        vars(mpu).update(self.variables)

    @property
    def is_alive(self) -> bool:
        return self.groups.tensor in _living_groups()

    def is_current(self) -> bool:
        """Return True if megatron-core sees this layout now."""
        return mpu.get_tensor_model_parallel_group(check_initialized=False) is self.groups.tensor


def initialize_process_group(timeout_s: float) -> None:
    """Join the default group (NCCL with CUDA, otherwise gloo) described by torchrun's environment, unless it exists.

    A collective that waits longer than `timeout_s` seconds for a peer raises instead of hanging.
    """
    if not dist.is_initialized():
        # Use a store of this attempt: after a restart by torchrun, env:// would find the previous processes' addresses.
        store, rank, size = open_store(timeout_s)
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s))


def connect_groups(has_experts: bool) -> int:
    """Make one tiny all-reduce on every group that training communicates in; return the device memory used, in bytes.

    NCCL makes a communicator, with its buffers, at a group's first collective. Doing so here makes it happen at a known
    moment, under a deadline, with its memory measured. megatron-core creates twice as many groups; an unused group
    costs nothing, but would cost more than half a GiB if connected. Collective: ranks visit groups in order of
    creation.
    """
    names = _TRAINING_GROUPS | (_EXPERT_GROUPS if has_experts else set())
    free = int(torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else 0
    for group in list(_living_groups()):
        if group.group_desc in names and group.size() > 1:
            device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
            dist.all_reduce(torch.zeros(1, device=device), group=group)
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    return free - int(torch.cuda.mem_get_info()[0])


def initialize_parallel_state(
    layout: ParallelLayout,
    seed: int = 0,
    timeout_s: float = 1800.0,
    keep: Sequence[ParallelState] = (),
    part: RankSet | None = None,
) -> ParallelState:
    """Create the process groups of `layout` on `part` (None: the whole world) and seed the random-number tracker.

    Collective among the ranks of `part`, with equal `keep`; the other processes of the world call `join_as_nonmember`. The
    default process group must exist. Groups of the same layout are reused, so that several models can share them.
    Groups of another layout stay if they are in `keep`; otherwise they are destroyed, and models built on them can no
    longer run. Raise ValueError if the layout is for another number of processes.
    """
    install_cpu_platform()
    part = part or all_ranks()
    if part.num_ranks != layout.world_size:
        raise ValueError(
            f"parallel layout {layout.describe()} is for {layout.world_size} processes, "
            f"but {part.num_ranks} were started"
        )
    # Equal sizes on equal ranks give equal groups.
    key = (_axes(layout), part.ranks)
    same = [state for state in keep if state.is_alive and (_axes(state.layout), state.part.ranks) == key]
    if same:
        same[0].activate()
    elif not _is_current(layout, part):
        _leave_groups(keep, part)
        _create_groups(layout, part, timeout_s)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    groups = current_groups()
    _check_order(layout, groups, part.rank)
    return ParallelState(layout, part, groups, _variables())


def join_as_nonmember(layout: ParallelLayout, part: RankSet, timeout_s: float = 1800.0) -> None:
    """Take part in creating the groups of a model on `part` from a process outside `part`."""
    assert not part.is_member, f"rank {part.world_rank} is one of {part.ranks} and has to build the model"
    install_cpu_platform()
    own = _variables()
    # megatron-core refuses to create groups while it has some. This only makes it forget this process's model's groups.
    mpu.destroy_model_parallel()
    _create_groups(layout, part, timeout_s)
    mpu.destroy_model_parallel()
    vars(mpu).update(own)


@contextmanager
def world_is(part: RankSet, module: ModuleType) -> Iterator[None]:
    """Make megatron-core's `module` see the ranks of `part` as the whole world whenever it passes no group."""
    original = vars(module)["torch"]

    def get_world_size(group: dist.ProcessGroup | None = None) -> int:
        return part.num_ranks if group is None else dist.get_world_size(group)

    def all_gather_object(found: list[Any], mine: Any, group: dist.ProcessGroup | None = None) -> None:
        dist.all_gather_object(found, mine, group=part.group if group is None else group)

    replaced = {"get_world_size": get_world_size, "all_gather_object": all_gather_object}
    setattr(module, "torch", Overlay(original, {"distributed": Overlay(dist, replaced)}))  # noqa: B010
    try:
        yield
    finally:
        setattr(module, "torch", original)  # noqa: B010


@contextmanager
def _shifted_ranks(first_rank: int) -> Iterator[None]:
    """Make `first_rank` of the world megatron-core's rank 0."""
    original = mpu.RankGenerator

    def generator(**sizes: Any) -> Any:
        return original(**{**sizes, "rank_offset": first_rank})

    setattr(mpu, "RankGenerator", generator)  # noqa: B010
    try:
        yield
    finally:
        setattr(mpu, "RankGenerator", original)  # noqa: B010


def _variables() -> dict[str, Any]:
    """Return megatron-core's variables of the layout that it sees now."""
    # By convention all state of the module has upper-case names, except this list.
    return {name: value for name, value in vars(mpu).items() if name.isupper() or name == "_global_process_group_list"}


def _leave_groups(keep: Sequence[ParallelState], part: RankSet) -> None:
    """Make megatron-core forget the layout it sees, and destroy its groups unless they are in `keep`."""
    if any(state.is_current() for state in keep):
        mpu.destroy_model_parallel()  # only forgets them
    else:
        _destroy_groups(part)


def _axes(layout: ParallelLayout) -> tuple[int | None, ...]:
    """Return the sizes that define the groups; sequence parallelism has no separate group."""
    return (
        layout.tensor,
        layout.pipeline,
        _virtual(layout),
        layout.context,
        layout.expert,
        layout.expert_tensor_size,
    )


def _create_groups(layout: ParallelLayout, part: RankSet, timeout_s: float) -> None:
    """Create the groups of a layout. Collective over the whole world, which `torch.distributed.new_group` requires."""
    with world_is(part, mpu), _shifted_ranks(part.first_rank):
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


def _is_current(layout: ParallelLayout, part: RankSet) -> bool:
    """Return True if the existing groups are those of `layout` on `part`, under the current default group."""
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
    # The only group with all ranks of the model, replicas included.
    everyone = dist.get_process_group_ranks(mpu._INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP)
    return current == _axes(layout) and everyone == list(part.ranks)


def _living_groups() -> Collection[dist.ProcessGroup]:
    return dist.distributed_c10d._world.pg_map.keys()


def _destroy_groups(part: RankSet) -> None:
    """Destroy megatron-core's groups."""
    # Each holds threads and sockets, and megatron-core only forgets them.
    groups = [group for group in mpu._global_process_group_list or () if group in _living_groups()]
    if groups:
        dist.barrier(part.group)  # no rank may still be inside one of their collectives
    for group in groups:
        dist.destroy_process_group(group)
    mpu.destroy_model_parallel()


def current_groups() -> Groups:
    """Return the groups of the layout that megatron-core sees."""
    return Groups(
        tensor=mpu.get_tensor_model_parallel_group(),
        pipeline=mpu.get_pipeline_model_parallel_group(),
        context=mpu.get_context_parallel_group(),
        data=mpu.get_data_parallel_group(),
        data_context=mpu.get_data_parallel_group(with_context_parallel=True),
    )


def _check_order(layout: ParallelLayout, groups: Groups, rank: int) -> None:
    """Assert that the layout's arithmetic and megatron-core number the ranks the same way."""
    here = layout.coordinates(rank)
    theirs = (groups.tensor.rank(), groups.context.rank(), groups.data.rank(), groups.pipeline.rank())
    assert (here.tensor, here.context, here.data, here.pipeline) == theirs, (
        f"rank order: layout says {here}, megatron-core {theirs}"
    )
    experts = layout.expert_coordinates(rank)
    theirs_of_experts = (
        mpu.get_expert_tensor_parallel_rank(),
        mpu.get_expert_model_parallel_rank(),
        mpu.get_expert_data_parallel_rank(),
    )
    assert (experts.tensor, experts.expert, experts.data) == theirs_of_experts, (
        f"rank order of experts: layout says {experts}, megatron-core {theirs_of_experts}"
    )
