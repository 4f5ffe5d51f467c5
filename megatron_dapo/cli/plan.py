"""Lines that sum up a configuration before the run starts, and the list of everything that is wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from megatron_dapo.cli.memory_plan import memory_lines
from megatron_dapo.cli.precision_plan import precision_lines
from megatron_dapo.config import Config, ConfigError, LoadedConfig, layout_overrides, load_config
from megatron_dapo.config.algorithm_schema import FunctionAdvantageConfig, FunctionLossConfig, PolicyLossConfig
from megatron_dapo.config.inputs import check_inputs
from megatron_dapo.config.model_schema import OptimizerConfig
from megatron_dapo.config.rules import UnusableInput, Violation
from megatron_dapo.doctor.hub_inputs import local_copies
from megatron_dapo.doctor.inputs import input_problems, quick_problems
from megatron_dapo.models.architecture import ModelArchitecture
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.plan.check import validate_and_check
from megatron_dapo.plan.cluster import GPUS_PER_NODE, GPU_GIB, HOST_GIB, Cluster, cluster_for, server_gpus
from megatron_dapo.trainer.topology import critic_layout, parallel_layout


@dataclass(frozen=True)
class Machines:
    """Machines of a run as far as they are known; None: as many as the layout asks for."""

    num_nodes: int | None = None
    gpus_per_node: int = GPUS_PER_NODE  # 0: the run is on CPUs
    gpu_gib: float = GPU_GIB
    host_gib: float = HOST_GIB
    num_tasks: int | None = None  # processes that a launcher will start
    gpus_here: int = 0  # of the machine of a dry run, where nothing else is said; 0: none, or not known


# What is read of the inputs: nothing, what needs no heavy import, or everything.
Inputs = Literal["none", "quick", "all"]
ONE_NODE_OF_CPUS = Machines(num_nodes=1, gpus_per_node=0)


@dataclass(frozen=True)
class Plan:
    """A configuration that may be run."""

    loaded: LoadedConfig
    overrides: tuple[str, ...]  # all of them, for the processes that load the recipe again
    layout: ParallelLayout  # of the policy
    num_processes: int  # of the whole run
    cluster: Cluster
    architecture: ModelArchitecture | None = None  # of the policy


def make_plan(
    recipe: Path,
    overrides: Sequence[str],
    layout: str | None,
    output_dir: Path | None,
    machines: Machines,
    adapt: Callable[[Config], Config] = lambda config: config,
    inputs: Inputs = "none",
) -> Plan:
    """Load, check everything, and raise ConfigError with all violations at once.

    `adapt`: to what is run where that is not the recipe's own run. `inputs`: check what is in the files that are named, too, and
    for "all" (seconds) try what a run starts. Models and data of the Hub are downloaded for either.
    """
    merged = [*overrides]
    merged += layout_overrides(layout) if layout else []
    merged += [f"run.output_dir={output_dir}"] if output_dir else []
    loaded = load_config(recipe, merged)
    absent: list[Violation] = []
    if inputs != "none":
        copies, absent = local_copies(loaded)
        if copies:
            merged += copies
            loaded = load_config(recipe, merged)
    loaded = replace(loaded, config=adapt(loaded.config))
    config = loaded.config
    architecture, problems = check_inputs(config)
    problems = [*absent, *(one for one in problems if one.path not in {other.path for other in absent})]
    cluster = cluster_for(config, machines.num_nodes, machines.gpus_per_node, machines.gpu_gib, machines.host_gib)
    processes = _processes(config, machines, cluster)
    problems += validate_and_check(config, cluster, architecture, processes)
    needed = processes + server_gpus(config)
    if 0 < machines.gpus_here < needed and cluster.num_nodes == 1:
        fix = f"use a layout for {machines.gpus_here}, or --gpus-per-node {needed} where it is for another machine"
        problems.append(
            UnusableInput(
                "parallel", f"the run needs {needed} GPUs of its node, this machine has {machines.gpus_here}", fix
            )
        )
    if inputs == "all":
        problems += input_problems(config, is_here=cluster.num_nodes == 1)
    elif inputs == "quick" and not problems:
        problems += quick_problems(config)
    if problems:
        raise ConfigError(problems, str(recipe))
    return Plan(
        loaded=loaded,
        overrides=tuple(merged),
        layout=parallel_layout(config, processes),
        num_processes=processes,
        cluster=cluster,
        architecture=architecture,
    )


def _processes(config: Config, machines: Machines, cluster: Cluster) -> int:
    """Return the processes of the run: those that the configuration names, else those that fill the machines that are given."""
    if config.parallel.num_processes or machines.num_nodes is None:
        return config.num_processes
    if machines.num_tasks:
        return machines.num_tasks
    trainer_gpus = cluster.gpus_per_node - server_gpus(config)
    return cluster.num_nodes * trainer_gpus if cluster.num_nodes > 1 and trainer_gpus > 0 else config.num_processes


def describe(plan: Plan) -> list[str]:
    """The resolved numbers that decide what is trained."""
    config = plan.loaded.config
    rollout, training, optimizer, algorithm = config.rollout, config.training, config.optimizer, config.algorithm
    mini_batches = rollout.prompts_per_step // training.mini_batch_prompts * training.epochs
    return [
        _layout(plan),
        *(precision_lines(config, plan.architecture, plan.layout) if plan.architecture else ()),
        *_memory(plan),
        f"a train step: {rollout.prompts_per_step} prompts x {rollout.group_size} responses, {mini_batches} optimizer "
        f"steps of {training.mini_batch_prompts * rollout.group_size} responses; {config.run.total_steps} train steps",
        f"lengths: prompt <= {config.data.max_prompt_tokens}, response <= {rollout.max_response_tokens} tokens; "
        f"{_overlong(config)}",
        f"loss: {_loss(algorithm.loss)}, {algorithm.loss.aggregation}; advantage {_advantage(config)}",
        f"learning rate: {_rate(optimizer)}"
        + (f"; critic {_rate(config.critic.optimizer)}" if config.has_critic else ""),
        f"output: {config.run.output_dir}",
    ]


def _memory(plan: Plan) -> list[str]:
    if plan.architecture is None:
        return []
    return memory_lines(plan.loaded.config, plan.architecture, plan.num_processes, plan.cluster)


def describe_pretraining(plan: Plan) -> list[str]:
    """The same of a critic's pretraining."""
    config = plan.loaded.config
    rollout, steps, critic = config.rollout, config.value_pretraining, config.critic
    layout = critic_layout(config, plan.num_processes)
    return [
        _layout(plan),
        *_memory(plan),
        f"critic from {critic.path or config.model.path}, {layout.describe()}; {steps.min_steps} to {steps.max_steps} "
        f"train steps of {rollout.prompts_per_step} prompts x {rollout.group_size} responses of at most "
        f"{rollout.max_response_tokens} tokens",
        f"learning rate: {_rate(critic.optimizer)}",
        f"output: {config.run.output_dir}",
    ]


def describe_sft(plan: Plan) -> list[str]:
    """The same of supervised fine-tuning."""
    config = plan.loaded.config
    return [
        _layout(plan),
        *_memory(plan),
        f"supervised fine-tuning on {', '.join(path.name for path in config.data.train_paths)}: {config.run.total_steps} train "
        f"steps of {config.rollout.prompts_per_step} responses, {config.algorithm.loss.aggregation}",
        f"learning rate: {_rate(config.optimizer)}",
        f"output: {config.run.output_dir}",
    ]


def _rate(optimizer: OptimizerConfig) -> str:
    warmup = f"{optimizer.warmup_steps} {optimizer.warmup_unit}s"
    return f"{optimizer.learning_rate:g} {optimizer.schedule} after {warmup}"


def _layout(plan: Plan) -> str:
    config, critic = plan.loaded.config, ""
    if own := config.num_critic_processes:
        critic = f", the critic {critic_layout(config, plan.num_processes).describe()} on {own} more"
    return f"layout: {plan.layout.describe()} on {plan.layout.world_size} processes{critic}, {config.model.dtype}"


def _loss(loss: PolicyLossConfig) -> str:
    if isinstance(loss, FunctionLossConfig):
        return loss.function
    return f"{loss.name}, ratio in [{1 - loss.clip_ratio_low:g}, {1 + loss.clip_ratio_high:g}]"


def _advantage(config: Config) -> str:
    """The estimator; with a critic also where it starts, how it is cut and its windows."""
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
