"""Bytes and seconds of a weight sync into a run's servers, computed from layouts; nothing else computes them.

`reshard.planner` plans the same bytes slice by slice; a test compares the two over layouts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from megatron_dapo.config.model_schema import ParallelConfig
from megatron_dapo.config.schema import Config
from megatron_dapo.models.architecture import ModelArchitecture
from megatron_dapo.plan.cluster import Cluster
from megatron_dapo.plan.device import CHECKSUM_BYTES_S, DEVICE_SYNC_BYTES_S, SHARES, SYNC_BYTES_S, Gpu
from megatron_dapo.plan.memory.adapters import policy_parameters
from megatron_dapo.plan.memory.engine import engine_weight_bytes, engine_weights
from megatron_dapo.plan.memory.parameters import ITEM_SIZES, layers_of_stage
from megatron_dapo.plan.rank_order import dense_coordinates, expert_coordinates


@dataclass(frozen=True)
class SyncTraffic:
    """Bytes of one update of all servers."""

    shard: int  # one rank of a server
    num_bytes: int  # received by all ranks of all servers
    between_nodes: int  # received from other nodes, counted once per transfer
    into_node: int  # received from other nodes by the busiest one
    senders: int  # trainer ranks


@dataclass(frozen=True)
class _Held:
    """Shares of one pipeline stage that a node's ranks hold together."""

    stage: int
    dense: float
    experts: float


def sync_traffic(config: Config, architecture: ModelArchitecture, processes: int, cluster: Cluster) -> SyncTraffic:
    """Return the bytes of an update of the servers started by a run of `processes`."""
    sglang, policy = config.sglang, processes - config.num_critic_processes
    sizes = (sglang.tp_size, sglang.ep_size, config.model.dtype, sglang.quantization == "fp8")
    shard = engine_weight_bytes(architecture, *sizes)
    engines = cluster.num_engines(config, processes)
    num_bytes = shard * sglang.tp_size * engines
    between = into = 0
    if config.model.lora.serves_adapters:
        # Each engine rank is handed all adapters.
        shard = policy_parameters(config, architecture) * ITEM_SIZES[config.model.dtype]
        num_bytes = shard * sglang.tp_size * engines
        between, into = (num_bytes, num_bytes // cluster.num_nodes) if cluster.num_nodes > 1 else (0, 0)
    elif sglang.weight_sync_transport == "p2p":
        # Its senders are chosen for even shares, on whatever node they are.
        between = num_bytes if cluster.num_nodes > 1 else 0
        into = between // cluster.num_nodes
    elif sglang.weight_sync_transport == "shared_memory" and cluster.num_nodes > 1:
        # Into memory of the host a byte comes once for all servers of a node.
        copies = 1 if sglang.shared_memory == "host" else sglang.servers_per_node
        for held, count in _nodes(config.parallel, policy, cluster.processes_per_node(processes)):
            missing = copies * _missing(config, architecture, held)
            between, into = between + count * missing, max(into, missing)
    return SyncTraffic(shard, num_bytes, between, into, policy)


def _missing(config: Config, architecture: ModelArchitecture, held: Iterable[_Held]) -> int:
    """Return the bytes of a server that no rank of the node holds."""
    sglang, parallel = config.sglang, config.parallel
    sizes = (sglang.tp_size, sglang.ep_size, config.model.dtype, sglang.quantization == "fp8")
    rank = engine_weights(architecture, *sizes)
    stages = {one.stage: one for one in held}
    missing, last = 0.0, parallel.pp_size - 1
    for stage in range(parallel.pp_size):
        here = stages.get(stage, _Held(stage, 0.0, 0.0))
        layers = layers_of_stage(architecture, parallel, stage)
        for everywhere, (dense, experts) in rank.kinds:
            count = len(layers & everywhere) * sglang.tp_size
            missing += count * (dense * (1 - here.dense) + experts * (1 - here.experts))
    # A tied model has its embedding on the last stage as well.
    first_share, last_share = (stages[stage].dense if stage in stages else 0.0 for stage in (0, last))
    embedding = max(first_share, last_share) if architecture.tie_word_embeddings else first_share
    # Padding rows of the vocabulary are not sent.
    rows = architecture.vocab_size * (sglang.tp_size if architecture.serving.whole_embedding else 1)
    missing += rows * rank.row * (1 - embedding)
    output = embedding if architecture.tie_word_embeddings else last_share
    missing += (rank.matrices - 1) * rows * rank.row * (1 - output)
    return round(missing + sglang.tp_size * rank.norm * (last not in stages))


@lru_cache(maxsize=4096)
def _nodes(parallel: ParallelConfig, processes: int, ranks_of_node: int) -> tuple[tuple[tuple[_Held, ...], int], ...]:
    """Return what nodes hold of the stages, and how many nodes hold it, by the order of ranks."""
    stage, count = processes // parallel.pp_size, Counter[tuple[_Held, ...]]()
    if stage % ranks_of_node:
        for first in range(0, processes, ranks_of_node):
            count[_held(parallel, processes, range(first, min(first + ranks_of_node, processes)))] += 1
        return tuple(count.items())
    # Within a stage what nodes hold repeats.
    cut = (parallel.etp_size or parallel.tp_size) * parallel.ep_size
    period, nodes = math.lcm(ranks_of_node, parallel.tp_size, cut) // ranks_of_node, stage // ranks_of_node
    for first in range(0, processes, stage):
        for node in range(min(period, nodes)):
            start = first + node * ranks_of_node
            held = _held(parallel, processes, range(start, start + ranks_of_node))
            count[held] += len(range(node, nodes, period))
    return tuple(count.items())


def _held(parallel: ParallelConfig, processes: int, ranks: Iterable[int]) -> tuple[_Held, ...]:
    tensor, stage = parallel.tp_size, processes // parallel.pp_size
    cut, expert = parallel.etp_size or tensor, parallel.ep_size
    data = stage // (tensor * parallel.cp_size)
    dense: dict[int, set[int]] = {}
    experts: dict[int, set[tuple[int, int]]] = {}
    for rank in ranks:
        part, _, _, number = dense_coordinates(rank, tensor, parallel.cp_size, data)
        dense.setdefault(number, set()).add(part)
        experts.setdefault(number, set()).add(expert_coordinates(rank, stage, cut, expert)[:2])
    return tuple(
        _Held(number, len(dense[number]) / tensor, len(experts[number]) / (cut * expert)) for number in dense
    )


def sync_seconds(config: Config, traffic: SyncTraffic, cluster: Cluster, gpu: Gpu) -> Mapping[str, float]:
    """Return the seconds of an update by what they are for; the network's with the share of its rate that is reached."""
    found = {"checksums": traffic.shard / CHECKSUM_BYTES_S}
    if config.sglang.weight_sync_transport == "p2p":
        # A server's rank receives its shard, and a trainer's rank sends its even share of all.
        most = max(traffic.shard, traffic.num_bytes / traffic.senders)
        rate = gpu.network_bytes_s * SHARES.network if traffic.between_nodes else gpu.nvlink_bytes_s * SHARES.nvlink
        return {**found, "network" if traffic.between_nodes else "links_of_node": most / rate}
    is_device = config.sglang.shared_memory == "device"
    found["node_memory"] = traffic.shard / (DEVICE_SYNC_BYTES_S if is_device else SYNC_BYTES_S)
    if traffic.into_node:
        found["network"] = traffic.into_node / (cluster.network_gbit / 8 * 1e9 * SHARES.network)
    return found
