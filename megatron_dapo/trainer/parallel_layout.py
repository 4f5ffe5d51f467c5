"""From the parallel section of a configuration to a layout, as arithmetic: no heavy library is imported for it."""

from __future__ import annotations

from megatron_dapo.config.schema import Config, ParallelConfig
from megatron_dapo.parallel.layout import ParallelLayout


def parallel_layout(config: Config, world_size: int) -> ParallelLayout:
    """The policy's layout in a world of that size."""
    return _layout(config.parallel, world_size)


def critic_layout(config: Config, world_size: int) -> ParallelLayout:
    """The critic's."""
    return _layout(config.critic_parallel, world_size)


def _layout(p: ParallelConfig, world_size: int) -> ParallelLayout:
    return ParallelLayout(
        world_size,
        tensor=p.tensor,
        pipeline=p.pipeline,
        virtual_pipeline=p.virtual_pipeline,
        context=p.context,
        expert=p.expert,
        sequence_parallel=p.sequence_parallel,
        expert_tensor=p.expert_tensor or None,
    )
