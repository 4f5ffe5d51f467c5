"""Search for layouts that fit a number of GPUs, ranked by the planned seconds of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_dapo.config.derive import derive
from megatron_dapo.config.schema import Config
from megatron_dapo.models.architecture import ModelArchitecture
from megatron_dapo.plan.check import FEWEST_SEQUENCES, validate_and_check
from megatron_dapo.plan.cluster import Cluster
from megatron_dapo.plan.device import Gpu
from megatron_dapo.plan.memory import SPARE_POSITIONS, RunMemory, engine_memory, free_at_start, run_memory
from megatron_dapo.plan.rollout import Lengths
from megatron_dapo.plan.step import StepPlan, generation_queue, most_seconds, plan_step, step_lengths
from megatron_dapo.rounding import GIB

TENSOR = (1, 2, 4, 8)
CONTEXT = (2, 4, 8)  # sizes besides 1
LONG_SEQUENCE = 16384  # tokens from which context parallelism pays off
MOST_STAGES = 32
MOST_EXPERT_RANKS = 64
MOST_STATIC = 0.85  # largest sglang.mem_fraction_static
MARGIN = 5 * GIB  # left free on each GPU: published measurements of NCCL's memory differ by gigabytes
MOST_LISTED = 10
TRAINER_MEMORY, SERVER_MEMORY = "trainer memory", "KV cache"  # reasons for not fitting
NODES = (2, 4, 8)  # nodes of one server
_DISAGGREGATED = {"sglang.placement": "disaggregated", "sglang.weight_sync_transport": "p2p"}
FEWEST_RUNNING = 2  # responses that a server must be able to decode at once


@dataclass(frozen=True)
class Ranked:
    """A layout that fits, and the reason for its rank."""

    plan: StepPlan
    settings: dict[str, Any]  # the layout's settings, by path
    binding: str
    flip: str = ""


@dataclass(frozen=True)
class Found:
    """Result of a search."""

    layouts: tuple[Ranked, ...]
    num_tried: int
    num_fitting: int
    reasons: dict[str, int]  # reason for not fitting -> number of layouts
    needs_fp8: bool = False  # True if no layout with 16-bit servers fits
    fp8_seconds: float | None = None  # step time of the fastest FP8 layout, if 16-bit servers have little room
    refused: str = ""  # the validator's message for the fastest layout, if it accepts none
    over_nodes: Ranked | None = None  # the fastest with 16-bit servers over several nodes, if no one node's GPUs hold one


def search(
    config: Config,
    architecture: ModelArchitecture,
    num_gpus: int,
    gpu: Gpu,
    cluster: Cluster,
    mean_response: float | None = None,
) -> Found:
    """Return the layouts that fit `num_gpus` of a cluster and pass validation, fastest first."""
    found = _search(config, architecture, num_gpus, gpu, cluster, mean_response)
    spread = None
    if not found.layouts and SERVER_MEMORY in found.reasons:
        spread = _over_nodes(config, architecture, gpu, cluster, mean_response)
    is_short = not found.layouts or "sglang.max_running_requests" in found.layouts[0].settings
    if not is_short or config.sglang.quantization != "none":
        return spread or found
    # FP8 weights halve the servers' weight memory, but widen the gap between rollout and trainer log-probs.
    setting = {"sglang.quantization": "fp8"}
    quantized = _search(derive(config, setting), architecture, num_gpus, gpu, cluster, mean_response)
    if found.layouts:
        seconds = quantized.layouts[0].plan.total if quantized.layouts else None
        return replace(found, fp8_seconds=seconds)
    if spread and not quantized.layouts:
        return spread
    layouts = tuple(replace(one, settings=one.settings | setting) for one in quantized.layouts)
    refused, over_nodes = found.refused or quantized.refused, spread.layouts[0] if spread else None
    return replace(quantized, layouts=layouts, needs_fp8=bool(layouts), refused=refused, over_nodes=over_nodes)


def _over_nodes(
    config: Config, architecture: ModelArchitecture, gpu: Gpu, cluster: Cluster, mean_response: float | None
) -> Found | None:
    """Return the layouts with servers over several nodes, with some GPUs of each; None if there are none.

    For models that the GPUs of one node cannot hold in any number.
    """
    best = None
    for of_server in (size for size in TENSOR if size < cluster.gpus_per_node):
        num_gpus = cluster.num_nodes * (cluster.gpus_per_node - of_server)
        found = _search(config, architecture, num_gpus, gpu, cluster, mean_response, of_server)
        if found.layouts and (best is None or found.layouts[0].plan.total < best.layouts[0].plan.total):
            best = found
    return best


def _search(
    config: Config,
    architecture: ModelArchitecture,
    num_gpus: int,
    gpu: Gpu,
    cluster: Cluster,
    mean_response: float | None,
    of_server: int = 0,
) -> Found:
    """Search for layouts of `num_gpus` processes. `of_server`: GPUs of each node that belong to servers over several nodes;
    0: servers share the trainer's."""
    own = replace(cluster, gpus_per_node=cluster.gpus_per_node - of_server)
    plans: list[tuple[dict[str, Any], StepPlan]] = []
    reasons = Counter[str]()
    lengths = step_lengths(config, mean_response)
    kinds = recomputations(config, architecture)
    # Context parallelism with packed sequences has never run on GPUs, so it is tried only if nothing fits without it.
    without, more = (list(candidates(config, architecture, num_gpus, own, sizes)) for sizes in ((1,), CONTEXT))
    for index, layout in enumerate((*without, *more)):
        if index == len(without) and plans:
            break
        layout |= _DISAGGREGATED if of_server else {}
        trainer, probe, memory, reason = _recomputed(config, layout, kinds, architecture, cluster, of_server)
        servers = [] if reason else list(_servers(probe, memory, architecture, cluster, lengths, gpu, of_server))
        if not servers:
            reasons[reason or SERVER_MEMORY] += 1
            continue
        _, server = min(servers, key=lambda one: one[0])
        chosen = derive(probe, server)
        plans.append((trainer | server, plan_step(chosen, architecture, num_gpus, cluster, gpu, mean_response)))
    plans.sort(key=lambda one: one[1].total)
    accepted, refused = list[Ranked](), ""
    for settings, plan in plans:
        if len(accepted) == MOST_LISTED:
            break
        if violations := validate_and_check(plan.config, plan.cluster, architecture, plan.processes):
            refused = refused or str(violations[0])
        else:
            accepted.append(Ranked(plan, settings, _binding(plan)))
    tried = reasons.total() + len(plans)
    return Found(_with_flips(accepted), tried, len(plans), dict(reasons), refused="" if accepted else refused)


def _recomputed(
    config: Config,
    layout: dict[str, Any],
    kinds: Sequence[dict[str, Any]],
    architecture: ModelArchitecture,
    cluster: Cluster,
    of_server: int,
) -> tuple[dict[str, Any], Config, RunMemory, str]:
    """Return the settings of a layout with the fastest recomputation that fits, and what `_trainer_fits` says of it.

    Slower kinds would leave the servers no more room. The last one needs least memory: most layouts do not fit even with it.
    """
    *faster, least = (layout | kind for kind in kinds)
    last = (least, *_trainer_fits(config, least, architecture, cluster, of_server))
    if last[-1] == TRAINER_MEMORY:
        return last
    fits = ((one, *_trainer_fits(config, one, architecture, cluster, of_server)) for one in faster)
    return next((one for one in fits if one[-1] != TRAINER_MEMORY), last)


def _trainer_fits(
    config: Config, settings: dict[str, Any], architecture: ModelArchitecture, cluster: Cluster, of_server: int
) -> tuple[Config, RunMemory, str]:
    """Return the configuration, its memory with a small server, and which memory is too small for the trainer ("":
    none)."""
    largest = _server_sizes(architecture, cluster, of_server)[-1:] or [{"sglang.tp_size": cluster.gpus_per_node}]
    changed = derive(config, {**settings, **largest[0], "sglang.servers_per_node": 1})
    memory = run_memory(changed, architecture, settings["parallel.num_processes"], cluster)
    if memory.trainer > cluster.gpu_bytes - MARGIN:
        return changed, memory, TRAINER_MEMORY
    return changed, memory, "host memory" if memory.host > cluster.host_gib * GIB else ""


def _servers(
    config: Config,
    memory: RunMemory,
    architecture: ModelArchitecture,
    cluster: Cluster,
    lengths: Lengths,
    gpu: Gpu,
    of_server: int,
) -> Iterator[tuple[float, dict[str, Any]]]:
    """Yield the settings of servers that fit next to the trainer, each with its seconds of generation."""
    assert memory.engine_memory is not None, "servers are started by this run"
    trainer = memory.engine - memory.engine_memory.static
    fewest = min(FEWEST_SEQUENCES, config.sglang.max_running_requests)
    whole = config.longest_sequence + SPARE_POSITIONS
    for settings in _server_sizes(architecture, cluster, of_server):
        count = settings["sglang.servers_per_node"] * cluster.num_nodes // settings.get("sglang.nodes_per_server", 1)
        free = free_at_start(derive(config, settings), cluster)
        hundredths = int(100 * (cluster.gpu_bytes - trainer - MARGIN) / free)
        settings["sglang.mem_fraction_static"] = max(0.01, min(MOST_STATIC, hundredths / 100))
        engine = engine_memory(derive(config, settings), architecture, cluster)
        holds = engine.holds(whole)
        if holds < fewest:  # a server limited to fewer requests may still be the only one that fits
            settings["sglang.max_running_requests"] = holds
        if holds >= min(fewest, FEWEST_RUNNING):
            changed = derive(config, settings)
            queue = generation_queue(changed, architecture, engine, count, lengths, gpu)
            yield queue.seconds, settings


def _server_sizes(architecture: ModelArchitecture, cluster: Cluster, of_server: int) -> list[dict[str, Any]]:
    """Return the sizes of servers to try, smallest first: of one node's GPUs, or of `of_server` GPUs on each of several."""
    if not of_server:
        sizes = [size for size in TENSOR if size <= cluster.gpus_per_node and _serves(architecture, size)]
        return [{"sglang.tp_size": size, "sglang.servers_per_node": cluster.gpus_per_node // size} for size in sizes]
    return [
        {"sglang.tp_size": of_server * nodes, "sglang.nodes_per_server": nodes, "sglang.servers_per_node": 1}
        for nodes in NODES
        if cluster.num_nodes % nodes == 0 and _serves(architecture, of_server * nodes)
    ]


def candidates(
    config: Config, architecture: ModelArchitecture, num_gpus: int, cluster: Cluster, contexts: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Yield settings of layouts whose sizes divide the model's and each other, without their recomputation.

    `contexts`: context-parallel sizes to try.
    """
    per_node = cluster.gpus_per_node
    for tensor in (size for size in TENSOR if _cuts(architecture, size) and size <= per_node):
        for pipeline in range(1, min(MOST_STAGES, architecture.num_layers) + 1):
            for context in contexts:
                is_long = config.longest_sequence >= LONG_SEQUENCE
                if num_gpus % (tensor * pipeline * context) or context > 1 and not is_long:
                    continue
                data = num_gpus // (tensor * pipeline * context)
                if data > config.training.mini_batch_prompts * config.rollout.group_size:
                    continue
                yield from _with_the_rest(architecture, (tensor, pipeline, context, data), num_gpus)


def recomputations(config: Config, architecture: ModelArchitecture) -> list[dict[str, Any]]:
    """Return the settings of each kind of recomputation to try, fastest first.

    Between none and full, only the MLP or the experts are tried: fused attention keeps almost nothing that recomputing
    "core_attn" would save, and the memory rules do not cover "layernorm" and "moe_act".
    """
    kind, modules = "model.recompute_granularity", "megatron.recompute_modules"
    selective = [{kind: "selective", modules: ["moe" if architecture.num_experts else "mlp"]}]
    if architecture.num_experts and config.rollout.routing_replay:
        selective = []  # routing replay does not work with recomputed experts
    own = {*config.megatron, *config.critic.megatron}
    # --set can replace a value in the recipe's [megatron] but not remove it, and each kind allows only its own fields.
    if own & {"recompute_method", "recompute_num_layers"}:
        return [{kind: "full"}]
    if "recompute_modules" in own:
        return [{kind: "selective", modules: ["core_attn"]}, *selective]
    return [{kind: "none"}, *selective, {kind: "full"}]


def splits(num_layers: int, stages: int) -> Iterator[tuple[int, int]]:
    """Yield the numbers of layers of the first and the last stage; (0, 0) is an even split.

    The even split comes first if the layers allow it. The other split gives the first and last stage fewer layers than
    the stages between, because they also hold the embedding and the head.
    """
    is_even = num_layers % stages == 0
    if is_even:
        yield 0, 0
    if stages == 1:
        return
    between = -(-num_layers // stages) + is_even
    ends = num_layers - between * (stages - 2)
    last = ends // 2 - (is_even and stages == 2)
    if last >= 1:
        yield ends - last, last


def _with_the_rest(
    architecture: ModelArchitecture, sizes: tuple[int, int, int, int], num_gpus: int
) -> Iterator[dict[str, Any]]:
    tensor, pipeline, context, data = sizes
    experts = [1]
    if architecture.num_experts:
        experts = [
            size
            for size in (1, 2, 4, 8, 16, 32, 64)
            if size <= MOST_EXPERT_RANKS
            and architecture.num_experts % size == 0
            and (data * context * tensor) % size == 0
        ]
    stages = [(1, first, last) for first, last in splits(architecture.num_layers, pipeline)]
    if pipeline > 1 and architecture.num_layers % (2 * pipeline) == 0:
        stages.append((2, 0, 0))
    for expert in experts:
        for chunk, first, last in stages:
            for on_host in (False, True):
                yield {
                    "parallel.tp_size": tensor,
                    "parallel.pp_size": pipeline,
                    "parallel.vpp_size": chunk,
                    "parallel.first_stage_layers": first,
                    "parallel.last_stage_layers": last,
                    "parallel.cp_size": context,
                    "parallel.ep_size": expert,
                    # Experts are distributed over expert ranks only, not cut over tensor ranks as well.
                    "parallel.etp_size": 1 if expert > 1 else 0,
                    "parallel.sequence_parallel": tensor > 1,
                    "parallel.num_processes": num_gpus,
                    "model.offload": "all",
                    "critic.offload": "all",
                    "optimizer.on_host": on_host,
                    "critic.optimizer.on_host": on_host,
                    "critic.parallel.num_processes": 0,
                    "sglang.placement": "colocated",
                    "sglang.weight_sync_transport": "shared_memory",
                }


def _cuts(a: ModelArchitecture, tensor: int) -> bool:
    sizes = (a.num_attention_heads, a.num_key_value_heads, a.intermediate_size if a.has_dense_layers else tensor)
    return all(size % tensor == 0 for size in sizes)


def _serves(a: ModelArchitecture, ranks: int) -> bool:
    groups = a.num_key_value_heads
    return a.num_attention_heads % ranks == 0 and (groups % ranks == 0 or ranks % groups == 0)


def _binding(plan: StepPlan) -> str:
    """Describe the layout's bottleneck in time and its smallest memory headroom."""
    phase, name, seconds = most_seconds(plan)
    room = (plan.cluster.gpu_bytes - plan.peak) / GIB
    fullest = max(plan.memory.phases, key=lambda one: one.total)
    return (
        f"{name} in {phase}, {100 * seconds / plan.total:.0f} % of the step; memory: {fullest.phase}, "
        f"{room:.1f} GiB of {plan.cluster.gpu_gib:g} left"
    )


def _with_flips(layouts: list[Ranked]) -> tuple[Ranked, ...]:
    """Describe what would change each layout's rank: what could overtake the first, what the others would have to
    save."""
    if not layouts:
        return ()
    best = layouts[0]
    found = []
    for rank, one in enumerate(layouts):
        if rank:
            found.append(replace(one, flip=_loss(one.plan, best.plan)))
        else:
            found.append(replace(one, flip=_threat(layouts)))
    return tuple(found)


def _loss(plan: StepPlan, best: StepPlan) -> str:
    """Describe how much time a layout would have to save to rank first."""
    difference = plan.total - best.total
    phases = sorted(plan.seconds, key=lambda phase: best.of_phase(phase) - plan.of_phase(phase))
    phase = phases[0]
    more = plan.of_phase(phase) - best.of_phase(phase)
    names = set(plan.seconds[phase]) | set(best.seconds.get(phase, {}))
    name = max(names, key=lambda n: plan.seconds[phase].get(n, 0.0) - best.seconds.get(phase, {}).get(n, 0.0))
    if difference < 0.005 * best.total:
        return f"as fast as the first, with {(best.peak - plan.peak) / GIB:+.1f} GiB of memory left"
    return f"first if {phase} took {difference:.0f} s less: {more:+.0f} s there, most of it {name}"


def _threat(layouts: list[Ranked]) -> str:
    """Describe what would put another layout first: GPUs with less memory, or a phase slower than planned."""
    best = layouts[0].plan
    smaller = next((one for one in layouts[1:] if one.plan.peak < best.peak - GIB), None)
    text = f"needs {best.peak / GIB:.1f} GiB"
    if len(layouts) > 1:
        text += f"; number 2 takes {layouts[1].plan.total / best.total - 1:.1%} longer"
    if smaller:
        text += f"; on GPUs with less, number {layouts.index(smaller) + 1} ({smaller.plan.peak / GIB:.1f} GiB)"
    for one in layouts[1:]:
        saved = {phase: best.of_phase(phase) - one.plan.of_phase(phase) for phase in best.seconds}
        phase = max(saved, key=lambda name: saved[name])
        difference = one.plan.total - best.total
        if saved[phase] > 0.05 * best.total and difference > 0:
            factor = 1 + difference / saved[phase]
            return f"{text}; number {layouts.index(one) + 1} would be first if {phase} took {factor:.2f} times as long everywhere"
    return text
