"""From the parallel section of a configuration to a layout, as arithmetic: no heavy library is imported for it."""

from __future__ import annotations

from megatron_dapo.config.model_schema import ParallelConfig
from megatron_dapo.config.schema import Config
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.precision import token_multiple


def parallel_layout(config: Config, world_size: int) -> ParallelLayout:
    """The policy's layout in a run of that many processes, of which the critic may have some to itself."""
    return _layout(config, config.parallel, world_size - config.num_critic_processes)


def critic_layout(config: Config, world_size: int) -> ParallelLayout:
    """The critic's: over processes of its own, or over the policy's."""
    return _layout(config, config.critic_parallel, config.num_critic_processes or world_size)


def _layout(config: Config, p: ParallelConfig, world_size: int) -> ParallelLayout:
    return ParallelLayout(
        world_size,
        tensor=p.tensor,
        pipeline=p.pipeline,
        virtual_pipeline=p.virtual_pipeline,
        context=p.context,
        expert=p.expert,
        sequence_parallel=p.sequence_parallel,
        expert_tensor=p.expert_tensor or None,
        token_multiple=token_multiple(config.precision.recipe),
    )
