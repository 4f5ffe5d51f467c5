"""Lines that describe a run before it starts: layout, precision, memory and the numbers that decide on training."""

from __future__ import annotations

from collections.abc import Iterator
from math import exp

from megatron_dapo.config import Config
from megatron_dapo.config.algorithm_schema import FunctionAdvantageConfig
from megatron_dapo.config.distillation_schema import DistillationConfig
from megatron_dapo.config.loss_schema import (
    DppoTvLossConfig,
    FunctionLossConfig,
    GmpoLossConfig,
    PolicyLossConfig,
    SapoLossConfig,
)
from megatron_dapo.config.model_schema import OptimizerConfig
from megatron_dapo.models.architecture import ModelArchitecture
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.plan import cpu
from megatron_dapo.plan.check import response_seconds, weight_sync_seconds
from megatron_dapo.plan.cluster import Cluster
from megatron_dapo.plan.memory import EngineMemory, ModelMemory, RunMemory, optimizer_ranks, run_memory
from megatron_dapo.precision import RECIPES, recipe_name
from megatron_dapo.rounding import GIB
from megatron_dapo.run.plan import Plan
from megatron_dapo.trainer.topology import critic_layout

MOST_HOST = 0.9  # share of a node's memory that processes and pinned memory may hold permanently


def describe(plan: Plan) -> Iterator[str]:
    """Yield the resolved numbers that decide what is trained."""
    config = plan.loaded.config
    rollout, training, loss = config.rollout, config.training, config.algorithm.loss
    mini_batches = rollout.prompts_per_step // training.mini_batch_prompts * training.epochs
    yield _layout(plan)
    yield from data_lines(plan)
    yield from precision_lines(config, plan.architecture, plan.layout)
    yield from memory_lines(plan)
    yield (
        f"a train step: {rollout.prompts_per_step} prompts x {rollout.group_size} responses, {mini_batches} optimizer "
        f"steps of {training.mini_batch_prompts * rollout.group_size} responses; {config.run.total_steps} train steps"
    )
    if plan.cluster.cores:
        problems = plan.prompts.held_out if plan.prompts else 0
        estimate = cpu.estimate(config, plan.architecture, plan.cluster.cores, plan.cluster.has_bf16, problems)
        yield cpu.step_line(config, estimate, plan.cluster.cores)
    yield (
        f"lengths: prompt <= {config.data.max_prompt_tokens}, response <= {rollout.max_response_tokens} tokens; "
        f"{_overlong(config)}"
    )
    yield f"loss: {_loss_line(loss)}, {loss.aggregation}; advantage {_advantage(config)}"
    if config.distillation.teachers:
        yield f"distillation: {_teachers(config.distillation)}"
    of_critic = f"; critic {_rate(config.critic.optimizer)}" if config.has_critic else ""
    yield f"learning rate: {_rate(config.optimizer)}{of_critic}"
    yield f"output: {config.run.output_dir}"


def data_lines(plan: Plan) -> Iterator[str]:
    """Yield how many prompts are trained and held out, if they were counted, and a warning if a step needs more."""
    counts, data, per_step = plan.prompts, plan.loaded.config.data, plan.loaded.config.rollout.prompts_per_step
    if counts is None:
        return
    train = f"{counts.train:,} prompts to train" if counts.train else "prompts to train"
    if data.holds_out:
        how = f"by a hash of their text (data.held_out_share = {data.held_out_share:g}, as data.eval_paths is empty)"
        yield f"data: {train}, {counts.held_out} held out {how}"
    elif counts.held_out:
        yield f"data: {train}, {counts.held_out:,} held out"
    elif not data.has_held_out:
        yield f"data: {train}, none held out: nothing will say whether the run learned; set data.eval_paths"
    if 0 < counts.train < per_step:
        yield (
            f"warning: a step needs {per_step} prompts (rollout.prompts_per_step) and there are {counts.train}: each is sampled "
            f"{per_step / counts.train:.1f} times a step; lower it to {max(1, counts.train // 4)} or less"
        )


def describe_pretraining(plan: Plan) -> Iterator[str]:
    """Yield the same of a critic's pretraining."""
    config = plan.loaded.config
    rollout, steps, critic = config.rollout, config.value_pretraining, config.critic
    layout = critic_layout(config, plan.num_processes)
    yield _layout(plan)
    yield from memory_lines(plan)
    yield (
        f"critic from {critic.path or config.model.path}, {layout.describe()}; {steps.min_steps} to {steps.max_steps} "
        f"train steps of {rollout.prompts_per_step} prompts x {rollout.group_size} responses of at most "
        f"{rollout.max_response_tokens} tokens"
    )
    yield f"learning rate: {_rate(critic.optimizer)}"
    yield f"output: {config.run.output_dir}"


def describe_sft(plan: Plan) -> Iterator[str]:
    """Yield the same of supervised fine-tuning."""
    config = plan.loaded.config
    yield _layout(plan)
    yield from memory_lines(plan)
    yield (
        f"supervised fine-tuning on {', '.join(path.name for path in config.data.train_paths)}: {config.run.total_steps} train "
        f"steps of {config.rollout.prompts_per_step} responses, {config.algorithm.loss.aggregation}"
    )
    yield f"learning rate: {_rate(config.optimizer)}"
    yield f"output: {config.run.output_dir}"


def _rate(optimizer: OptimizerConfig) -> str:
    return f"{optimizer.learning_rate:g} {optimizer.schedule} after {optimizer.warmup_steps} {optimizer.warmup_unit}s"


def _layout(plan: Plan) -> str:
    config, critic = plan.loaded.config, ""
    if own := config.num_critic_processes:
        critic = f", the critic {critic_layout(config, plan.num_processes).describe()} on {own} more"
    num_processes = plan.layout.world_size
    processes = "1 process" if num_processes == 1 else f"{num_processes} processes"
    return f"layout: {plan.layout.describe()} on {processes}{critic}, {config.model.dtype}"


def _advantage(config: Config) -> str:
    """Return the estimator; with a critic also its start, its layout and its windows."""
    if not config.has_critic:
        advantage = config.algorithm.advantage
        return advantage.function if isinstance(advantage, FunctionAdvantageConfig) else advantage.name
    section, layout = config.advantage_estimation, config.critic_parallel
    lambdas = f"{section.policy_lambda:g}" if section.lambda_rule == "fixed" else section.lambda_rule
    window = f", windows of {config.window.tokens} tokens" if config.algorithm.name == "tppo" else ""
    return (
        f"of a critic from {config.critic.path or config.model.path} (TP{layout.tp_size} PP{layout.pp_size} "
        f"CP{layout.cp_size}), gamma {section.gamma:g}, lambda {lambdas} / {section.critic_lambda:g}{window}"
    )


def _overlong(config: Config) -> str:
    punishment = config.reward.overlong_punishment
    if not punishment.enabled:
        return "no overlong punishment"
    start = punishment.max_length - punishment.cache_length
    return f"overlong punishment from {start} (0) to {punishment.max_length} tokens (-{punishment.factor:g})"


# ---- precision: the format of every layer, and the multiples that tokens are padded to


def precision_lines(config: Config, architecture: ModelArchitecture, layout: ParallelLayout) -> Iterator[str]:
    """Yield the lines of the policy; reference and critic multiply by the same recipe."""
    section, count, dtype = config.precision, architecture.num_layers, config.model.dtype
    name = recipe_name(section.recipe, dtype)
    recipe = RECIPES[name]
    if not recipe.is_fp8:
        yield f"precision: {name} in all layers, {recipe.products}"
        return
    first, last = section.num_layers_at_start_in_bf16, count - section.num_layers_at_end_in_bf16
    others = [_numbers(start, stop) for start, stop in ((0, first), (last, count)) if stop > start]
    others.append("embedding, norms, router, attention" if architecture.num_experts else "embedding, norms, attention")
    yield (
        f"precision: {name}: projections of attention and {'experts' if architecture.num_experts else 'MLP'} in "
        f"{_numbers(first, last)} of {count}, {recipe.products}; {', '.join(others)} in {dtype}; log-prob head "
        f"{config.model.logprob_implementation}"
    )
    experts = "; each expert's tokens for its own products" if architecture.num_experts else ""
    yield (
        f"padding: micro-batches to a multiple of {layout.micro_batch_alignment} tokens ({recipe.token_multiple} on a "
        f"rank){experts}; both sizes of a rank's part of a weight are multiples of {recipe.size_multiple}"
    )


def _numbers(start: int, stop: int) -> str:
    """Return the numbers of layers, counted from 1."""
    return f"layer {stop}" if stop == start + 1 else f"layers {start + 1} to {stop}"


# ---- machines: engines and their caches, memory of a GPU and of a node


def memory_lines(plan: Plan) -> Iterator[str]:
    """Yield the lines of a run whose configuration was checked for these machines."""
    config, processes, cluster = plan.loaded.config, plan.num_processes, plan.cluster
    memory = run_memory(config, plan.architecture, processes, cluster)
    has_gpus = cluster.gpus_per_node > 0
    nodes = f"{cluster.num_nodes} node{'s' if cluster.num_nodes > 1 else ''}"
    gpus = f" of {cluster.gpus_per_node} GPUs of {cluster.gpu_gib:.3g} GiB" if has_gpus else " without GPUs"
    yield f"machines: {nodes}{gpus}; trainer processes a node: {cluster.processes_per_node(processes)}"
    yield from _engines(plan, memory)
    policy_ranks = processes - config.num_critic_processes
    yield f"memory of the policy on its fullest rank: {_parts(config, memory.policy, policy_ranks)}"
    if critic := memory.critic:
        activations = _gib(critic.training - critic.state)
        yield f"memory of the critic on its fullest rank: state {_gib(critic.state)}, activations {activations}"
    if not has_gpus:
        free = f" of {cluster.host_gib:.1f} GiB that are free" if cluster.cores else ""
        yield f"memory of the run: {_gib(cpu.memory_bytes(config, memory, processes))}{free}"
        return
    generating = f", while engines generate {_gib(memory.engine)}" if memory.engine else ""
    yield f"memory of a GPU: while training {_gib(memory.trainer)}{generating}"
    yield f"host memory of a node: {_gib(memory.host)} of {cluster.host_gib:.0f} GiB"
    yield from memory_warnings(config, memory, processes, cluster)


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
    if engine.held_by_states is not None and engine.held_by_states < sglang.max_running_requests:
        yield (
            f"warning: requests will queue: an engine has recurrent states for {engine.held_by_states} responses, "
            f"sglang.max_running_requests is {sglang.max_running_requests}; lower it, or raise sglang.mem_fraction_static"
        )


def states_of(engine: EngineMemory) -> str:
    """Return how many responses have recurrent states, for a line about the cache."""
    return "" if engine.held_by_states is None else f"recurrent states of {engine.held_by_states} responses; "


def _engines(plan: Plan, memory: RunMemory) -> Iterator[str]:
    config, engine = plan.loaded.config, memory.engine_memory
    sglang = config.sglang
    if config.rollout.engine == "embedded" or engine is None:
        where = "given by sglang.urls" if config.rollout.engine == "sglang" else "inside the trainer's processes"
        yield f"engines: {memory.num_engines}, {where}"
        return
    yield (
        f"engines: {memory.num_engines} SGLang servers of TP{sglang.tp_size}, {sglang.places}, "
        f"{sglang.placement}, weights by {sglang.weight_sync_transport}"
    )
    if plan.cluster.gpus_per_node:
        sync = weight_sync_seconds(config, plan.architecture, plan.num_processes, plan.cluster)
        yield (
            f"KV cache of an engine: {engine.kv_tokens} tokens at {engine.bytes_per_token} bytes a rank, "
            f"{engine.kv_tokens / config.longest_sequence:.1f} sequences of {config.longest_sequence}; "
            f"{states_of(engine)}weights {_gib(engine.weights)} a rank"
        )
        yield (
            f"estimates: {response_seconds(config, memory):.0f} s for a batch of longest responses, "
            f"{sync:.0f} s for a weight sync"
        )


def _parts(config: Config, model: ModelMemory, ranks: int) -> str:
    replicas, of_experts = optimizer_ranks(config.parallel, ranks)
    cut = ""
    if config.parallel.use_distributed_optimizer and replicas > 1:
        experts = f", of experts {of_experts}" if of_experts != replicas else ""
        cut = f" (cut over {replicas} ranks{experts})"
    place = "" if model.piece is None else f" in host memory, {_gib(model.piece)} of them at a time on the GPU"
    return (
        f"weights {_gib(model.weights)}, fp32 gradients {_gib(model.gradients)}, main params and moments "
        f"{_gib(model.optimizer)}{cut}{place}, activations {_gib(model.training - model.state)}"
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= 0.1 * GIB else f"{num_bytes / 2**20:.1f} MiB"


def _teachers(section: DistillationConfig) -> str:
    """Return the divergence and the teachers with what they teach."""
    divergence = f"{section.divergence} (beta {section.beta:g})" if section.divergence == "js" else section.divergence
    teachers = (
        f"{one.name} ({one.url or 'the whole vocabulary'}) of "
        f"{', '.join(one.sources) or 'all prompts'}{', with rewards' if one.rl else ''}"
        for one in section.teachers
    )
    return f"{divergence}, {section.coefficient:g} times; {'; '.join(teachers)}"


def _loss_line(loss: PolicyLossConfig) -> str:
    """Return the loss's name and what bounds it."""
    if isinstance(loss, FunctionLossConfig):
        return loss.function
    if isinstance(loss, GmpoLossConfig):
        return f"{loss.name}, ratio in [{exp(-loss.clip_log_ratio_low):.2f}, {exp(loss.clip_log_ratio_high):.2f}]"
    if isinstance(loss, SapoLossConfig):
        return f"{loss.name}, temperatures {loss.temperature_positive:g} and {loss.temperature_negative:g}"
    if isinstance(loss, DppoTvLossConfig):
        return f"{loss.name}, divergence up to {loss.divergence_low:g} (down) and {loss.divergence_high:g} (up)"
    return f"{loss.name}, ratio in [{1 - loss.clip_ratio_low:g}, {1 + loss.clip_ratio_high:g}]"
