"""What happens to a rollout batch where a critic makes the advantages: PPO, VAPO, T-PPO.

    samples -> the critic's values -> (KL towards the reference off the rewards) -> advantages, returns
            -> the policy's learner: mini-batches, exact denominators, guarded steps
            -> the critic's learner: finished responses towards their returns

The values are those of the critic before this batch, so the order of the two updates does not matter: they are made in
turn by the ranks that hold both models, or at the same time by ranks of their own (`update_order`). What is between is
computed by every rank. In the first `policy_starts_at` train steps the policy stands still and the critic alone learns;
value pretraining is a run of nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from megatron_dapo.algorithms.token_rewards import token_divergence
from megatron_dapo.algorithms.value_advantages import AdvantageSettings, EstimatedBatch, estimate_advantages
from megatron_dapo.trainer.actor_learner import LearnerCounters, LearnResult
from megatron_dapo.trainer.critic_learner import CriticCounters
from megatron_dapo.trainer.update_order import SequentialUpdate, UpdateOrder
from megatron_dapo.types import TrainSample

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ActorCriticSettings:
    """How policy and critic play together."""

    advantages: AdvantageSettings
    kl_coefficient: float = 0.0  # of the KL taken off the rewards
    kl_estimator: str = "k1"
    policy_starts_at: float = 0  # train step; infinity: never
    explained_variance_alarm: float = -1.0
    history_length: int = 20  # train steps
    has_converged: Callable[[Sequence[Sequence[float]]], bool] = lambda history: False  # see StopRule


class PolicySide(Protocol):
    """The policy's learner, or its place on ranks that hold nothing of it."""

    counters: LearnerCounters

    def learn(
        self, samples: Sequence[TrainSample], train_step: int, mismatch_gate: float | None = None
    ) -> LearnResult: ...

    def observe(
        self, samples: Sequence[TrainSample], train_step: int, mismatch_gate: float | None = None
    ) -> LearnResult: ...

    def response_logprobs(self, samples: Sequence[TrainSample]) -> tuple[list[torch.Tensor], list[torch.Tensor]]: ...

    def compare(self, samples: Sequence[TrainSample], temperature: float) -> dict[str, float]: ...


class CriticSide(Protocol):
    """The critic's learner, or its place on ranks that hold nothing of it."""

    counters: CriticCounters

    def values(self, samples: Sequence[TrainSample]) -> list[torch.Tensor]: ...

    def learn(self, samples: Sequence[TrainSample], train_step: int) -> dict[str, float]: ...


class ActorCriticLearner:
    """Trains policy and critic on rollout batches. All ranks call `learn` with the same samples."""

    def __init__(
        self,
        policy: PolicySide,
        critic: CriticSide,
        settings: ActorCriticSettings,
        phase: Callable[[str], AbstractContextManager[object]],
        order: UpdateOrder | None = None,
    ) -> None:
        """`order`: of the two updates (None: in turn)."""
        self.policy = policy
        self.critic = critic
        self._settings = settings
        self._phase = phase
        self._order = order or SequentialUpdate(phase)

    @property
    def counters(self) -> LearnerCounters:
        """The policy's."""
        return self.policy.counters

    def learn(self, samples: Sequence[TrainSample], train_step: int, mismatch_gate: float | None = None) -> LearnResult:
        """One pass over a rollout batch. Errors as in `PolicyLearner.learn`; ValueError where no value is finite."""
        with self._phase("values"):
            values = self.critic.values(samples)
        penalties = self._penalties(samples)
        with self._phase("advantages"):
            batch = estimate_advantages(samples, values, self._settings.advantages, penalties)
        result, critic_metrics = self._order.run(
            lambda: self._learn_policy(batch, train_step, mismatch_gate),
            lambda: self.critic.learn(batch.critic_samples, train_step),
        )
        self._watch(batch, critic_metrics["critic/loss"], train_step)
        advantages = {one.sample_id: _mean_advantage(one) for one in batch.policy_samples}
        return replace(result, metrics={**result.metrics, **batch.metrics, **critic_metrics}, advantages=advantages)

    def has_converged(self) -> bool:
        """By the critic's history, which is the same on every rank."""
        return self._settings.has_converged(self.critic.counters.history)

    def compare(self, samples: Sequence[TrainSample], temperature: float) -> dict[str, float]:
        """See `PolicyLearner.compare`."""
        return self.policy.compare(samples, temperature)

    def _learn_policy(self, batch: EstimatedBatch, train_step: int, mismatch_gate: float | None) -> LearnResult:
        if train_step >= self._settings.policy_starts_at:
            return self.policy.learn(batch.policy_samples, train_step, mismatch_gate)
        return self.policy.observe(batch.policy_samples, train_step, mismatch_gate)

    def _penalties(self, samples: Sequence[TrainSample]) -> list[torch.Tensor] | None:
        """[R] beta KL(pi || pi_ref) of each token, by the policy that is about to be trained."""
        settings = self._settings
        if not settings.kl_coefficient:
            return None
        with self._phase("logprobs"):
            policy, reference = self.policy.response_logprobs(samples)
        return [
            settings.kl_coefficient * token_divergence(settings.kl_estimator, *pair, torch.ones_like(pair[0]))
            for pair in zip(policy, reference, strict=True)
        ]

    def _watch(self, batch: EstimatedBatch, loss: float, train_step: int) -> None:
        """Record what the critic explained, where there was something to explain; say where it is too little."""
        if not batch.critic_samples:
            logger.info("train step %d: no response is finished, the critic learns nothing", train_step + 1)
            return
        if not batch.has_spread:
            logger.info("train step %d: all returns are equal, there is nothing to explain", train_step + 1)
            return
        explained = batch.metrics["critic/explained_variance"]
        self.critic.counters.remember(explained, loss, self._settings.history_length)
        if explained < self._settings.explained_variance_alarm:
            logger.warning(
                "train step %d: the critic explains %.3f of the returns' variance, below critic.explained_variance_alarm "
                "%.3g: advantages are noisier than without it; raise critic.optimizer.learning_rate or critic.epochs, or "
                "pretrain it longer",
                train_step + 1,
                explained,
                self._settings.explained_variance_alarm,
            )


def _mean_advantage(sample: TrainSample) -> float:
    """Over the trained tokens; 0 without one."""
    return float((sample.advantages * sample.loss_mask).sum() / sample.loss_mask.sum().clamp(min=1))
