"""Lines that sum up a configuration before the run starts."""

from __future__ import annotations

from megatron_dapo.cli.memory_plan import memory_lines
from megatron_dapo.cli.precision_plan import precision_lines
from megatron_dapo.config import Config
from megatron_dapo.config.algorithm_schema import FunctionAdvantageConfig, FunctionLossConfig, PolicyLossConfig
from megatron_dapo.config.model_schema import OptimizerConfig
from megatron_dapo.run.plan import Plan
from megatron_dapo.trainer.topology import critic_layout


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
