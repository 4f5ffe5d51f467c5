"""Rules of the algorithms with a critic: what they need, what they cannot do, and how the critic may be cut."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace

from megatron_dapo.config.errors import Violation, nearest_divisor, violation
from megatron_dapo.config.inputs import ArchitectureFacts
from megatron_dapo.config.layout_rules import ARCHITECTURE_RULES, PRECISION_ARCHITECTURE_RULES, world_rules
from megatron_dapo.config.schema import Config
from megatron_dapo.precision import micro_batch_multiple, token_multiple

_CRITIC_ALONE = ("kl_reward_coefficient", "positive_example_coefficient")


def _only_with_critic(config: Config) -> Iterator[Violation]:
    for name in _CRITIC_ALONE:
        if not config.has_critic and getattr(config.algorithm, name) > 0:
            yield violation(
                config,
                f"algorithm.{name}",
                f"algorithm.{name} == 0 where no critic makes the advantages",
                f'set algorithm.{name} = 0, or algorithm.name = "vapo"',
                "algorithm.name",
            )


def _critic_batches(config: Config) -> Iterator[Violation]:
    prompts, mini = config.rollout.prompts_per_step, config.critic.mini_batch_prompts
    if config.has_critic and mini >= 1 and prompts >= 1 and prompts % mini:
        yield violation(
            config,
            "critic.mini_batch_prompts",
            "rollout.prompts_per_step % critic.mini_batch_prompts == 0",
            f"set critic.mini_batch_prompts = {nearest_divisor(prompts, mini)}, or 0",
            "rollout.prompts_per_step",
        )
    # As large as the critic's own layout makes the longest sequence.
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    p = config.critic_parallel
    alignment = micro_batch_multiple(
        max(p.tp_size, 1), max(p.cp_size, 1), p.sequence_parallel, token_multiple(config.precision.recipe)
    )
    needed = math.ceil(longest / alignment) * alignment
    own, policys = config.critic.micro_batch_tokens, config.training.micro_batch_tokens
    # Where the policy's are too few even without padding, its own rule says so.
    if config.has_critic and (0 < own < needed or (own == 0 and longest <= policys < needed)):
        yield violation(
            config,
            "critic.micro_batch_tokens",
            "critic.micro_batch_tokens (0: training.micro_batch_tokens) >= max_prompt_tokens + max_response_tokens, padded to the "
            "multiple of the critic's layout",
            f"set critic.micro_batch_tokens = {needed} or more",
            "training.micro_batch_tokens",
            "data.max_prompt_tokens",
            "rollout.max_response_tokens",
            multiple=alignment,
        )


def _policy_learns(config: Config) -> Iterator[Violation]:
    steps = config.run.total_steps
    if config.policy_starts_at >= steps >= 1:
        yield violation(
            config,
            "critic.warmup_train_steps",
            "critic.warmup_train_steps < run.total_steps (else the policy never learns; `megatron-dapo pretrain-value` is for the "
            "critic alone)",
            f"set critic.warmup_train_steps = {steps - 1} or less",
            "run.total_steps",
        )


def _lambda_rules(config: Config) -> Iterator[Violation]:
    rule = config.advantage_estimation.lambda_rule
    if rule == "window" and config.algorithm.name in ("ppo", "vapo"):
        yield violation(
            config,
            "advantage_estimation.lambda_rule",
            'advantage_estimation.lambda_rule == "window" for tppo alone (the other algorithms train whole responses)',
            'set advantage_estimation.lambda_rule = "length_adaptive"',
            "algorithm.name",
        )


def _windows(config: Config) -> Iterator[Violation]:
    if config.algorithm.name != "tppo":
        return
    window, rollout = config.window, config.rollout
    if window.tokens > rollout.max_response_tokens:
        yield violation(
            config,
            "window.tokens",
            "window.tokens <= rollout.max_response_tokens (a window is a part of a response)",
            f"set window.tokens = {max(1, rollout.max_response_tokens // 3)}",
            "rollout.max_response_tokens",
        )
    if 1 <= window.windows_per_step < rollout.group_size:
        yield violation(
            config,
            "window.windows_per_step",
            "window.windows_per_step == 0 (all) or >= rollout.group_size (a group's windows are trained together)",
            f"set window.windows_per_step = {rollout.group_size} or more, or 0",
            "rollout.group_size",
        )
    if window.ignored_tail_tokens >= window.tokens >= 1:
        yield violation(
            config,
            "window.ignored_tail_tokens",
            "window.ignored_tail_tokens < window.tokens (else an unfinished window trains nothing)",
            f"set window.ignored_tail_tokens = {min(8, window.tokens - 1)}",
            "window.tokens",
        )
    yield from _windows_and_rollout(config)


def _windows_and_rollout(config: Config) -> Iterator[Violation]:
    rollout = config.rollout
    if rollout.filter_groups:
        yield violation(
            config,
            "rollout.filter_groups",
            "rollout.filter_groups == false for tppo (a filter needs finished groups; a step's windows are of unfinished ones)",
            "set rollout.filter_groups = false; window.windows_per_step prefers groups with mixed outcomes",
            "algorithm.name",
        )
    if rollout.max_staleness > 0:
        yield violation(
            config,
            "rollout.max_staleness",
            "rollout.max_staleness == 0 for tppo (a window is trained by the policy that sampled it)",
            "set rollout.max_staleness = 0",
            "algorithm.name",
        )
    if rollout.oversample > 1:
        yield violation(
            config,
            "rollout.oversample",
            "rollout.oversample == 1 for tppo (every window that was begun is trained)",
            "set rollout.oversample = 1.0",
            "algorithm.name",
        )
    if config.reward.overlong_filter:
        yield violation(
            config,
            "reward.overlong_filter",
            "reward.overlong_filter == false for tppo (its windows keep truncated responses out of the loss only where they continue)",
            "set reward.overlong_filter = false",
            "algorithm.name",
        )
    if config.advantage_estimation.critic_lambda != 1.0:
        yield violation(
            config,
            "advantage_estimation.critic_lambda",
            "advantage_estimation.critic_lambda == 1 for tppo (the critic learns Monte-Carlo returns over all windows)",
            "set advantage_estimation.critic_lambda = 1.0",
            "algorithm.name",
        )


def _pretraining(config: Config) -> Iterator[Violation]:
    steps = config.value_pretraining
    if steps.max_steps < steps.min_steps:
        yield violation(
            config,
            "value_pretraining.max_steps",
            "value_pretraining.min_steps <= value_pretraining.max_steps",
            f"set value_pretraining.max_steps = {steps.min_steps} or more",
            "value_pretraining.min_steps",
        )


def critic_layout_rules(config: Config, world_size: int, architecture: ArchitectureFacts | None) -> Iterator[Violation]:
    """The rules of the policy's layout for the critic's, where it is another one or on processes of its own."""
    own = config.num_critic_processes
    if own >= world_size >= 1:
        yield violation(
            config,
            "critic.parallel.num_processes",
            "critic.parallel.num_processes < processes (the others hold the policy)",
            f"start {own + config.parallel.tp_size * config.parallel.pp_size * config.parallel.cp_size} processes or more, "
            "or set critic.parallel.num_processes = 0",
            processes=world_size,
        )
        return
    if not config.has_critic or (config.critic_parallel == config.parallel and not own):
        return
    # As if it were a policy, on its processes.
    without_own = config.critic.model_copy(
        update={"parallel": config.critic.parallel.model_copy(update={"num_processes": 0})}
    )
    as_policy = config.model_copy(update={"parallel": config.critic_parallel, "critic": without_own})
    found = [*world_rules(as_policy, own or world_size)]
    if architecture is not None:
        rules = (*ARCHITECTURE_RULES, *PRECISION_ARCHITECTURE_RULES)
        found += [one for rule in rules for one in rule(as_policy, architecture)]
    for one in found:
        if one.path in _CRITIC_FIELDS:
            yield replace(
                one,
                path=f"critic.{one.path}",
                formula=_of_critic(one.formula),
                suggestion=_of_critic(_more_processes(one.suggestion) if own else one.suggestion),
                values={_of_critic(name): value for name, value in one.values.items()},
            )


_CRITIC_FIELDS = (
    "parallel.tp_size",
    "parallel.pp_size",
    "parallel.vpp_size",
    "parallel.cp_size",
    "parallel.ep_size",
)


def _of_critic(text: str) -> str:
    return re.sub(r"(?<!critic\.)parallel\.", "critic.parallel.", text)


def _more_processes(text: str) -> str:
    """The critic's own processes are a setting."""
    return re.sub(r"start (\d+) processes", r"set critic.parallel.num_processes = \1", text)


CRITIC_RULES = (_only_with_critic, _critic_batches, _policy_learns, _lambda_rules, _windows, _pretraining)
