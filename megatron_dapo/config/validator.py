"""The one validator: every rule that ranges over values, as a pure function that reports all violations at once.

A rule yields a Violation with its formula, every number in it and what to change. Nothing here touches torch, a process
or the disk: the validator of a 1024-rank job runs on a laptop.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from pydantic import BaseModel

from megatron_dapo.config.critic_rules import CRITIC_RULES, critic_layout_rules
from megatron_dapo.config.engine_rules import ENGINE_RULES
from megatron_dapo.config.errors import ConfigError, Violation, nearest_divisor, value_of, violation
from megatron_dapo.config.inputs import ArchitectureFacts
from megatron_dapo.config.layout_rules import (
    ARCHITECTURE_RULES,
    LAYOUT_RULES,
    PRECISION_ARCHITECTURE_RULES,
    PRECISION_RULES,
    world_rules,
)
from megatron_dapo.config.schema import Config
from megatron_dapo.config.section import Bounds
from megatron_dapo.precision import micro_batch_multiple, token_multiple

VERIFIER_PRESETS = ("dapo", "lenient")


def validate(
    config: Config, world_size: int | None = None, architecture: ArchitectureFacts | None = None
) -> list[Violation]:
    """Everything that is wrong with `config` for `world_size` processes and, where given, a model of that architecture.

    Without `world_size` the number of processes is the one the configuration asks for. An empty list means the run may
    start.
    """
    processes = config.num_processes if world_size is None else world_size
    # Every rule guards against values that another rule refuses (0 ranks, 0 prompts): all of them always run.
    found = [one for rule in _RULES for one in rule(config)]
    found += world_rules(config, processes - config.num_critic_processes)
    if architecture is not None:
        rules = (*ARCHITECTURE_RULES, *PRECISION_ARCHITECTURE_RULES)
        found += [one for rule in rules for one in rule(config, architecture)]
    found += critic_layout_rules(config, processes, architecture)
    return found


def require_valid(config: Config, world_size: int | None = None, architecture: ArchitectureFacts | None = None) -> None:
    """Raise ConfigError with all violations if there is any."""
    found = validate(config, world_size, architecture)
    if found:
        raise ConfigError(found)


def _ranges(config: Config) -> Iterator[Violation]:
    for path, bounds in field_bounds(config).items():
        if not bounds.hold(value_of(config, path)):
            yield violation(config, path, f"{path} {bounds}", f"set {path} {bounds}")


def field_bounds(section: BaseModel, prefix: str = "") -> dict[str, Bounds]:
    """Return the bounds of the fields of `section` and of the sections below it, by dotted path."""
    found: dict[str, Bounds] = {}
    for name, info in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            found.update(field_bounds(value, f"{prefix}{name}."))
        found.update({f"{prefix}{name}": mark for mark in info.metadata if isinstance(mark, Bounds)})
    return found


def _batch(config: Config) -> Iterator[Violation]:
    prompts, mini = config.rollout.prompts_per_step, config.training.mini_batch_prompts
    if prompts >= 1 and mini >= 1 and prompts % mini:
        yield violation(
            config,
            "training.mini_batch_prompts",
            "rollout.prompts_per_step % training.mini_batch_prompts == 0",
            f"set training.mini_batch_prompts = {nearest_divisor(prompts, mini)}",
            "rollout.prompts_per_step",
        )
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    alignment = _sequence_alignment(config)
    needed = math.ceil(longest / alignment) * alignment
    if config.training.micro_batch_tokens < needed:
        yield violation(
            config,
            "training.micro_batch_tokens",
            "micro_batch_tokens >= max_prompt_tokens + max_response_tokens, padded to the layout's multiple",
            f"set training.micro_batch_tokens = {needed} or more",
            "data.max_prompt_tokens",
            "rollout.max_response_tokens",
            multiple=alignment,
        )


def _sequence_alignment(config: Config) -> int:
    """Return the number that a micro-batch's tokens must be a multiple of."""
    p = config.parallel
    own_tokens = token_multiple(config.precision.recipe)
    return micro_batch_multiple(max(p.tp_size, 1), max(p.cp_size, 1), p.sequence_parallel, own_tokens)


def _groups(config: Config) -> Iterator[Violation]:
    rollout = config.rollout
    needs_group = rollout.filter_groups or not (config.has_critic or config.algorithm.advantage.name == "reinforce_pp")
    if rollout.group_size == 1 and needs_group:
        yield violation(
            config,
            "rollout.group_size",
            "rollout.group_size >= 2 where responses are compared within their group",
            "set rollout.group_size = 8 or more",
            "algorithm.name",
            "algorithm.advantage.name",
            "rollout.filter_groups",
        )
    # Accuracies are multiples of 1 / group_size: bounds between two of them keep no group at all.
    low, high = rollout.accuracy_min, rollout.accuracy_max
    reachable = (
        any(low < correct / rollout.group_size < high for correct in range(rollout.group_size + 1))
        if rollout.group_size > 0
        else True
    )
    if rollout.filter_groups and rollout.group_size > 1 and not reachable:
        yield violation(
            config,
            "rollout.accuracy_min",
            "accuracy_min < k / group_size < accuracy_max for some whole k (else every group is filtered)",
            "set rollout.accuracy_min = 0.0 and rollout.accuracy_max = 1.0",
            "rollout.accuracy_max",
            "rollout.group_size",
        )
    if rollout.filter_groups and rollout.max_num_gen_batches == 0 and config.data.max_epochs == 0:
        yield violation(
            config,
            "rollout.max_num_gen_batches",
            "rollout.max_num_gen_batches >= 1 or data.max_epochs >= 1 where groups are filtered (a batch that no group "
            "passes into would be collected for ever)",
            "set rollout.max_num_gen_batches = 10, or data.max_epochs = 1 or more",
            "data.max_epochs",
            "rollout.filter_groups",
        )


def _sampling(config: Config) -> Iterator[Violation]:
    rollout = config.rollout
    if rollout.top_p < 1 and not rollout.allow_biased_sampling:
        yield violation(
            config,
            "rollout.top_p",
            "rollout.top_p == 1 in training rollouts (the trainer's log-probs are over the whole vocabulary)",
            "set rollout.top_p = 1.0, or rollout.allow_biased_sampling = true",
            "rollout.allow_biased_sampling",
        )
    if rollout.top_k > 0 and not rollout.allow_biased_sampling:
        yield violation(
            config,
            "rollout.top_k",
            "rollout.top_k == 0 in training rollouts (the trainer's log-probs are over the whole vocabulary)",
            "set rollout.top_k = 0, or rollout.allow_biased_sampling = true",
            "rollout.allow_biased_sampling",
        )
    if rollout.max_staleness > 0 and config.algorithm.off_policy.correction == "none":
        yield violation(
            config,
            "rollout.max_staleness",
            "rollout.max_staleness == 0 without an off-policy correction",
            'set algorithm.off_policy.correction = "tis", or rollout.max_staleness = 0',
            "algorithm.off_policy.correction",
        )


def _correction(config: Config) -> Iterator[Violation]:
    off_policy = config.algorithm.off_policy
    if off_policy.correction == "icepop" and off_policy.low == 0:
        yield violation(
            config,
            "algorithm.off_policy.low",
            "algorithm.off_policy.low > 0 for icepop, which drops both tails",
            'set algorithm.off_policy.low = 0.5, or algorithm.off_policy.correction = "mis"',
            "algorithm.off_policy.correction",
        )
    if off_policy.correction != "none" and off_policy.level == "token" and config.algorithm.loss.name == "gspo":
        yield violation(
            config,
            "algorithm.off_policy.level",
            "one weight a sequence for gspo",
            'set algorithm.off_policy.level = "geometric" or "sequence", or algorithm.loss.name = "gspo_token"',
            "algorithm.off_policy.correction",
            "algorithm.loss.name",
        )


def _overlong(config: Config) -> Iterator[Violation]:
    punishment = config.reward.overlong_punishment
    prefix = "reward.overlong_punishment"
    if punishment.enabled and punishment.max_length <= punishment.cache_length:
        yield violation(
            config,
            f"{prefix}.cache_length",
            f"{prefix}.max_length > {prefix}.cache_length",
            f"set {prefix}.cache_length = {max(1, punishment.max_length // 4)}: it starts at max_length - cache_length",
            f"{prefix}.max_length",
        )
    if punishment.enabled and punishment.max_length > config.rollout.max_response_tokens:
        yield violation(
            config,
            f"{prefix}.max_length",
            f"{prefix}.max_length <= rollout.max_response_tokens (else the full punishment is never reached)",
            f"set {prefix}.max_length = {config.rollout.max_response_tokens}",
            "rollout.max_response_tokens",
        )
    if punishment.enabled and config.reward.overlong_filter and not config.reward.allow_overlong_filter_and_punishment:
        yield violation(
            config,
            "reward.overlong_filter",
            "overlong_filter and overlong_punishment not both on (filtered responses never feel the punishment)",
            "switch one of them off, or set reward.allow_overlong_filter_and_punishment = true",
            f"{prefix}.enabled",
            "reward.allow_overlong_filter_and_punishment",
        )


def _verifiers(config: Config) -> Iterator[Violation]:
    for path in ("reward.verifier", "reward.shadow_verifier"):
        name = value_of(config, path)
        optional = path == "reward.shadow_verifier" and name == ""
        if not optional and name not in VERIFIER_PRESETS and not _is_dotted(name):
            presets = " or ".join(VERIFIER_PRESETS)
            yield violation(
                config,
                path,
                f"{path} is {presets}, or package.module:function",
                f'set {path} = "{VERIFIER_PRESETS[0]}"',
            )
    if config.reward.shadow_verifier == config.reward.verifier:
        yield violation(
            config,
            "reward.shadow_verifier",
            "reward.shadow_verifier differs from reward.verifier",
            'set reward.shadow_verifier = "" or another verifier',
            "reward.verifier",
        )
    if config.reward.correct <= config.reward.incorrect:
        yield violation(
            config,
            "reward.correct",
            "reward.correct > reward.incorrect",
            "set reward.correct = 1.0 and reward.incorrect = -1.0",
            "reward.incorrect",
        )


def _is_dotted(name: str) -> bool:
    module, _, function = name.partition(":")
    return bool(function) and all(part.isidentifier() for part in (*module.split("."), *function.split(".")))


def _steps(config: Config) -> Iterator[Violation]:
    run = config.run
    if 0 < run.max_generation_steps < run.total_steps:
        yield violation(
            config,
            "run.max_generation_steps",
            "run.max_generation_steps == 0 or >= run.total_steps (a train step takes at least one generation step)",
            f"set run.max_generation_steps = {run.total_steps} or more, or 0",
            "run.total_steps",
        )
    yield from _schedule(config, "optimizer", schedule_steps(config))
    if config.has_critic:
        yield from _schedule(config, "critic.optimizer", critic_schedule_steps(config))


def _schedule(config: Config, path: str, total: int) -> Iterator[Violation]:
    """`total`: steps of the run in the unit that the optimizer at `path` counts."""
    optimizer = value_of(config, path)
    if total >= 1 and optimizer.schedule != "constant" and optimizer.warmup_steps >= total:
        yield violation(
            config,
            f"{path}.warmup_steps",
            f"{path}.warmup_steps < the run's {optimizer.warmup_unit}s (else nothing is left to decay over)",
            f"set {path}.warmup_steps below {total}",
            f"{path}.warmup_unit",
            "run.total_steps",
            steps_of_the_run=total,
        )
    if optimizer.schedule != "constant" and optimizer.min_learning_rate > optimizer.learning_rate:
        yield violation(
            config,
            f"{path}.min_learning_rate",
            f"{path}.min_learning_rate <= {path}.learning_rate",
            f"lower {path}.min_learning_rate",
            f"{path}.learning_rate",
        )


def schedule_steps(config: Config) -> int:
    """The steps in which the policy learns, in the unit its learning-rate schedule counts."""
    train_steps = config.run.total_steps - config.policy_starts_at
    if config.optimizer.warmup_unit == "train_step":
        return train_steps
    mini_batches = config.rollout.prompts_per_step // max(config.training.mini_batch_prompts, 1)
    return train_steps * mini_batches * config.training.epochs


def critic_schedule_steps(config: Config) -> int:
    """The same of the critic's schedule."""
    critic = config.critic
    if critic.optimizer.warmup_unit == "train_step":
        return config.run.total_steps
    mini_batches = config.rollout.prompts_per_step // max(
        critic.mini_batch_prompts or config.training.mini_batch_prompts, 1
    )
    return config.run.total_steps * mini_batches * critic.epochs


def _evaluation(config: Config) -> Iterator[Violation]:
    evaluation = config.evaluation
    # at_start and at_end are on by default: without a file they have no effect, and a recipe of model and data is valid.
    if evaluation.interval > 0 and not config.data.eval_paths:
        yield violation(
            config,
            "data.eval_paths",
            "data.eval_paths names a file where evaluation.interval > 0",
            "set data.eval_paths, or evaluation.interval = 0",
            "evaluation.interval",
        )
    if evaluation.temperature == 0 and evaluation.num_samples > 1:
        yield violation(
            config,
            "evaluation.num_samples",
            "evaluation.num_samples == 1 at temperature 0 (greedy responses are all equal)",
            "set evaluation.num_samples = 1, or evaluation.temperature = 1.0",
            "evaluation.temperature",
        )


_RULES = (
    _ranges,
    _batch,
    _groups,
    _sampling,
    _correction,
    _overlong,
    _verifiers,
    _steps,
    _evaluation,
    *LAYOUT_RULES,
    *PRECISION_RULES,
    *CRITIC_RULES,
    *ENGINE_RULES,
)
