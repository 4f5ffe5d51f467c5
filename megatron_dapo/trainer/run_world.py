"""Which processes of a run hold the policy, which the critic, and how each is cut over its own.

shared      critic.parallel.num_processes = 0: the same processes hold both, and one model works at a time
apart       above 0: the last ranks of the world hold the critic alone, the others the policy; both update at once

Rank 0, which drives the rollout and writes the records, is always one of the policy's, and its number among the policy's
ranks is its number in the world.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dapo.config.schema import Config
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.parallel.rank_set import RankSet, all_ranks, partition_ranks
from megatron_dapo.trainer.parallel_layout import critic_layout, parallel_layout


@dataclass(frozen=True)
class RunWorld:
    """`size` processes. Without a critic its part and layout are the policy's and mean nothing."""

    size: int
    rank: int  # of this process in the world
    policy: RankSet
    critic: RankSet
    policy_layout: ParallelLayout
    critic_layout: ParallelLayout

    @property
    def is_shared(self) -> bool:
        """Whether policy and critic live in the same processes."""
        return self.policy.ranks == self.critic.ranks


def run_world(config: Config) -> RunWorld:
    """The world of a run, in the default process group, which must exist. Collective."""
    whole = all_ranks()
    policy, critic = whole, whole
    if config.num_critic_processes:
        policy, critic = partition_ranks(config.num_critic_processes, config.run.wait_timeout_seconds)
    size = whole.num_ranks
    return RunWorld(size, whole.rank, policy, critic, parallel_layout(config, size), critic_layout(config, size))
