"""Validates all ranges and relations between values and reports all violations at once.

A violation holds its formula, every number in it and the fix. Nothing here touches torch, a process or the disk, so a
laptop can validate a 1024-rank job.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Set
from typing import Any

from pydantic import BaseModel

from megatron_dapo.config.algorithm_schema import CriticParallelConfig
from megatron_dapo.config.critic_rules import CRITIC_RULES, OWN_PROCESSES_RULE
from megatron_dapo.config.derive import derive
from megatron_dapo.config.engine_rules import ENGINE_RULES
from megatron_dapo.config.environment_rules import ENVIRONMENT_ARCHITECTURE_RULE, ENVIRONMENT_RULES
from megatron_dapo.config.layout_rules import (
    CRITIC,
    LAYOUT_RULES,
    LORA_RULES,
    POLICY,
    PRECISION_ARCHITECTURE_RULES,
    PRECISION_RULES,
    START_PROCESSES,
    architecture_facts,
    architecture_rules,
    layout_facts,
    missing_targets,
    uncut_biases,
    unfit_shapes,
    world_rules,
)
from megatron_dapo.config.model_schema import OptimizerConfig
from megatron_dapo.config.reward_schema import GOLD_PRESETS
from megatron_dapo.config.rules import ConfigError, Violation, broken, broken_in_sections, fields_of, value_of
from megatron_dapo.config.schema import Config
from megatron_dapo.config.section import Bounds, Rule
from megatron_dapo.config.stream_rules import STREAM_RULES
from megatron_dapo.models.architecture import ModelArchitecture

# Metrics that may select the best checkpoint.
SELECTION_METRICS = (
    *("eval/avg_at_k", "eval/avg_at_k_low", "eval/avg_at_k_high", "eval/pass_at_k", "eval/cons_at_k"),
    *("eval/truncated_share", "eval/response_tokens_mean"),
)


def validate(
    config: Config,
    world_size: int | None = None,
    architecture: ModelArchitecture | None = None,
) -> list[Violation]:
    """Return everything that is wrong with `config` for `world_size` processes and, if given, a model of that architecture.

    Without `world_size`, the number of processes is the configured one. `plan.check` is the second step, which checks
    the machines of the run.
    """
    processes = config.num_processes if world_size is None else world_size
    own = config.num_critic_processes
    outside = out_of_range(config)
    violations = [
        Violation(path, f"{path} {bound}", f"set {path} {bound}", {path: value_of(config, path)})
        for path, bound in outside.items()
    ]
    violations += broken_in_sections(config, outside.keys())
    facts = facts_of(config, processes - own)
    violations += broken(
        (
            *(*RULES, *LAYOUT_RULES, *PRECISION_RULES, *LORA_RULES, *CRITIC_RULES),
            *(*ENGINE_RULES, *ENVIRONMENT_RULES, *STREAM_RULES),
        ),
        config,
        facts,
        outside.keys(),
    )
    # If no process is left for the policy, the rule for the critic's separate processes says how many to start.
    if facts["processes"] >= 1:
        violations += broken(world_rules(POLICY), config, facts, outside.keys())
    if architecture is not None:
        sizes = {**facts, **architecture_facts(architecture)}
        rules = (*architecture_rules(POLICY), *PRECISION_ARCHITECTURE_RULES, ENVIRONMENT_ARCHITECTURE_RULE)
        violations += broken(rules, config, sizes, outside.keys())
        violations += unfit_shapes(config, architecture, POLICY)
        violations += uncut_biases(config, architecture, POLICY)
        violations += missing_targets(config, architecture)
    # No process is left for the policy, so checking the critic's layout would report violations for an impossible
    # world.
    if own >= processes >= 1:
        return [*violations, *broken([OWN_PROCESSES_RULE], config, {**facts, "processes": processes}, outside.keys())]
    if config.has_critic and (own or config.critic_parallel != config.parallel):
        violations += _critic_layout(config, own, processes, architecture, outside.keys())
    return violations


def _critic_layout(
    config: Config, own: int, processes: int, architecture: ModelArchitecture | None, outside: Set[str]
) -> Iterator[Violation]:
    """Yield what is wrong with the sizes of the critic's layout, on its `own` processes or else on all."""
    sizes = config.critic_parallel.model_dump(include=set(CriticParallelConfig.model_fields) - {"num_processes"})
    resolved = derive(config, {CRITIC: sizes})
    facts = {**layout_facts(config, config.critic_parallel, own or processes), "num_critic_processes": 0}
    start = "set critic.parallel.num_processes = {padded(processes, model_size)}" if own else START_PROCESSES
    rules = list(world_rules(CRITIC, start))
    if architecture is not None:
        facts |= architecture_facts(architecture)
        rules += architecture_rules(CRITIC)
    # What blames another section is a rule of the policy. A size of 0 means the policy's, which may be out of its range.
    own_rules = [rule for rule in rules if fields_of(rule)[0].startswith(f"{CRITIC}.")]
    yield from broken(own_rules, resolved, facts, {*outside, *(f"critic.{path}" for path in outside)})
    if architecture is not None:
        yield from (one for one in unfit_shapes(resolved, architecture, CRITIC) if one.path.startswith(f"{CRITIC}."))


def require_valid(
    config: Config,
    world_size: int | None = None,
    architecture: ModelArchitecture | None = None,
) -> None:
    """Raise ConfigError with all violations if there are any."""
    violations = validate(config, world_size, architecture)
    if violations:
        raise ConfigError(violations)


def field_bounds(section: BaseModel, prefix: str = "") -> dict[str, Bounds]:
    """Return the bounds of the fields of `section` and of the sections below it, by dotted path."""
    bounds: dict[str, Bounds] = {}
    for name, mark in _own_bounds(type(section)):
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            bounds.update(field_bounds(value, f"{prefix}{name}."))
        if mark is not None:
            bounds[f"{prefix}{name}"] = mark
    return bounds


@functools.cache
def _own_bounds(section: type[BaseModel]) -> tuple[tuple[str, Bounds | None], ...]:
    return tuple(
        (name, next((mark for mark in info.metadata if isinstance(mark, Bounds)), None))
        for name, info in section.model_fields.items()
    )


def out_of_range(config: Config) -> dict[str, Bounds]:
    """Return the bounds that fields of `config` violate, by dotted path."""
    return {path: bound for path, bound in field_bounds(config).items() if not bound.hold(value_of(config, path))}


def facts_of(config: Config, processes: int) -> dict[str, Any]:
    """Return the numbers that formulas refer to but that are not fields."""
    return {
        **layout_facts(config, config.parallel, processes),
        "critic_multiple": layout_facts(config, config.critic_parallel, processes)["multiple"],
        "scheduled_steps": schedule_steps(config),
        "critic_scheduled_steps": critic_schedule_steps(config),
        "gold_presets": GOLD_PRESETS,
        "evaluation_metrics": SELECTION_METRICS,
    }


def schedule_steps(config: Config) -> int:
    """Return the number of steps in which the policy learns, in the unit of its learning-rate schedule."""
    train_steps, training = config.run.total_steps - config.policy_starts_at, config.training
    return _schedule_steps(config, config.optimizer, train_steps, training.mini_batch_prompts, training.epochs)


def critic_schedule_steps(config: Config) -> int:
    """Return the number of steps of the run, in the unit of the critic's learning-rate schedule."""
    critic = config.critic
    mini_batch_prompts = critic.mini_batch_prompts or config.training.mini_batch_prompts
    return _schedule_steps(config, critic.optimizer, config.run.total_steps, mini_batch_prompts, critic.epochs)


def _schedule_steps(
    config: Config, optimizer: OptimizerConfig, train_steps: int, mini_batch_prompts: int, epochs: int
) -> int:
    if optimizer.warmup_unit == "train_step":
        return train_steps
    # max: a size of 0 is reported as out of bounds and must not cause a division by 0 here.
    return train_steps * (config.rollout.prompts_per_step // max(mini_batch_prompts, 1)) * epochs


def _schedule_rules(path: str, steps: str, condition: str) -> tuple[Rule, Rule]:
    """Return the rules of the learning-rate schedule at `path`; the fact `steps` is the length of the run in its unit."""
    decays = f'{condition}{path}.schedule != "constant"'
    return (
        Rule(
            f"{path}.warmup_steps < {steps}",
            f"set {path}.warmup_steps below {{{steps}}}",
            when=f"{decays} and {steps} >= 1",
            reason="nothing would be left to decay over",
        ),
        Rule(f"{path}.min_learning_rate <= {path}.learning_rate", f"lower {path}.min_learning_rate", when=decays),
    )


_PUNISHMENT = "reward.overlong_punishment"

# Feature that uses pass rates of earlier visits -> how to switch it off.
_USES_OF_HISTORY = (
    ("rollout.budget.enabled", "rollout.budget.enabled = false"),
    ('rollout.prompt_order == "priority"', 'rollout.prompt_order = "shuffled"'),
    ('rollout.prompt_filter.name != "none"', 'rollout.prompt_filter.name = "none"'),
)

RULES = (
    Rule(
        "not data.sources",
        'set data.train_paths instead of data.sources, or algorithm.name = "dapo"',
        when='algorithm.name == "sft"',
        reason="given responses are read from files, in their order",
    ),
    Rule(
        "not data.injection.templates",
        'set data.injection.templates = [], or algorithm.name = "dapo"',
        when='algorithm.name == "sft"',
        reason="a given response answers the prompt of its own row, not a rewrite of it",
    ),
    Rule(
        'algorithm.name == "dapo"',
        'set algorithm.name = "dapo", or leave distillation.teachers out',
        when="distillation.teachers",
        path="distillation.teachers",
        reason="a critic learns returns of rewards, and fine-tuning samples nothing",
    ),
    Rule(
        "rollout.temperature == 1 and rollout.top_p == 1 and rollout.top_k == 0",
        "set rollout.temperature = 1.0, rollout.top_p = 1.0 and rollout.top_k = 0",
        when="distillation.servers",
        reason="a server's log-probs of given tokens are those of temperature 1 over the whole vocabulary",
    ),
    Rule(
        'not megatron.get("tp_comm_overlap", False)',
        "set megatron.tp_comm_overlap = false",
        when="distillation.models",
        path="megatron",
        reason="tp_comm_overlap has buffers of one shape for all models of a process",
    ),
    Rule(
        "not environment.is_on",
        "leave prompt out of distillation.teachers",
        when="distillation.readers",
        path="distillation.teachers",
        reason="an environment begins its conversations, and what a teacher would read in their place is not known",
    ),
    Rule(
        "not precision.fp8_param",
        "set precision.fp8_param = false, or leave refresh_steps out of distillation.teachers",
        when="distillation.snapshots",
        reason="a snapshot copies weights of the model's own type",
    ),
    Rule(
        "rollout.prompts_per_step % training.mini_batch_prompts == 0",
        "set training.mini_batch_prompts = {nearest_divisor(rollout.prompts_per_step, training.mini_batch_prompts)}",
    ),
    Rule(
        "training.micro_batch_tokens >= padded(data.max_prompt_tokens + rollout.max_response_tokens, multiple)",
        "set training.micro_batch_tokens = {padded(data.max_prompt_tokens + rollout.max_response_tokens, multiple)} or more",
        reason="a micro-batch holds the longest sequence, padded to the layout's multiple",
    ),
    Rule(
        "rollout.group_size >= 2",
        "set rollout.group_size = 8 or more",
        when='rollout.filter_groups or (algorithm.name == "dapo" and algorithm.advantage.name not in ("reinforce_pp", "function"))',
        reason="responses are compared within their group",
    ),
    Rule(
        f"reward.incorrect >= 0 and reward.correct <= 1 and not {_PUNISHMENT}.enabled",
        f"set reward.incorrect = 0.0, reward.correct = 1.0 and {_PUNISHMENT}.enabled = false",
        when='algorithm.name == "dapo" and algorithm.advantage.name == "maxrl"',
        path="algorithm.advantage.name",
        reason="MaxRL takes rewards from 0 to 1, and a response that is cut has reward.incorrect whatever the verifier",
    ),
    Rule(
        "len(data.sources) < 2",
        'set rollout.prompt_order = "shuffled", or name all files in data.train_paths',
        when='rollout.prompt_order == "priority"',
        reason="an order by priority does not keep the weights of several sources",
    ),
    Rule(
        "rollout.max_num_gen_batches >= 1 or data.max_epochs >= 1",
        "set rollout.max_num_gen_batches = 10, or data.max_epochs = 1 or more",
        when="rollout.filter_groups",
        reason="a batch that no group passes into would be collected forever",
    ),
    Rule(
        "rollout.filter_groups",
        'set rollout.filter_groups = true, or data.injection.when = "visit"',
        path="data.injection.when",
        when='data.injection.templates and data.injection.when == "filtered"',
        reason="rewrites take the place of groups that are filtered",
    ),
    Rule(
        "data.injection.rate * rollout.prompts_per_step >= 1",
        "set data.injection.rate = {ceil(100 / rollout.prompts_per_step) / 100}, or data.injection.templates = []",
        when='data.injection.templates and data.injection.when == "filtered"',
        reason="no group of a batch could be of a rewrite",
    ),
    *(
        Rule(
            "not any(source.makes_fresh_problems for source in data.sources)",
            f"set fresh = false in the tables of data.sources that name a task, or {instead}",
            when=when,
            reason="a problem that is made for one epoch comes once, and has no history and no rewrite",
        )
        for when, instead in _USES_OF_HISTORY
    ),
    *(
        Rule(
            "not data.injection.templates",
            f"set data.injection.templates = [], or {instead}",
            when=when,
            reason="rewrites are drawn by their share of a batch, not by a history of pass rates",
        )
        for when, instead in _USES_OF_HISTORY
    ),
    Rule(
        'rollout.max_staleness == 0 or algorithm.off_policy.correction != "none" or training.old_logprobs == "rollout"',
        'set algorithm.off_policy.correction = "tis", or rollout.max_staleness = 0',
        when="algorithm.loss.needs_old_logprobs",
        path="rollout.max_staleness",
    ),
    Rule(
        "data.max_epochs == 0",
        "set data.max_epochs = 0",
        when='rollout.prompt_order == "priority"',
        reason="the first epoch is followed by prompts in order of their priority, without an end",
    ),
    Rule(
        "rollout.oversample == 1 or rollout.max_staleness > 0 or rollout.tail_rounds",
        'set rollout.oversample = 1.0, or rollout.max_staleness = 1 and algorithm.off_policy.correction = "tis"',
        when='algorithm.name != "tppo"',
        reason="surplus groups cannot be carried over and would be thrown away",
    ),
    Rule(
        'training.stream == "off" and not data.injection.templates',
        'set rollout.tail_rounds = false, or training.stream = "off" and data.injection.templates = []',
        when="rollout.tail_rounds",
        path="rollout.tail_rounds",
        reason="mini-batches in the order in which groups end would be sorted by length, and rewrites are not put off",
    ),
    Rule(
        f"{_PUNISHMENT}.max_length <= rollout.max_response_tokens",
        f"set {_PUNISHMENT}.max_length = {{rollout.max_response_tokens}}",
        when=f"{_PUNISHMENT}.enabled",
        reason="the full punishment would never be reached",
    ),
    Rule(
        'data.columns.answer != "" or not [one for one in reward.verifiers if one in gold_presets]',
        "set data.columns.answer to the column of gold answers, or reward.verifier to one that needs none",
        reason="dapo and lenient compare with a gold answer",
    ),
    Rule(
        'data.columns.answer != "" or reward.code.tests != ""',
        "set reward.code.tests to the column of the tests, or data.columns.answer if gold answers hold them",
        when='"code" in reward.verifiers',
    ),
    Rule(
        "rejection_sampling.min_tokens <= (rejection_sampling.max_tokens or rollout.max_response_tokens)",
        "lower rejection_sampling.min_tokens",
        reason="every response would be left out",
    ),
    *_schedule_rules("optimizer", "scheduled_steps", ""),
    *_schedule_rules("critic.optimizer", "critic_scheduled_steps", 'algorithm.name not in ("dapo", "sft") and '),
    # at_start and at_end are on by default; without held-out problems they have no effect, so a recipe with only model and
    # data is valid.
    Rule("data.has_held_out", "set data.eval_paths, or evaluation.interval = 0", when="evaluation.interval > 0"),
    Rule(
        'model.recompute_granularity == "selective"',
        'set model.recompute_granularity = "selective"',
        when='"recompute_modules" in megatron or "recompute_modules" in critic.megatron',
        reason="they are the modules that selective recomputation computes again",
    ),
    Rule(
        "parallel.use_distributed_optimizer",
        "set parallel.use_distributed_optimizer = true",
        when='any(table.get("overlap_param_gather") for table in (megatron, critic.megatron))',
        reason="no rank has to gather weights that others have stepped",
    ),
    Rule(
        'model.recompute_granularity == "full"',
        'set model.recompute_granularity = "full"',
        when='any(key in table for key in ("recompute_method", "recompute_num_layers") for table in (megatron, critic.megatron))',
        reason="they choose among whole layers",
    ),
    Rule(
        "checkpoint.keep_best in evaluation_metrics",
        'set checkpoint.keep_best = "eval/avg_at_k"',
        when='checkpoint.keep_best != ""',
    ),
    Rule(
        "checkpoint.interval > 0 and evaluation.interval > 0 and "
        "(evaluation.interval % checkpoint.interval == 0 or checkpoint.interval % evaluation.interval == 0)",
        "set evaluation.interval = {checkpoint.interval or 20} and checkpoint.interval = {checkpoint.interval or 20}",
        when='checkpoint.keep_best != ""',
        reason="the best checkpoint is one that was evaluated",
        path="checkpoint.keep_best",
    ),
)
