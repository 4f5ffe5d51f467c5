"""The policy and its learner from the configuration: what trains, without anything that generates."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from megatron_dapo.algorithms.objective import PolicyObjective
from megatron_dapo.checkpoints.architecture import ModelArchitecture
from megatron_dapo.checkpoints.load import initialize_randomly, load_from_huggingface
from megatron_dapo.config.schema import Config
from megatron_dapo.config.validator import schedule_steps
from megatron_dapo.megatron.actor import ActorSettings, MegatronActor
from megatron_dapo.megatron.parallel_state import join_as_nonmember
from megatron_dapo.parallel.coordination import collective_timeout
from megatron_dapo.trainer.actor_critic import ActorCriticLearner, ActorCriticSettings
from megatron_dapo.trainer.actor_learner import LearnerSettings, PolicyLearner
from megatron_dapo.trainer.build_critic import (
    build_critic,
    build_critic_learner,
    pretraining_settings,
    training_settings,
)
from megatron_dapo.trainer.build_model import model_settings
from megatron_dapo.trainer.build_optimizer import learning_rate_schedule
from megatron_dapo.trainer.critic_learner import CriticLearner
from megatron_dapo.trainer.elsewhere import RemoteCritic, RemotePolicy
from megatron_dapo.trainer.topology import RunTopology
from megatron_dapo.trainer.update_order import ConcurrentUpdate, SequentialUpdate

logger = logging.getLogger(__name__)


def build_actor(config: Config, world: RunTopology) -> MegatronActor | None:
    """This rank's part of the policy with the weights of model.path; None on ranks of the critic alone. Collective."""
    if not world.policy.is_member:
        join_as_nonmember(world.policy_layout, world.policy, collective_timeout(config.run.wait_timeout_seconds))
        return None
    return _load_policy(config, world)


def _load_policy(config: Config, world: RunTopology) -> MegatronActor:
    architecture = ModelArchitecture.from_directory(config.model.path)
    has_weights = any(config.model.path.glob("*.safetensors")) or not config.model.allow_random_init

    def load(parameters: Any, tensors: Any) -> None:
        if has_weights:
            report = load_from_huggingface(config.model.path, tensors, world.policy.rank, parameters)
        else:
            report = initialize_randomly(config.run.seed, tensors, world.policy.rank, parameters)
            logger.warning(
                "%s holds no weights: the policy starts from random ones (model.allow_random_init)", config.model.path
            )
        logger.info("loaded %d of %d tensors from %s", report.num_tensors, report.num_model_tensors, config.model.path)

    settings = ActorSettings(
        model=model_settings(config),
        optimizer=config.optimizer,
        use_distributed_optimizer=config.parallel.use_distributed_optimizer,
        chunk_tokens=config.model.logprob_chunk_tokens,
        head_implementation=config.model.logprob_implementation,
        seed=config.run.seed,
        offload=config.model.offload,
        collective_timeout_s=collective_timeout(config.run.wait_timeout_seconds),
    )
    return MegatronActor(architecture, world.policy_layout, settings, load, part=world.policy)


Phase = Callable[[str], AbstractContextManager[object]]


def build_learner(
    config: Config, actor: MegatronActor | None, world: RunTopology, phase: Phase
) -> PolicyLearner | ActorCriticLearner:
    """The learner of the actor by algorithm.name; `actor` is None on ranks of the critic alone."""
    return _LEARNERS[config.algorithm.name](config, actor, world, phase)


def _policy_learner(
    config: Config, actor: MegatronActor, world: RunTopology, phase: Phase, reference: MegatronActor | None
) -> PolicyLearner:
    objective = PolicyObjective(config.algorithm, _sum_over_context(actor))
    return PolicyLearner(
        actor,
        objective,
        world.policy_layout,
        world.policy.rank,
        _learner_settings(config),
        learning_rate_schedule(config.optimizer, schedule_steps(config)),
        phase,
        reference,
        world.policy.group,
    )


def _reference(config: Config, world: RunTopology, is_needed: bool) -> MegatronActor | None:
    """The policy as it was; it is never trained, so its optimizer state stays unmade."""
    return _load_policy(config, world) if is_needed and world.policy.is_member else None


def _dapo_learner(config: Config, actor: MegatronActor, world: RunTopology, phase: Phase) -> PolicyLearner:
    """Group advantages and a clipped policy loss; a reference policy where the loss has a KL term."""
    reference = _reference(config, world, config.algorithm.kl_loss_coefficient > 0)
    return _policy_learner(config, actor, world, phase, reference)


def _actor_critic_learner(
    config: Config, actor: MegatronActor | None, world: RunTopology, phase: Phase
) -> ActorCriticLearner:
    """A critic's advantages; a reference policy where loss or reward have a KL term."""
    algorithm = config.algorithm
    with_reference = max(algorithm.kl_loss_coefficient, algorithm.kl_reward_coefficient) > 0
    return _with_critic(config, actor, world, phase, training_settings(config), with_reference)


def build_value_pretrainer(
    config: Config, actor: MegatronActor | None, world: RunTopology, phase: Phase
) -> ActorCriticLearner:
    """The critic learns, the policy stands still."""
    return _with_critic(config, actor, world, phase, pretraining_settings(config), with_reference=False)


def _with_critic(
    config: Config,
    actor: MegatronActor | None,
    world: RunTopology,
    phase: Phase,
    settings: ActorCriticSettings,
    with_reference: bool,
) -> ActorCriticLearner:
    reference = _reference(config, world, with_reference)
    policy = _policy_learner(config, actor, world, phase, reference) if actor else RemotePolicy()
    here = [model for model in (actor, reference) if model is not None]
    for model in here:
        model.offload()  # makes room for the critic
    critic = _critic_side(config, world, here)
    order = (
        SequentialUpdate(phase) if world.is_shared else ConcurrentUpdate(world, policy.counters, critic.counters, phase)
    )
    return ActorCriticLearner(policy, critic, settings, phase, order)


def _critic_side(config: Config, world: RunTopology, beside: Sequence[MegatronActor]) -> CriticLearner | RemoteCritic:
    if world.critic.is_member:
        return build_critic_learner(config, build_critic(config, world, beside))
    join_as_nonmember(world.critic_layout, world.critic, collective_timeout(config.run.wait_timeout_seconds))
    return RemoteCritic()


def _sum_over_context(actor: MegatronActor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Sums of a sequence's parts over the context ranks that hold them."""
    group = actor.groups.context
    if group.size() == 1:
        return lambda sums: sums

    def reduce(sums: torch.Tensor) -> torch.Tensor:
        total = sums.clone()
        dist.all_reduce(total, group=group)
        return total

    return reduce


def _learner_settings(config: Config) -> LearnerSettings:
    training, windows = config.training, config.algorithm.name == "tppo"
    return LearnerSettings(
        groups_per_mini_batch=training.mini_batch_prompts,
        epochs=training.epochs,
        micro_batch_tokens=training.micro_batch_tokens,
        aggregation=config.algorithm.loss.aggregation,
        aggregation_length=config.aggregation_length,
        temperature=config.rollout.temperature,
        shuffle_seed=config.run.seed if training.shuffle else None,
        schedule_counts_optimizer_steps=config.optimizer.warmup_unit == "optimizer_step",
        max_consecutive_skips=training.max_consecutive_skips,
        first_train_step=config.policy_starts_at,
        # A step's windows are of many groups, a few of each.
        samples_per_mini_batch=training.mini_batch_prompts * config.rollout.group_size if windows else 0,
    )


_LEARNERS: dict[str, Callable[..., PolicyLearner | ActorCriticLearner]] = {
    "dapo": _dapo_learner,
    "ppo": _actor_critic_learner,
    "vapo": _actor_critic_learner,
    "tppo": _actor_critic_learner,
}
