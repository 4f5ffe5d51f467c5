"""Placement of the models on the run's processes: which ranks hold policy and critic, and in which layouts.

shared      critic.parallel.num_processes = 0: all ranks hold both models, which take turns
separate    above 0: the last ranks hold only the critic, the others the policy; both update at the same time

Rank 0 drives the rollout and writes the records. It always belongs to the policy's ranks, and its rank among them is 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megatron_dapo.config.model_schema import ParallelConfig
from megatron_dapo.config.schema import Config
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.precision import token_multiple

if TYPE_CHECKING:
    from megatron_dapo.engines.sglang.supervisor import Supervision
    from megatron_dapo.parallel.coordination import Coordination
    from megatron_dapo.parallel.rank_set import RankSet


@dataclass(frozen=True)
class RunTopology:
    """Ranks and layouts of a run's models. Without a critic, the critic's fields equal the policy's and are unused."""

    size: int  # processes of the run
    rank: int  # rank of this process in the world
    policy: RankSet
    critic: RankSet
    policy_layout: ParallelLayout
    critic_layout: ParallelLayout
    coordination: Coordination  # all ranks, through host memory
    rendezvous_host: str = "127.0.0.1"  # the node of rank 0
    supervision: Supervision | None = None  # supervision of servers; None if nothing starts the run's processes again

    @property
    def is_shared(self) -> bool:
        """True if the same processes hold policy and critic."""
        return self.policy.ranks == self.critic.ranks


def run_topology(
    config: Config, rendezvous_host: str = "127.0.0.1", supervision: Supervision | None = None
) -> RunTopology:
    """Return the topology of a run whose default process group exists. Collective."""
    # Commands that only print a layout import this module and must not need torch.
    from megatron_dapo.parallel.coordination import collective_timeout, coordinate
    from megatron_dapo.parallel.rank_set import all_ranks, partition_ranks

    timeout_s = collective_timeout(config.run.wait_timeout_seconds)
    world = all_ranks()
    size = world.num_ranks
    coordination = coordinate(world.ranks, timeout_s)
    assert coordination is not None, "every process is one of the world"
    # With shared ranks, both models are on all processes and use the same connections.
    policy = critic = replace(world, coordination=coordination)
    if config.num_critic_processes:
        policy, critic = partition_ranks(config.num_critic_processes, timeout_s, coordination.progress)
    layouts = parallel_layout(config, size), critic_layout(config, size)
    return RunTopology(size, world.rank, policy, critic, *layouts, coordination, rendezvous_host, supervision)


def parallel_layout(config: Config, world_size: int) -> ParallelLayout:
    """Return the policy's layout in a run of `world_size` processes, some of which may hold only the critic."""
    return _layout(config, config.parallel, world_size - config.num_critic_processes)


def critic_layout(config: Config, world_size: int) -> ParallelLayout:
    """Return the critic's layout, over its own processes or over the policy's."""
    return _layout(config, config.critic_parallel, config.num_critic_processes or world_size)


def _layout(config: Config, p: ParallelConfig, world_size: int) -> ParallelLayout:
    return ParallelLayout(
        world_size,
        tensor=p.tp_size,
        pipeline=p.pp_size,
        virtual_pipeline=p.vpp_size,
        context=p.cp_size,
        expert=p.ep_size,
        sequence_parallel=p.sequence_parallel,
        expert_tensor=p.etp_size or None,
        token_multiple=token_multiple(config.precision.recipe),
        first_stage_layers=p.first_stage_layers,
        last_stage_layers=p.last_stage_layers,
    )
