"""Rules for the machines of a run: addresses that every node can reach, available GPUs and memory, deadlines of a
step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_dapo.config.inputs import hook_paths
from megatron_dapo.config.rules import ConfigError, Violation, broken, value_of
from megatron_dapo.config.schema import Config
from megatron_dapo.config.section import Rule
from megatron_dapo.config.validator import out_of_range, validate
from megatron_dapo.models.architecture import ModelArchitecture
from megatron_dapo.plan.cluster import Cluster
from megatron_dapo.plan.device import SHARES, SLOWEST
from megatron_dapo.plan.memory import SPARE_POSITIONS, RunMemory, run_memory
from megatron_dapo.plan.weight_sync import sync_seconds, sync_traffic
from megatron_dapo.rounding import GIB

# A server that holds fewer full-length responses would serve them almost one after the other.
FEWEST_SEQUENCES = 8

_SGLANG = 'rollout.engine == "sglang"'
_STARTED = f"{_SGLANG} and not sglang.urls"
_ON_GPUS = "gpus_per_node > 0"
_COLOCATED = f'{_STARTED} and sglang.placement == "colocated" and {_ON_GPUS}'
_DISAGGREGATED = f'{_STARTED} and sglang.placement == "disaggregated" and {_ON_GPUS}'

CLUSTER_RULES = (
    Rule(
        "not is_loopback(sglang.host)",
        'set sglang.host = "auto", by which each node advertises its own address',
        when=f"{_STARTED} and num_nodes > 1",
        reason="loopback reaches no other node's servers",
    ),
    Rule(
        "not any(is_loopback(url) for url in sglang.urls)",
        "set sglang.urls to addresses that every node reaches",
        when=f"{_SGLANG} and num_nodes > 1",
        reason="loopback is another machine on each node",
    ),
    Rule(
        "processes % num_nodes == 0",
        "start {padded(processes, num_nodes)} processes, or run on {nearest_divisor(processes, num_nodes)} nodes",
        when="num_nodes > 1",
        reason="every node starts equally many",
        path="parallel.num_processes",
    ),
    Rule(
        "processes <= num_nodes * gpus_per_node",
        "use a layout for {num_nodes * gpus_per_node} processes, or start one worker a GPU on "
        "{ceil(processes / gpus_per_node)} nodes (examples/launch; in a dry run --nodes, and --gpus-per-node for larger ones)",
        when=_ON_GPUS,
        path="parallel",
    ),
    Rule(
        _ON_GPUS,
        'set sglang.drafting = "off"',
        when=f'{_STARTED} and sglang.drafting != "off"',
        reason="on a CPU SGLang verifies drafts greedily: responses would be the likeliest tokens, not samples",
        path="sglang.drafting",
    ),
    Rule(
        "sglang.ranks_per_node <= gpus_per_node",
        "set sglang.nodes_per_server = {ceil(sglang.tp_size / gpus_per_node)} with disaggregated servers and p2p, or "
        "sglang.tp_size = {gpus_per_node * sglang.nodes_per_server} or less",
        when=f"{_STARTED} and {_ON_GPUS}",
        reason="each node has tp_size / nodes_per_server ranks of a server",
        path="sglang.tp_size",
    ),
    Rule(
        "server_nodes % sglang.nodes_per_server == 0",
        "set sglang.nodes_per_server = {nearest_divisor(server_nodes, sglang.nodes_per_server)}, or run the policy on "
        "{padded(server_nodes, sglang.nodes_per_server)} nodes",
        when=f"{_STARTED} and sglang.nodes_per_server > 1",
        reason="a server takes whole nodes' parts, one after the other",
    ),
    Rule(
        "sglang.servers_per_node * sglang.tp_size <= gpus_per_node",
        "set sglang.servers_per_node = {gpus_per_node // sglang.tp_size}",
        when=f"{_COLOCATED} and sglang.tp_size <= gpus_per_node",
    ),
    # The trainer's processes use the first GPUs of a node; servers with separate GPUs use the ones after them.
    Rule(
        "processes_per_node + sglang.servers_per_node * sglang.ranks_per_node <= gpus_per_node",
        "set sglang.servers_per_node = {max(1, (gpus_per_node - processes_per_node) // sglang.ranks_per_node)}, or start "
        "{max(1, gpus_per_node - sglang.servers_per_node * sglang.ranks_per_node)} trainer processes a node, on "
        "{ceil(processes / max(1, gpus_per_node - sglang.servers_per_node * sglang.ranks_per_node))} nodes",
        when=f"{_DISAGGREGATED} and sglang.ranks_per_node <= gpus_per_node and processes_per_node <= gpus_per_node",
    ),
)

MEMORY_RULES = (
    Rule("trainer_gib <= gpu_gib", "{trainer_fix}", path="parallel.tp_size", reason="the peak of a training step"),
    Rule(
        "engine_weights_gib < static_gib",
        "set sglang.tp_size = {2 * sglang.tp_size} or more, or raise sglang.mem_fraction_static",
        when=_STARTED,
        reason="mem_fraction_static of what is free at a server's start holds its weights before any cache",
    ),
    Rule(
        "kv_tokens >= fewest_sequences * (sequence_tokens + spare_positions)",
        "set sglang.tp_size = {2 * sglang.tp_size} or more with fewer servers_per_node, raise sglang.mem_fraction_static, "
        "or lower sglang.max_running_requests below {fewest_sequences}",
        when=f"{_STARTED} and engine_weights_gib < static_gib and sglang.max_total_tokens == 0",
        reason="a server holds so few responses of full length that most wait, and the last ones until their deadline",
    ),
    Rule(
        "generating_gib <= gpu_gib",
        "{engine_fix}",
        when=_STARTED,
        reason="weights, cache, CUDA graphs and activations of a server, and what the trainer keeps next to it",
        path="sglang.mem_fraction_static",
    ),
    Rule(
        "node_gib <= host_gib",
        "{host_fix}",
        path="model.offload",
        reason="what is offloaded, weight sync buckets, processes, and verifiers at their limit on rank 0's node",
    ),
)

DEADLINE_RULES = (
    *(
        Rule(
            f"{path} >= response_seconds",
            f"set {path} = {{2 * response_seconds}} or more",
            when=_STARTED,
            reason="the estimate for a batch of longest responses that all begin together",
        )
        for path in ("sglang.request_timeout_seconds", "run.wait_timeout_seconds")
    ),
    Rule(
        "sglang.weight_sync_timeout_seconds >= 2 * sync_seconds",
        "set sglang.weight_sync_timeout_seconds = {4 * sync_seconds} or more",
        when=_STARTED,
        reason="twice the estimate for the bytes of a node's servers",
    ),
)


def cluster_facts(config: Config, processes: int, cluster: Cluster) -> dict[str, Any]:
    """Return the numbers of the machines that formulas refer to."""
    return {
        "num_nodes": cluster.num_nodes,
        "server_nodes": cluster.server_nodes(config, processes),
        "gpus_per_node": cluster.gpus_per_node,
        "gpu_gib": round(cluster.gpu_gib, 1),
        "host_gib": round(cluster.host_gib, 1),
        "processes": processes,
        "processes_per_node": cluster.processes_per_node(processes),
    }


def memory_facts(config: Config, memory: RunMemory, cluster: Cluster) -> dict[str, Any]:
    """Return the memory sizes that formulas refer to, in GiB and tokens."""
    engine, sglang = memory.engine_memory, config.sglang
    facts: dict[str, Any] = {
        "trainer_gib": _gib(memory.trainer),
        "generating_gib": _gib(memory.engine),
        "node_gib": _gib(memory.host),
        "trainer_fix": _trainer_fix(config),
        "engine_fix": _engine_fix(config),
        "host_fix": _host_fix(config, memory, cluster),
        "sequence_tokens": config.longest_sequence,
        "spare_positions": SPARE_POSITIONS,
        "fewest_sequences": min(FEWEST_SEQUENCES, sglang.max_running_requests),
    }
    if engine is not None:
        facts |= {
            "kv_tokens": engine.kv_tokens,
            "engine_weights_gib": _gib(engine.weights),
            "static_gib": _gib(engine.budget),
            "response_seconds": response_seconds(config, memory),
        }
    return facts


def _gib(num_bytes: int) -> float:
    return round(num_bytes / GIB, 1)


def _trainer_fix(config: Config) -> str:
    """Suggest how to reduce the trainer's memory, cheapest first."""
    ways = []
    if config.model.recompute_granularity != "full":
        ways.append('set model.recompute_granularity = "full"')
    offload = [
        f'set {path} = "all"'
        for path, value in (("model.offload", config.model.offload), ("critic.offload", config.critic.offload))
        if value != "all" and config.has_critic
    ]
    ways += offload
    if not config.optimizer.on_host and not config.precision.fp8_param:
        ways.append("set optimizer.on_host = true")
    ways.append(
        "cut the model over more processes (parallel.tp_size, parallel.pp_size) or its optimizer over more nodes"
    )
    return ", or ".join(ways)


def _engine_fix(config: Config) -> str:
    """Suggest how to make room for a server."""
    ways = []
    if config.sglang.placement == "colocated":
        paths = ["model.offload"] * (config.model.offload != "all")
        paths += ["critic.offload"] * (config.has_critic and config.critic.offload != "all")
        ways += [f'set {path} = "all"' for path in paths]
    ways.append(f"set sglang.mem_fraction_static below {config.sglang.mem_fraction_static:g}")
    return ", or ".join(ways)


def _host_fix(config: Config, memory: RunMemory, cluster: Cluster) -> str:
    """Suggest how to use less of a node's memory, cheapest first."""
    ways = []
    workers, of_worker = config.reward.num_processes, config.reward.memory_limit_mb / 1024
    rest = memory.host / GIB - workers * of_worker
    if (fitting := int((cluster.host_gib - rest) / of_worker)) > 0:
        ways.append(f"set reward.num_workers = {max(1, fitting // len(config.reward.verifiers))}")
    ways += [
        f"offload less ({path})"
        for path, value in (("model.offload", config.model.offload), ("critic.offload", config.critic.offload))
        if value != "none" and (config.has_critic or path == "model.offload")
    ]
    return ", or ".join([*ways, "start fewer trainer processes a node"])


def response_seconds(config: Config, memory: RunMemory) -> float:
    """Estimate the seconds that the longest response takes in a full server.

    Each decoding step reads all weights and the caches of all running responses.
    """
    engine = memory.engine_memory
    assert engine is not None, "servers are started by this run"
    # On average half of a response is there when the next token is decoded.
    wanted = config.sglang.max_running_requests * config.longest_sequence // 2
    num_bytes = engine.weights + min(wanted, engine.kv_tokens) * engine.bytes_per_token
    tokens = max(config.rollout.max_response_tokens, config.evaluation_response_tokens)
    return round(tokens * num_bytes / (SLOWEST.memory_bytes_s * SHARES.decode_memory), 1)


def weight_sync_seconds(
    config: Config, architecture: ModelArchitecture, processes: int, cluster: Cluster
) -> float:
    """Estimate the seconds that a weight sync takes on the slowest GPU that is known."""
    traffic = sync_traffic(config, architecture, processes, cluster)
    return round(sum(sync_seconds(config, traffic, cluster, SLOWEST).values()), 1)


def unshared_hooks(config: Config, cluster: Cluster) -> Iterator[Violation]:
    """Yield a violation for each hook named by a file in a run of several nodes: their processes need a module that each can import."""
    if cluster.num_nodes < 2:
        return
    rewards = ("reward.verifier", "reward.shadow_verifier", "model.family")
    for field, path in (*hook_paths(config), *((field, value_of(config, field)) for field in rewards)):
        if path.rpartition(":")[0].endswith(".py"):
            fix = "install it as a package on every node and name it package.module:name"
            yield Violation(
                field, "a module that every node can import", fix, {field: path, "nodes": cluster.num_nodes}
            )


def check(
    config: Config, cluster: Cluster, architecture: ModelArchitecture | None = None, processes: int | None = None
) -> list[Violation]:
    """Return what is wrong between a valid configuration and the machines of its run: the step after `config.validate`.

    Without `architecture`, e.g. if the model does not fit the layout, memory and deadlines are not checked.
    `processes`: of the whole run, by default the configured number.
    """
    processes = config.num_processes if processes is None else processes
    if config.num_critic_processes >= processes:
        return []  # `validate` says so: no process is left for the policy
    outside, facts = out_of_range(config).keys(), cluster_facts(config, processes, cluster)
    violations = [*broken(CLUSTER_RULES, config, facts, outside), *unshared_hooks(config, cluster)]
    if violations or architecture is None or not cluster.gpus_per_node:
        return violations
    memory = run_memory(config, architecture, processes, cluster)
    facts |= memory_facts(config, memory, cluster)
    violations = list(broken(MEMORY_RULES, config, facts, outside))
    if violations:
        return violations
    # Estimates of time are made for a cache that exists.
    if memory.engine_memory is not None and config.rollout.engine == "sglang":
        facts["sync_seconds"] = weight_sync_seconds(config, architecture, processes, cluster)
    return list(broken(DEADLINE_RULES, config, facts, outside))


def validate_and_check(
    config: Config, cluster: Cluster, architecture: ModelArchitecture | None = None, processes: int | None = None
) -> list[Violation]:
    """Return everything that is wrong with a run: `config.validate`, then `check`."""
    violations = validate(config, processes, architecture)
    # Memory is computed only for sizes that divide evenly.
    return [*violations, *check(config, cluster, architecture if not violations else None, processes)]


def require_runnable(
    config: Config, cluster: Cluster, architecture: ModelArchitecture | None = None, processes: int | None = None
) -> None:
    """Raise ConfigError with everything that is wrong with a run, if there is anything."""
    if violations := validate_and_check(config, cluster, architecture, processes):
        raise ConfigError(violations)
