"""The critic and its learner from the configuration."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path

from megatron_dapo.algorithms.length_adaptive_lambda import LambdaRule, build_lambda_rule
from megatron_dapo.algorithms.stop_rule import StopRule
from megatron_dapo.algorithms.value_advantages import AdvantageSettings
from megatron_dapo.algorithms.value_loss import build_value_loss
from megatron_dapo.checkpoints.atomic_directory import replace_directory
from megatron_dapo.checkpoints.critic import ValueHeadInit
from megatron_dapo.config.schema import Config
from megatron_dapo.config.validator import critic_schedule_steps
from megatron_dapo.megatron.critic import CriticSettings, MegatronCritic
from megatron_dapo.megatron.trained_model import TrainedModel
from megatron_dapo.parallel.coordination import collective_timeout
from megatron_dapo.trainer.actor_critic import ActorCriticSettings
from megatron_dapo.trainer.build_model import model_settings
from megatron_dapo.trainer.build_optimizer import learning_rate_schedule
from megatron_dapo.trainer.critic_learner import CriticLearner, CriticLearnerSettings
from megatron_dapo.trainer.critic_state import load_training_state, save_training_state
from megatron_dapo.trainer.topology import RunTopology

logger = logging.getLogger(__name__)


def critic_start(config: Config) -> Path:
    """The folder the critic starts from."""
    return Path(config.critic.path) if config.critic.path else config.model.path


def build_critic(config: Config, world: RunTopology, beside: Sequence[TrainedModel]) -> MegatronCritic:
    """This rank's part of the critic, from critic.path or else from the policy; with its optimizer where that is kept.
    `beside`: the models of this process.

    ValueError where the folder is not of the policy's architecture and tokenizer.
    """
    start, layout, settings = critic_start(config), world.critic_layout, _critic_settings(config)
    if not any(start.glob("*.safetensors")) and start == config.model.path and config.model.allow_random_init:
        return MegatronCritic.build_random(
            start, layout, settings, seed=config.run.seed, beside=beside, part=world.critic
        )
    critic = MegatronCritic.build(
        start, layout, settings, policy_dir=config.model.path, beside=beside, part=world.critic
    )
    if load_training_state(start, critic, layout, critic.rank, critic.part.group):
        logger.info("the critic goes on with the optimizer state of %s", start)
    return critic


def _critic_settings(config: Config) -> CriticSettings:
    return CriticSettings(
        model=model_settings(config),
        optimizer=config.critic.optimizer,
        use_distributed_optimizer=config.parallel.use_distributed_optimizer,
        seed=config.run.seed,
        offload=config.critic.offload,
        collective_timeout_s=collective_timeout(config.run.wait_timeout_seconds),
        head=ValueHeadInit(seed=config.run.seed, scale=config.critic.head_scale),
    )


def build_critic_learner(config: Config, critic: MegatronCritic) -> CriticLearner:
    """What trains the critic."""
    section, training = config.critic, config.training
    bounds = {"clip_value_low": section.clip_value_low, "clip_value_high": section.clip_value_high}
    prompts = section.mini_batch_prompts or training.mini_batch_prompts
    settings = CriticLearnerSettings(
        samples_per_mini_batch=prompts * config.rollout.group_size,
        epochs=section.epochs,
        micro_batch_tokens=section.micro_batch_tokens or training.micro_batch_tokens,
        aggregation=section.aggregation,
        shuffle_seed=config.run.seed if training.shuffle else None,
        schedule_counts_optimizer_steps=section.optimizer.warmup_unit == "optimizer_step",
        max_consecutive_skips=training.max_consecutive_skips,
    )
    schedule = learning_rate_schedule(section.optimizer, critic_schedule_steps(config))
    value_loss = build_value_loss(section.loss, bounds if section.loss == "clipped" else {})
    return CriticLearner(critic, critic.layout, critic.rank, value_loss, settings, schedule)


def training_settings(config: Config) -> ActorCriticSettings:
    """Policy and critic together, as ppo, vapo and tppo train them."""
    section, algorithm = config.advantage_estimation, config.algorithm
    return ActorCriticSettings(
        advantages=AdvantageSettings(
            lambda_rule=_lambda_rule(config),
            gamma=section.gamma,
            critic_lambda=section.critic_lambda,
            whiten=section.whiten,
            limit=section.clip,
            ignored_tail_tokens=config.window.ignored_tail_tokens if algorithm.name == "tppo" else 0,
        ),
        kl_coefficient=algorithm.kl_reward_coefficient,
        kl_estimator=algorithm.kl_reward_estimator,
        policy_starts_at=config.policy_starts_at,
        explained_variance_alarm=config.critic.explained_variance_alarm,
    )


def pretraining_settings(config: Config) -> ActorCriticSettings:
    """The critic alone, on the Monte-Carlo returns of the policy as it is (VC-PPO, arXiv 2503.01491)."""
    section = config.value_pretraining
    rule = StopRule(section.min_steps, section.explained_variance_slope, section.loss_slope)
    return ActorCriticSettings(
        has_converged=rule.has_converged,
        advantages=AdvantageSettings(
            build_lambda_rule("fixed", {"value": 1.0}), gamma=config.advantage_estimation.gamma
        ),
        policy_starts_at=math.inf,
        explained_variance_alarm=-math.inf,
        history_length=section.min_steps,
    )


def _lambda_rule(config: Config) -> LambdaRule:
    section = config.advantage_estimation
    adaptive = {"alpha": section.lambda_alpha, "floor": section.lambda_floor}
    return build_lambda_rule(
        section.lambda_rule,
        {
            "fixed": {"value": section.policy_lambda},
            "length_adaptive": adaptive,
            "window": {**adaptive, "window": config.window.tokens},
        }[section.lambda_rule],
    )


def export_critic_folder(config: Config, critic: MegatronCritic, target: Path) -> Path:
    """The critic as a Hugging Face folder with its optimizer state beside; an earlier one is replaced once it is whole.
    All ranks of the critic call it.
    """
    with replace_directory(target, critic.part.group) as directory:
        critic.export(directory, critic_start(config))
        save_training_state(directory, critic, critic.layout, critic.rank)
    return target
