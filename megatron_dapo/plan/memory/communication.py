"""Device memory of NCCL: buffers of process groups with more than one rank, from published measurements
(docs/plan.md)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatron_dapo.config.model_schema import ParallelConfig
from megatron_dapo.plan.cluster import Cluster
from megatron_dapo.rounding import GIB

PAIR_BYTES, GROUP_BYTES = 544 << 20, 688 << 20  # group of two ranks, larger group: NVIDIA/nccl issue 964
# NVLS, NCCL's default on Hopper, adds this to a group with more than two ranks on a node. It is the excess over the
# above that verl pull request 6408 measured in a dense model's groups (TP2 PP2 DP2 on 8 H100: 7 GB). For its model with
# experts, 9.5 GB, the plan's figure is a prediction.
NVLS_BYTES = int(1.8 * GIB)
NVLS_RANKS = 3
SERVER_GROUP = 1 * GIB  # a rank of a server with several ranks: vLLM pull request 51485, at TP4


@dataclass(frozen=True)
class NcclGroup:
    """A process group: its number of ranks, and how many of them are on one node."""

    ranks: int
    ranks_of_node: int

    def num_bytes(self, nvls: bool) -> int:
        """Return the bytes that NCCL holds on each rank for this group, with or without NVLS."""
        if self.ranks < 2:
            return 0
        more = NVLS_BYTES if nvls and self.ranks_of_node >= NVLS_RANKS else 0
        return (PAIR_BYTES if self.ranks == 2 else GROUP_BYTES) + more


def model_groups(
    parallel: ParallelConfig, processes: int, has_experts: bool, ranks_of_node: int
) -> Mapping[str, NcclGroup]:
    """Return megatron-core's groups for a model on `processes`."""
    stage = processes // parallel.pp_size
    tensor = parallel.tp_size
    # Size of the group and stride between its ranks; a node is a range of ranks.
    sizes = {
        "tensor": (tensor, 1),
        "context": (parallel.cp_size, tensor),
        "pipeline": (parallel.pp_size, stage),
        "data": (stage // tensor, tensor),  # includes context ranks: gradients and weights
        "optimizer": (processes, 1),  # the gradient's norm
    }
    if has_experts:
        cut, expert = parallel.etp_size or tensor, parallel.ep_size
        sizes |= {
            "expert": (expert, cut),
            "expert_tensor": (cut * expert, 1),
            "expert_data": (stage // (cut * expert), cut * expert),
        }
    return {
        name: NcclGroup(ranks, min(ranks, max(1, ranks_of_node // stride)))
        for name, (ranks, stride) in sizes.items()
        if ranks > 1
    }


def weight_sync_groups(engines: int, replicas: int, engine_ranks: int) -> list[NcclGroup]:
    """Return the groups of the p2p transport on a trainer rank: one per server that it sends to.

    The bytes for all servers are divided evenly over the replicas of a rank's parameters.
    """
    count = min(engines, -(-engines // replicas) + 1)
    return [NcclGroup(engine_ranks + 2, engine_ranks)] * count


def communication_bytes(groups: Iterable[NcclGroup], cluster: Cluster) -> int:
    """Return the bytes that NCCL holds on a rank for these groups; 0 on CPUs."""
    return sum(group.num_bytes(cluster.nvls) for group in groups) if cluster.gpus_per_node else 0
