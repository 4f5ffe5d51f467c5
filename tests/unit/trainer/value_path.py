"""Samples, and a critic and a policy that give known numbers, for the tests of the value path."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field

import torch

from megatron_dapo.algorithms.objective import PolicyObjective
from megatron_dapo.algorithms.value_loss import build_value_loss
from megatron_dapo.config.algorithm_schema import AlgorithmConfig
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.trainer.actor_learner import LearnerSettings, PolicyLearner
from megatron_dapo.trainer.critic_learner import CriticLearner, CriticLearnerSettings
from megatron_dapo.trainer.learning_rate import LearningRateSchedule


@dataclass
class Result:
    metrics: dict[str, float]
    grad_norm: float = 1.0
    applied: bool = True


@dataclass
class Outputs:
    logprobs: torch.Tensor
    entropy: torch.Tensor


@dataclass
class FakeCritic:
    """The value of a position is a tenth of the token id there, plus one for every step made."""

    num_steps: int = 0
    applies: bool = True
    grad_norm: float = 1.0
    learning_rates: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    trained: list[list[str]] = field(default_factory=list)

    def forward_values(self, micro_batches):
        return [micro_batch.token_ids.float() / 10 + self.num_steps for micro_batch in micro_batches]

    def train_step(self, micro_batches, loss_fn, learning_rate):
        totals: dict[str, float] = {}
        loss = 0.0
        for index, values in enumerate(self.forward_values(micro_batches)):
            part, metrics = loss_fn(micro_batches[index], values, index)
            loss += float(part)
            for name, value in metrics.items():
                totals[name] = totals.get(name, 0.0) + float(value)
        self.losses.append(loss)
        self.learning_rates.append(learning_rate)
        self.trained.append([name for micro_batch in micro_batches for name in micro_batch.sample_ids])
        self.num_steps += self.applies
        return Result(totals, self.grad_norm, self.applies)


class FakePolicy:
    """Every token has log-prob -1; notes the advantages it is trained with, by sample."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.learning_rates: list[float] = []

    def forward_logprobs(self, micro_batches, temperature):
        return [self._outputs(micro_batch) for micro_batch in micro_batches]

    def _outputs(self, micro_batch) -> Outputs:
        return Outputs(torch.full((micro_batch.num_tokens,), -1.0), torch.zeros(micro_batch.num_tokens))

    def train_step(self, micro_batches, loss_fn, temperature, learning_rate):
        totals: dict[str, float] = {}
        for index, micro_batch in enumerate(micro_batches):
            _, metrics = loss_fn(micro_batch, self._outputs(micro_batch), index)
            for name, value in metrics.items():
                totals[name] = totals.get(name, 0.0) + float(value)
        self.num_steps += 1
        self.learning_rates.append(learning_rate)
        return Result(totals)


def make_critic_learner(critic: FakeCritic, loss: str = "squared", aggregation: str = "token_mean", size: int = 64):
    settings = CriticLearnerSettings(
        samples_per_mini_batch=size,
        epochs=1,
        micro_batch_tokens=64,
        aggregation=aggregation,
        shuffle_seed=None,
        schedule_counts_optimizer_steps=False,
        max_consecutive_skips=3,
    )
    schedule = LearningRateSchedule(1e-2, 2, 10)
    return CriticLearner(critic, ParallelLayout(1), 0, build_value_loss(loss), settings, schedule)


def make_policy_learner(policy: FakePolicy, positive_coefficient: float = 0.0, **changes) -> PolicyLearner:
    schedule = LearningRateSchedule(1e-3, changes.pop("warmup_steps", 0), 10)
    settings = LearnerSettings(
        groups_per_mini_batch=64,
        epochs=1,
        micro_batch_tokens=64,
        aggregation=changes.pop("aggregation", "token_mean"),
        aggregation_length=8,
        temperature=1.0,
        shuffle_seed=None,
        schedule_counts_optimizer_steps=False,
        max_consecutive_skips=3,
        **changes,
    )
    layout = ParallelLayout(1)
    objective = PolicyObjective(AlgorithmConfig(positive_example_coefficient=positive_coefficient))
    return PolicyLearner(policy, objective, layout, 0, settings, schedule, lambda name: nullcontext())
