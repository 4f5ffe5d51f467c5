"""Learning from one rollout batch: `Learner.learn`, which the loop and the replay of a dump call.

    score                 the critic's values, KL penalties towards the reference     (algorithms with a critic)
    estimate_advantages   from groups of rewards, or from the critic's values
    train_critic          mini-batches of finished responses towards their returns    (algorithms with a critic)
    train_actor           mini-batches of all responses, old log-probs first
    finish                the metrics of both, the same on every rank

Values come from the critic before this batch, and no update changes the other model, so the order of the two updates
does not matter. If policy and critic have separate ranks, they update at the same time: `train_critic` returns at once
on the policy's ranks and `train_actor` on the critic's, and both sides wait for each other in `finish`.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch

from megatron_dapo.algorithms.group_advantages import CreditSettings, EstimatedBatch, estimate_group_advantages
from megatron_dapo.algorithms.length_adaptive_lambda import LambdaRule
from megatron_dapo.algorithms.stop_rule import StopRule
from megatron_dapo.algorithms.token_rewards import token_divergence
from megatron_dapo.algorithms.value_advantages import estimate_value_advantages
from megatron_dapo.config.algorithm_schema import AdvantageConfig
from megatron_dapo.config.schema import Config
from megatron_dapo.megatron.response_tokens import receive_response_tokens
from megatron_dapo.rollout.batch import joined_samples
from megatron_dapo.trainer.actor_learner import LearnResult, PolicyLearner
from megatron_dapo.trainer.critic_learner import CriticCounters, CriticLearner
from megatron_dapo.trainer.offload import CRITIC, DeviceModels
from megatron_dapo.trainer.recorder import Phases
from megatron_dapo.trainer.topology import RunTopology
from megatron_dapo.trainer.updater import StepCounters
from megatron_dapo.types import TrainSample

if TYPE_CHECKING:
    from megatron_dapo.megatron.actor import MegatronActor
    from megatron_dapo.megatron.critic import MegatronCritic

logger = logging.getLogger(__name__)

HISTORY_LENGTH = 20  # train steps of the critic's history that a checkpoint keeps


class Learner(ABC):
    """Trains the policy. All ranks call each method with the same samples."""

    critic: CriticLearner | RemoteCritic | None = None

    def __init__(self, policy: PolicyLearner | RemotePolicy, phases: Phases, models: DeviceModels) -> None:
        self.policy = policy
        self.models = models
        self._phases = phases

    @property
    def counters(self) -> StepCounters:
        """Return the policy's counters."""
        return self.policy.counters

    @property
    def local_actor(self) -> MegatronActor | None:
        """Return this rank's part of the policy, if it holds one."""
        return self.policy.actor if isinstance(self.policy, PolicyLearner) else None

    @property
    def local_critic(self) -> MegatronCritic | None:
        """Return this rank's part of the critic, if it holds one."""
        return self.critic.critic if isinstance(self.critic, CriticLearner) else None

    @property
    def snapshots(self) -> dict[str, MegatronActor]:
        """Return this rank's part of the teachers that are snapshots of the policy, by name."""
        teachers = self.policy.teachers if isinstance(self.policy, PolicyLearner) else None
        return {} if teachers is None else teachers.snapshots

    def learn(
        self, samples: Sequence[TrainSample], train_step: int, mismatch_gate: float | None = None
    ) -> tuple[EstimatedBatch, LearnResult]:
        """Make a train step on a rollout batch; return its advantages and, on every rank, both models' metrics.

        Raises ValueError if a reward is not finite, and the errors of `PolicyLearner.learn`.
        """
        batch = self.estimate_advantages(self.score(samples))
        critic_metrics = self.train_critic(batch, train_step)
        result = self.train_actor(batch, train_step, mismatch_gate)
        return batch, self.finish(batch, result, critic_metrics, train_step)

    def learn_parts(
        self, parts: Iterable[Sequence[TrainSample]], train_step: int, mismatch_gate: float | None = None
    ) -> tuple[EstimatedBatch, LearnResult]:
        """Make the train step of `learn` on a batch whose parts arrive one by one (training.stream).

        `mismatch_gate` sees only the first part.
        """
        assert isinstance(self.policy, PolicyLearner), "a critic's advantages are of whole batches"
        seen: list[Sequence[TrainSample]] = []

        def estimated() -> Iterable[list[TrainSample]]:
            for samples in parts:
                seen.append(samples)
                yield self.estimate_advantages(samples).policy_samples

        result = self.policy.learn_parts(estimated(), train_step, mismatch_gate)
        # Advantages are within groups, so those of the whole batch are the parts'; its metrics are over all groups.
        batch = self.estimate_advantages(joined_samples(seen))
        return batch, self.finish(batch, result, {}, train_step)

    def share(self, samples: Sequence[TrainSample], train_step: int) -> tuple[set[int], set[int]]:
        """Return the indices of the samples that this rank packs in `train_step`, and of those that its part of the policy
        packs. Does not need the samples' numbers."""
        packed = self.policy.share(samples, train_step)
        return packed, packed

    def score(self, samples: Sequence[TrainSample]) -> list[TrainSample]:
        """Return the samples with the critic's values and the reference's penalties. By default they stay unchanged."""
        return list(samples)

    @abstractmethod
    def estimate_advantages(self, samples: Sequence[TrainSample]) -> EstimatedBatch:
        """Return the batch with advantages."""

    def train_critic(self, batch: EstimatedBatch, train_step: int) -> dict[str, float]:
        """Train the critic and return its metrics; none without a critic."""
        return {}

    def train_actor(self, batch: EstimatedBatch, train_step: int, mismatch_gate: float | None = None) -> LearnResult:
        """Train the policy, see `PolicyLearner.learn`."""
        return self.policy.learn(batch.policy_samples, train_step, mismatch_gate)

    def finish(
        self, batch: EstimatedBatch, result: LearnResult, critic_metrics: Mapping[str, float], train_step: int
    ) -> LearnResult:
        """Return the metrics of the whole train step, the same on every rank."""
        return replace(result, metrics={**batch.metrics, **result.metrics})

    def has_converged(self) -> bool:
        """Return True if further training gains nothing; the same on every rank."""
        return False

    def compare(self, samples: Sequence[TrainSample], temperature: float) -> dict[str, float]:
        """Return the mismatch of the policy with the log-probs in `samples`, see `PolicyLearner.compare`."""
        return self.policy.compare(samples, temperature)


class GroupLearner(Learner):
    """Trains the policy with advantages from groups (DAPO)."""

    policy: PolicyLearner

    def __init__(
        self,
        policy: PolicyLearner,
        advantage: AdvantageConfig,
        phases: Phases,
        models: DeviceModels,
        credit: CreditSettings = CreditSettings(),
        *,
        equal_prompts: bool = False,
    ) -> None:
        """`equal_prompts`: groups of unequal sizes (rollout.budget) count equally in the loss."""
        super().__init__(policy, phases, models)
        self._advantage = advantage
        self._credit = credit
        self._equal_prompts = equal_prompts

    def estimate_advantages(self, samples: Sequence[TrainSample]) -> EstimatedBatch:
        """Return the batch with the advantages of `algorithm.advantage`."""
        with self._phases.phase("advantages"):
            return estimate_group_advantages(
                samples, self._advantage, self._credit, equal_prompts=self._equal_prompts
            )


class ActorCriticLearner(Learner):
    """Trains policy and critic with the critic's advantages: PPO, VAPO, T-PPO.

    During the first critic.warmup_train_steps the policy is frozen and only the critic learns. With `stop_rule` (value
    pretraining), the policy never learns, and the rule ends the run.
    """

    critic: CriticLearner | RemoteCritic

    def __init__(
        self,
        policy: PolicyLearner | RemotePolicy,
        critic: CriticLearner | RemoteCritic,
        config: Config,
        lambda_rule: LambdaRule,
        phases: Phases,
        models: DeviceModels,
        concurrent: ConcurrentUpdate | None = None,
        stop_rule: StopRule | None = None,
    ) -> None:
        """`concurrent`: the exchange between separate ranks (None: the same ranks hold both models)."""
        super().__init__(policy, phases, models)
        self.critic = critic
        self._config = config
        self._lambda_rule = lambda_rule
        self._concurrent = concurrent
        self._stop_rule = stop_rule

    def share(self, samples: Sequence[TrainSample], train_step: int) -> tuple[set[int], set[int]]:
        """Return the samples to pack (all of them on the critic's ranks) and the policy's share.

        Each epoch, the critic cuts finished responses with finite values anew, so its share is unknown beforehand.
        """
        whole = train_step < self._policy_starts_at or bool(self._config.algorithm.kl_reward_coefficient)
        policy = self.policy.share(samples, train_step, whole=whole)
        return policy | self.critic.share(samples), policy

    def score(self, samples: Sequence[TrainSample]) -> list[TrainSample]:
        """Return the samples with the critic's values and, with a KL coefficient, their tokens' penalties."""
        with self._phases.phase("values"), self.models.on_device(CRITIC):
            values = self.critic.values(samples)
        scored = [
            replace(sample, values=value[:-1], value_after=float(value[-1]))
            for sample, value in zip(samples, values, strict=True)
        ]
        algorithm = self._config.algorithm
        if not algorithm.kl_reward_coefficient:
            return scored
        # The KL is that of the policy about to be trained, not of the one that sampled.
        policy, reference = self.policy.response_logprobs(samples)
        penalties = [
            algorithm.kl_reward_coefficient
            * token_divergence(algorithm.kl_reward_estimator, *pair, torch.ones_like(pair[0]))
            for pair in zip(policy, reference, strict=True)
        ]
        return [replace(one, kl_penalties=penalty) for one, penalty in zip(scored, penalties, strict=True)]

    def estimate_advantages(self, samples: Sequence[TrainSample]) -> EstimatedBatch:
        """Return advantages for the policy and returns for the critic. ValueError if no value is finite."""
        config = self._config
        ignored_tail_tokens = config.window.ignored_tail_tokens if config.algorithm.name == "tppo" else 0
        with self._phases.phase("advantages"):
            return estimate_value_advantages(
                samples, config.advantage_estimation, self._lambda_rule, ignored_tail_tokens
            )

    def train_critic(self, batch: EstimatedBatch, train_step: int) -> dict[str, float]:
        """Train the critic and return its metrics; ranks without it return at once."""
        with self._phases.phase("train_critic"), self.models.on_device(CRITIC, training=CRITIC):
            return self.critic.learn(batch.critic_samples, train_step)

    def train_actor(self, batch: EstimatedBatch, train_step: int, mismatch_gate: float | None = None) -> LearnResult:
        """Train the policy, or only observe it while it is frozen."""
        # `observe` still computes metrics and applies the gate while the policy is frozen.
        learn = self.policy.learn if train_step >= self._policy_starts_at else self.policy.observe
        return learn(batch.policy_samples, train_step, mismatch_gate)

    @property
    def _policy_starts_at(self) -> float:
        return math.inf if self._stop_rule else self._config.policy_starts_at

    def finish(
        self, batch: EstimatedBatch, result: LearnResult, critic_metrics: Mapping[str, float], train_step: int
    ) -> LearnResult:
        """Wait for the other model's ranks and return the metrics of both models, the same on every rank."""
        if self._concurrent is not None:
            # Each side knows only its result, but the loop and rank 0's records need both.
            result, critic_metrics = self._concurrent.exchange(result, critic_metrics)
        self._watch(batch, critic_metrics["critic/loss"], train_step)
        return replace(result, metrics={**result.metrics, **batch.metrics, **critic_metrics})

    def has_converged(self) -> bool:
        """Ask the stop rule about the critic's history, which is the same on every rank."""
        return self._stop_rule is not None and self._stop_rule.has_converged(self.critic.counters.history)

    def _watch(self, batch: EstimatedBatch, loss: float, train_step: int) -> None:
        """Record the explained variance if there was variance to explain, and warn if it is too low."""
        if not batch.critic_samples:
            logger.info("train step %d: no response is finished, the critic learns nothing", train_step + 1)
            return
        if not batch.has_spread:
            logger.info("train step %d: all returns are equal, there is nothing to explain", train_step + 1)
            return
        explained, alarm = batch.metrics["critic/explained_variance"], self._config.critic.explained_variance_alarm
        # The stop rule reads exactly as many steps as it needs; a checkpoint keeps no more.
        length = self._stop_rule.num_steps if self._stop_rule else HISTORY_LENGTH
        self.critic.counters.remember(explained, loss, length)
        if self._stop_rule is None and explained < alarm:
            logger.warning(
                "train step %d: the critic explains %.3f of the returns' variance, below critic.explained_variance_alarm "
                "%.3g: advantages are noisier than without it; raise critic.optimizer.learning_rate or critic.epochs, or "
                "pretrain it longer",
                train_step + 1,
                explained,
                alarm,
            )


class RemotePolicy:
    """Stub for the policy's learner on the critic's ranks, with the counters that the policy's ranks report."""

    def __init__(self) -> None:
        self.counters = StepCounters()

    def learn(self, samples: Sequence[TrainSample], train_step: int, mismatch_gate: float | None = None) -> LearnResult:
        """Do nothing: the policy's ranks report their result in `ConcurrentUpdate.exchange`."""
        return LearnResult({})

    observe = learn

    def share(self, samples: Sequence[TrainSample], train_step: int, whole: bool = False) -> set[int]:
        """Return nothing: the policy's ranks pack the samples."""
        return set()

    def response_logprobs(self, samples: Sequence[TrainSample]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Receive what `PolicyLearner.response_logprobs` computes."""
        policy = receive_response_tokens(samples)
        return policy, receive_response_tokens(samples)

    def compare(self, samples: Sequence[TrainSample], temperature: float) -> dict[str, float]:
        raise AssertionError("only the policy's ranks compare it with servers")


class RemoteCritic:
    """Stub for the critic's learner on the policy's ranks, with the counters that the critic's ranks report."""

    def __init__(self) -> None:
        self.counters = CriticCounters()

    def share(self, samples: Sequence[TrainSample]) -> set[int]:
        """Return nothing: the critic's ranks pack the samples."""
        return set()

    def values(self, samples: Sequence[TrainSample]) -> list[torch.Tensor]:
        """Receive what `CriticLearner.values` computes."""
        return receive_response_tokens(samples, num_after=1)

    def learn(self, samples: Sequence[TrainSample], train_step: int) -> dict[str, float]:
        """Do nothing: the critic's ranks report their metrics in `ConcurrentUpdate.exchange`."""
        return {}


class ConcurrentUpdate:
    """Exchanges results between policy and critic when they update at the same time on separate ranks.

    Time in the other model's phase is the wait for it. A failure on one side ends that side's processes, which also
    ends the other side's wait.
    """

    def __init__(
        self, topology: RunTopology, policy_counters: StepCounters, critic_counters: CriticCounters, phases: Phases
    ) -> None:
        """Takes both models' counters on this rank; the remote model's are set to what its ranks report."""
        assert not topology.is_shared, "models on the same ranks update one after the other"
        self._topology = topology
        self._policy_counters = policy_counters
        self._critic_counters = critic_counters
        self._phases = phases

    def exchange(
        self, result: LearnResult, critic_metrics: Mapping[str, float]
    ) -> tuple[LearnResult, Mapping[str, float]]:
        """Return both models' results on every rank, given this rank's own. Collective over the world."""
        topology, policy_report, critic_report = self._topology, None, None
        if topology.policy.is_member:
            policy_report = {**asdict(result), "counters": asdict(self._policy_counters)}
            # JSON cannot hold tensors.
            policy_report["metrics"] = {name: float(value) for name, value in result.metrics.items()}
        else:
            critic_report = {"metrics": dict(critic_metrics), "counters": asdict(self._critic_counters)}
        # This measures the wait for the other side, so it counts as that side's phase.
        with self._phases.phase("train_critic" if topology.policy.is_member else "train"):
            policy_report = topology.coordination.broadcast(policy_report, source=topology.policy.first_rank)
            critic_report = topology.coordination.broadcast(critic_report, source=topology.critic.first_rank)
        _set(self._policy_counters, policy_report.pop("counters"))
        _set(self._critic_counters, critic_report["counters"])
        return LearnResult(**policy_report), critic_report["metrics"]


def _set(counters: StepCounters, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        setattr(counters, name, value)
