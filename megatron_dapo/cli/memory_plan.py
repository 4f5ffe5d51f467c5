"""Lines about the machines of a run, before it starts: engines and their caches, memory of a GPU and of a node."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_dapo.config import Config
from megatron_dapo.models.architecture import ModelArchitecture
from megatron_dapo.plan.check import response_seconds, weight_sync_seconds
from megatron_dapo.plan.cluster import GIB, Cluster
from megatron_dapo.plan.memory import ModelMemory, RunMemory, optimizer_ranks, run_memory


MOST_HOST = 0.9  # of a node's memory, that processes and pinned memory may hold for good


def memory_lines(config: Config, architecture: ModelArchitecture, processes: int, cluster: Cluster) -> list[str]:
    """Return the lines of a run whose configuration was checked for these machines."""
    memory = run_memory(config, architecture, processes, cluster)
    has_gpus = cluster.gpus_per_node > 0
    nodes = f"{cluster.num_nodes} node{'s' if cluster.num_nodes > 1 else ''}"
    gpus = f" of {cluster.gpus_per_node} GPUs of {cluster.gpu_gib:.3g} GiB" if has_gpus else " without GPUs"
    lines = [f"machines: {nodes}{gpus}; trainer processes a node: {cluster.processes_per_node(processes)}"]
    lines += _engines(config, architecture, memory, processes, cluster)
    policy_ranks = processes - config.num_critic_processes
    lines.append(f"memory of the policy on its fullest rank: {_parts(config, memory.policy, policy_ranks)}")
    if memory.critic:
        lines.append(f"memory of the critic on its fullest rank: {_total(memory.critic)}")
    device = "GPU" if has_gpus else "process"
    generating = f", while engines generate {_gib(memory.engine)}" if memory.engine else ""
    lines.append(f"memory of a {device}: while training {_gib(memory.trainer)}{generating}")
    host = f" of {cluster.host_gib:.0f} GiB" if has_gpus else ""
    return [*lines, f"host memory of a node: {_gib(memory.host)}{host}", *memory_warnings(config, memory, processes, cluster)]


def memory_warnings(config: Config, memory: RunMemory, processes: int, cluster: Cluster) -> Iterator[str]:
    """Yield what works, but not well."""
    processes_per_node = cluster.processes_per_node(processes)
    if cluster.gpus_per_node and memory.host > MOST_HOST * cluster.host_gib * GIB:
        yield (
            f"warning: {memory.host / GIB:.0f} GiB of a node's {cluster.host_gib:.0f} GiB cannot be reclaimed, more than "
            f"{MOST_HOST:.0%}: page cache and short-lived processes get the rest; offload less, or use nodes with more memory"
        )
    if config.parallel.tp_size > processes_per_node:
        yield (
            f"warning: tensor-parallel ranks are on several nodes: parallel.tp_size = {config.parallel.tp_size}, but "
            f"{processes_per_node} trainer processes a node; lower it to {processes_per_node} and raise parallel.pp_size"
        )
    engine, sglang = memory.engine_memory, config.sglang
    if engine is None or config.rollout.engine != "sglang":
        return
    # A quarter of the full length is a usual mean of reasoning rollouts.
    typical = sglang.max_running_requests * config.longest_sequence // 4
    if engine.kv_tokens < typical:
        yield (
            f"warning: requests will queue: {sglang.max_running_requests} responses (sglang.max_running_requests) of a "
            f"quarter of the full length need {typical} KV tokens, an engine holds {engine.kv_tokens}; lower it to "
            f"{4 * engine.kv_tokens // config.longest_sequence}, or raise sglang.mem_fraction_static"
        )


def _engines(
    config: Config, architecture: ModelArchitecture, memory: RunMemory, processes: int, cluster: Cluster
) -> Iterator[str]:
    engine, sglang = memory.engine_memory, config.sglang
    if config.rollout.engine == "embedded" or engine is None:
        where = "given by sglang.urls" if config.rollout.engine == "sglang" else "inside the trainer's processes"
        yield f"engines: {memory.num_engines}, {where}"
        return
    yield (
        f"engines: {memory.num_engines} SGLang servers of TP{sglang.tp_size}, {sglang.servers_per_node} a node, "
        f"{sglang.placement}, weights by {sglang.weight_sync_transport}"
    )
    if cluster.gpus_per_node:
        yield (
            f"KV cache of an engine: {engine.kv_tokens} tokens at {engine.bytes_per_token} bytes a rank, "
            f"{engine.kv_tokens / config.longest_sequence:.1f} sequences of {config.longest_sequence}; "
            f"weights {_gib(engine.weights)} a rank"
        )
        yield (
            f"estimates: {response_seconds(config, memory):.0f} s for a batch of longest responses, "
            f"{weight_sync_seconds(config, architecture, processes, cluster):.0f} s for a weight sync"
        )


def _parts(config: Config, model: ModelMemory, ranks: int) -> str:
    replicas, of_experts = optimizer_ranks(config.parallel, ranks)
    cut = ""
    if config.parallel.use_distributed_optimizer and replicas > 1:
        experts = f", of experts {of_experts}" if of_experts != replicas else ""
        cut = f" (cut over {replicas} ranks{experts})"
    where = "" if model.piece is None else f" in host memory, {_gib(model.piece)} of them at a time on the GPU"
    return (
        f"weights {_gib(model.weights)}, fp32 gradients {_gib(model.gradients)}, main params and moments "
        f"{_gib(model.optimizer)}{cut}{where}, activations {_gib(model.training - model.state)}"
    )


def _total(model: ModelMemory) -> str:
    return f"state {_gib(model.state)}, activations {_gib(model.training - model.state)}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= 0.1 * GIB else f"{num_bytes / 2**20:.1f} MiB"
