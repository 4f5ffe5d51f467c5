"""Machines of a run: the number of nodes and GPUs, and the placement of processes and servers on them."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dapo.config.schema import Config
from megatron_dapo.rounding import GIB

GPUS_PER_NODE = 8
GPU_GIB = 79.0  # an 80 GB H100 as reported by CUDA
HOST_GIB = 1000.0  # a node of eight such GPUs has 1 to 2 TB
NETWORK_GBIT = 25.0  # a node's TCP traffic: a slow front-end network


@dataclass(frozen=True)
class Cluster:
    """Identical nodes of a run."""

    num_nodes: int = 1
    gpus_per_node: int = GPUS_PER_NODE  # 0: the run is on CPUs
    gpu_gib: float = GPU_GIB  # memory of a GPU
    host_gib: float = HOST_GIB  # memory of a node
    network_gbit: float = NETWORK_GBIT  # a node's, each direction: weights sent between nodes over TCP
    nvls: bool = False  # NCCL uses NVLS, whose buffers are large; the launch scripts switch it off
    cores: int = 0  # a node's, without GPUs; 0: unknown, and nothing is estimated
    has_bf16: bool = False  # these multiply bfloat16

    def __post_init__(self) -> None:
        if self.num_nodes < 1 or self.gpus_per_node < 0 or min(self.gpu_gib, self.host_gib, self.network_gbit) <= 0:
            raise ValueError(
                f"cluster: {self.num_nodes} nodes of {self.host_gib:g} GiB and {self.gpus_per_node} GPUs of "
                f"{self.gpu_gib:g} GiB, {self.network_gbit:g} Gbit/s; there must be at least one node, memory and a network above 0"
            )

    @property
    def gpu_bytes(self) -> int:
        return int(self.gpu_gib * GIB)

    def processes_per_node(self, processes: int) -> int:
        """Return the trainer processes of the fullest node."""
        return -(-processes // self.num_nodes)

    def num_engines(self, config: Config, processes: int) -> int:
        """Return the engines of the run: servers started on every node with the policy's processes, servers given by URL, or
        one embedded engine for each process of the policy."""
        sglang = config.sglang
        if config.rollout.engine == "embedded":
            return processes - config.num_critic_processes
        return len(sglang.urls) or self.server_nodes(config, processes) * sglang.servers_per_node // sglang.nodes_per_server

    def server_nodes(self, config: Config, processes: int) -> int:
        """Return the nodes with processes of the policy, on which servers are started."""
        policy = processes - config.num_critic_processes
        return -(-policy // max(self.processes_per_node(processes), 1))


def server_gpus(config: Config) -> int:
    """Return the number of a node's GPUs that only servers use."""
    sglang = config.sglang
    has_own = config.rollout.engine == "sglang" and sglang.placement == "disaggregated" and not sglang.urls
    return sglang.servers_per_node * sglang.ranks_per_node if has_own else 0


def cluster_for(
    config: Config,
    num_nodes: int | None = None,
    gpus_per_node: int = GPUS_PER_NODE,
    gpu_gib: float = GPU_GIB,
    host_gib: float = HOST_GIB,
    network_gbit: float = NETWORK_GBIT,
    nvls: bool = False,
) -> Cluster:
    """Return a cluster of such nodes; without their number as many as the layout's processes and servers fill."""
    trainer_gpus = max(gpus_per_node - server_gpus(config), 1)
    nodes = num_nodes or -(-config.num_processes // trainer_gpus)
    return Cluster(nodes, gpus_per_node, gpu_gib, host_gib, network_gbit, nvls)
