"""Builds models and learners from the configuration: the training side of a run, without generation."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_dapo.algorithms.group_advantages import CreditSettings
from megatron_dapo.algorithms.length_adaptive_lambda import LAMBDA_RULES, LambdaRule
from megatron_dapo.algorithms.objective import PolicyObjective
from megatron_dapo.algorithms.stop_rule import StopRule
from megatron_dapo.checkpoints.critic import ValueHeadInit
from megatron_dapo.config.model_schema import LoraConfig
from megatron_dapo.config.schema import Config
from megatron_dapo.megatron.actor import ActorSettings, MegatronActor, PolicyBeforeAdapters
from megatron_dapo.megatron.critic import CriticSettings, MegatronCritic
from megatron_dapo.megatron.model_config import ModelSettings
from megatron_dapo.megatron.parallel_state import join_as_nonmember
from megatron_dapo.megatron.tensor_overlap import overlapped_tokens
from megatron_dapo.megatron.trained_model import TrainedModel
from megatron_dapo.parallel.collectives import summing
from megatron_dapo.parallel.coordination import Progress, collective_timeout
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.trainer.actor_learner import PolicyLearner
from megatron_dapo.trainer.checkpointing import load_training_state
from megatron_dapo.trainer.critic_learner import CriticLearner
from megatron_dapo.trainer.distillation import Teachers
from megatron_dapo.trainer.learner import (
    ActorCriticLearner,
    ConcurrentUpdate,
    GroupLearner,
    Learner,
    RemoteCritic,
    RemotePolicy,
)
from megatron_dapo.trainer.offload import CRITIC, POLICY, REFERENCE, DeviceModels, teacher_key
from megatron_dapo.trainer.recorder import Phases
from megatron_dapo.trainer.sft import SftLearner
from megatron_dapo.trainer.topology import RunTopology

logger = logging.getLogger(__name__)


def build_actor(config: Config, topology: RunTopology, base: MegatronActor | None = None) -> MegatronActor | None:
    """Return this rank's part of the policy with the weights of model.path; None on ranks with only the critic.

    `base`: the policy of another run, whose weights this one shares. Collective over the world.
    """
    if topology.policy.is_member:
        settings = _actor_settings(config, topology, config.rollout.routing_replay)
        return _load_actor(config, topology, config.model.path, settings, base=base)
    join_as_nonmember(topology.policy_layout, topology.policy, collective_timeout(config.run.wait_timeout_seconds))
    return None


def build_learner(
    config: Config,
    actor: MegatronActor | None,
    topology: RunTopology,
    phases: Phases,
    stop_rule: StopRule | None = None,
) -> Learner:
    """Return the learner of algorithm.name with the reference policy and the critic that it needs. Collective.

    With `stop_rule`, only the critic learns (value pretraining).
    """
    algorithm = config.algorithm
    # The reference is the initial policy, with its own routing. It never trains, so it gets no optimizer state.
    reference: MegatronActor | PolicyBeforeAdapters | None = None
    if algorithm.needs_reference and actor is not None:
        reference = PolicyBeforeAdapters(actor) if config.lends_base else _load_frozen(config, topology)
    local: dict[str, TrainedModel] = {}
    if actor is not None:
        local[POLICY] = actor
    if isinstance(reference, MegatronActor):
        local[REFERENCE] = reference
    models_of_teachers = _load_teachers(config, topology, list(local.values())) if actor is not None else {}
    local |= {teacher_key(name): model for name, model in models_of_teachers.items()}
    critic = _build_critic(config, topology, list(local.values())) if config.has_critic else None
    if critic is not None:
        local[CRITIC] = critic
    # If every model stays on the device, nothing is moved, timed or logged.
    offloads = (
        config.model.offload != "none"
        or (config.has_critic and config.critic.offload != "none")
        or (bool(models_of_teachers) and config.distillation.offload != "none")
    )
    models = DeviceModels(local if offloads else {}, phases)

    policy, progress = None, topology.coordination.progress
    for model in local.values():
        mark_micro_batches(model, progress)
    if actor is not None:
        objective = PolicyObjective(algorithm, summing(actor.groups.context), actor.layout.context)
        teachers = Teachers(config, models_of_teachers, actor, models) if models_of_teachers else None
        policy = PolicyLearner(actor, reference, objective, config, phases, models, progress, teachers)
    if not config.has_critic:
        assert policy is not None, "without a critic every rank holds the policy"
        if algorithm.name == "sft":
            return SftLearner(policy, phases, models)
        budget = config.rollout.budget
        equal_prompts = budget.enabled and budget.prompt_weight == "equal"
        credit = CreditSettings(algorithm.credit, algorithm.turn_discount)
        return GroupLearner(policy, algorithm.advantage, phases, models, credit, equal_prompts=equal_prompts)
    policy_side = policy or RemotePolicy()
    critic_side = CriticLearner(critic, config, progress) if critic else RemoteCritic()
    concurrent = None
    if not topology.is_shared:
        concurrent = ConcurrentUpdate(topology, policy_side.counters, critic_side.counters, phases)
    return ActorCriticLearner(
        policy_side, critic_side, config, _lambda_rule(config), phases, models, concurrent, stop_rule
    )


def mark_micro_batches(model: TrainedModel, progress: Progress) -> None:
    """Count each started micro-batch as progress: a pass over many of them may go minutes without a collective."""
    for chunk in model.chunks:
        chunk.register_forward_pre_hook(lambda *_: progress.mark())


# ---- models


def _load_frozen(
    config: Config,
    topology: RunTopology,
    path: Path | None = None,
    offload: str | None = None,
    running_models: Sequence[TrainedModel] = (),
) -> MegatronActor:
    """Return a model on the policy's layout that is not trained. `path`: the policy as it starts if None, with the adapters of
    model.lora.path. `offload`: model.offload if None."""
    settings = _actor_settings(config, topology)
    lora = config.model.lora if path is None and config.model.lora.path else LoraConfig()
    settings = replace(settings, is_frozen=True, lora=lora, offload=settings.offload if offload is None else offload)
    return _load_actor(config, topology, path or config.model.path, settings, running_models)


def _load_teachers(
    config: Config, topology: RunTopology, others: Sequence[TrainedModel]
) -> dict[str, MegatronActor]:
    """Return the teachers that are models, by name."""
    teachers: dict[str, MegatronActor] = {}
    for teacher in config.distillation.models:
        path = Path(teacher.path) if teacher.path else None
        for model in (*others, *teachers.values()):
            model.offload()  # makes room for the next, which is built on the device
        running = [*others, *teachers.values()]
        teachers[teacher.name] = _load_frozen(config, topology, path, config.distillation.offload, running)
        logger.info("teacher %s: %s", teacher.name, path or config.model.path)
    return teachers


def _actor_settings(config: Config, topology: RunTopology, replays_routing: bool = False) -> ActorSettings:
    return ActorSettings(
        model=_model_settings(config, config.megatron),
        lora=config.model.lora,
        optimizer=config.optimizer,
        use_distributed_optimizer=config.parallel.use_distributed_optimizer,
        chunk_tokens=config.model.logprob_chunk_tokens,
        head_implementation=config.model.logprob_implementation,
        head_keep_bytes=round(1e9 * config.model.logprob_kept_gb),
        keeps_head_input=config.algorithm.gkl.coefficient > 0 or bool(config.distillation.models),
        replays_routing=replays_routing,
        seed=config.run.seed,
        offload=config.model.offload,
        fixed_tokens=_fixed_tokens(config.megatron, config.training.micro_batch_tokens, topology.policy_layout),
        collective_timeout_s=collective_timeout(config.run.wait_timeout_seconds),
    )


def _load_actor(
    config: Config,
    topology: RunTopology,
    path: Path,
    settings: ActorSettings,
    running_models: Sequence[TrainedModel] = (),
    base: MegatronActor | None = None,
) -> MegatronActor:
    # Without permission, the loader fails and names the missing files, which helps more than a random policy.
    is_random = path == config.model.path and config.model.allow_random_init and not any(path.glob("*.safetensors"))
    if is_random:
        logger.warning("%s holds no weights: the policy starts from random ones (model.allow_random_init)", path)
    seed = config.run.seed if is_random else None
    layout, part = topology.policy_layout, topology.policy
    running = [*running_models, *([base] if base else [])]
    return MegatronActor.build(path, layout, settings, running, part=part, random_seed=seed, base=base)


def _fixed_tokens(options: Mapping[str, Any], micro_batch_tokens: int, layout: ParallelLayout) -> int:
    """Return the common length of a model's micro-batches, or 0 if they may differ."""
    return overlapped_tokens(micro_batch_tokens, layout) if options.get("tp_comm_overlap") else 0


def critic_start(config: Config) -> Path:
    """Return the directory whose weights the critic starts from."""
    return Path(config.critic.path) if config.critic.path else config.model.path


def _build_critic(config: Config, topology: RunTopology, others: Sequence[TrainedModel]) -> MegatronCritic | None:
    """Return this rank's part of the critic, with its optimizer state if one is stored; None on ranks without a critic.

    `others`: this process's other models. ValueError if the directory does not match the policy's architecture and
    tokenizer.
    """
    for model in others:
        model.offload()  # makes room for the critic, which is built on the device
    start, layout, part = critic_start(config), topology.critic_layout, topology.critic
    if not part.is_member:
        join_as_nonmember(layout, part, collective_timeout(config.run.wait_timeout_seconds))
        return None
    settings = CriticSettings(
        model=_model_settings(config, config.critic_megatron),
        optimizer=config.critic.optimizer,
        use_distributed_optimizer=config.parallel.use_distributed_optimizer,
        seed=config.run.seed,
        offload=config.critic.offload,
        freeze=config.critic.freeze,
        fixed_tokens=_fixed_tokens(
            config.critic_megatron, config.critic.micro_batch_tokens or config.training.micro_batch_tokens, layout
        ),
        collective_timeout_s=collective_timeout(config.run.wait_timeout_seconds),
        head=ValueHeadInit(seed=config.run.seed, scale=config.critic.head_scale),
    )
    if not any(start.glob("*.safetensors")) and start == config.model.path and config.model.allow_random_init:
        return MegatronCritic.build(start, layout, settings, running_models=others, part=part, random_seed=config.run.seed)
    critic = MegatronCritic.build(start, layout, settings, policy_dir=config.model.path, running_models=others, part=part)
    if load_training_state(start, critic.saved_state):
        logger.info("the critic resumes with the optimizer state of %s", start)
    return critic


def _model_settings(config: Config, options: Mapping[str, Any]) -> ModelSettings:
    """Return number formats and recomputation for every trained model of the run, with megatron-core's own fields."""
    model = config.model
    return ModelSettings(
        model.dtype, model.recompute_granularity, config.precision, model.attention_implementation, options
    )


def _lambda_rule(config: Config) -> LambdaRule:
    section = config.advantage_estimation
    adaptive = {"alpha": section.lambda_alpha, "floor": section.lambda_floor}
    settings = {
        "fixed": {"value": section.policy_lambda},
        "length_adaptive": adaptive,
        "window": {**adaptive, "window": config.window.tokens},
    }
    return LAMBDA_RULES[section.lambda_rule](**settings[section.lambda_rule])
