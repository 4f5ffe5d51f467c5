"""The critic's side of a train step: values of a rollout batch, and optimizer steps towards their returns.

    samples -> packed for the critic's own layout -> forward -> values of every response token, on every rank
    finished samples with returns -> mini-batches -> global denominators -> forward, backward, guarded step

The critic has its own layout, mini-batches, micro-batches, schedule and number of passes. A step whose gradient is not
finite changes nothing and is counted, and the policy still takes its step; several of them in a row end the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from megatron_dapo.algorithms.aggregation import global_denominators, sample_token_weights
from megatron_dapo.algorithms.value_loss import ValueLoss, ValueLossInputs
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.parallel.mini_batch import build_micro_batches, split_mini_batches
from megatron_dapo.parallel.packing import MicroBatchLimits
from megatron_dapo.trainer.actor_learner import LearnerCounters, StepResult
from megatron_dapo.trainer.learning_rate import LearningRateSchedule
from megatron_dapo.trainer.response_tokens import gather_response_tokens
from megatron_dapo.types import MicroBatch, TrainSample


class Critic(Protocol):
    """What is needed of the critic that is trained. Every call is collective."""

    def forward_values(self, micro_batches: Sequence[MicroBatch]) -> list[torch.Tensor | None]: ...

    def train_step(
        self, micro_batches: Sequence[MicroBatch], loss_fn: Callable[..., Any], learning_rate: float
    ) -> StepResult: ...

    def state_shards(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]: ...

    def load_state_shards(self, tensors: Mapping[str, torch.Tensor], description: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class CriticLearnerSettings:
    """How a rollout batch becomes optimizer steps of the critic."""

    samples_per_mini_batch: int
    epochs: int
    micro_batch_tokens: int
    aggregation: str
    shuffle_seed: int | None
    schedule_counts_optimizer_steps: bool
    max_consecutive_skips: int


@dataclass
class CriticCounters(LearnerCounters):
    """Counters of the critic. `history`: explained variance and loss of the newest train steps, oldest first."""

    history: list[list[float]] = field(default_factory=list)

    def remember(self, explained_variance: float, loss: float, length: int) -> None:
        """Add a train step to the history, which keeps the newest `length`; one whose numbers are not finite says nothing."""
        if not (math.isfinite(explained_variance) and math.isfinite(loss)):
            return
        self.history = [*self.history, [explained_variance, loss]][-length:]


class CriticLearner:
    """Values and training of the critic. All its ranks call with the same samples; `rank` is the number among them."""

    def __init__(
        self,
        critic: Critic,
        layout: ParallelLayout,
        rank: int,
        value_loss: ValueLoss,
        settings: CriticLearnerSettings,
        schedule: LearningRateSchedule,
    ) -> None:
        self.counters = CriticCounters()
        self.critic = critic
        self.layout = layout
        self._rank = rank
        self._value_loss = value_loss
        self._settings = settings
        self._schedule = schedule

    def values(self, samples: Sequence[TrainSample]) -> list[torch.Tensor]:
        """[R] float32 for each of `samples`: the value of the state that each response token was drawn in."""
        micro_batches = self._micro_batches(samples, lambda part: [0.0] * len(part))
        outputs = self.critic.forward_values(micro_batches)
        return gather_response_tokens(outputs, micro_batches, samples, self.layout, self._rank)

    def learn(self, samples: Sequence[TrainSample], train_step: int) -> dict[str, float]:
        """`epochs` passes over `samples`, which have values and returns; metrics by the names of the schema. Without samples
        nothing is done.
        """
        if not samples:
            return _metrics({}, [], self._learning_rate(train_step), self.counters)
        totals: dict[str, float] = {}
        steps: list[StepResult] = []
        for epoch in range(self._settings.epochs):
            for part in self._split(samples, train_step, epoch):
                steps.append(self._step([samples[index] for index in part], train_step))
                for name, value in steps[-1].metrics.items():
                    totals[name] = totals.get(name, 0.0) + float(value)
        return _metrics(totals, steps, self._learning_rate(train_step), self.counters)

    def _split(self, samples: Sequence[TrainSample], train_step: int, epoch: int) -> list[list[int]]:
        seed = self._settings.shuffle_seed
        order = None if seed is None else (seed * 1_000_003 + train_step) * 101 + epoch
        size = self._settings.samples_per_mini_batch
        return split_mini_batches([sample.group_index for sample in samples], size, split="samples", seed=order)

    def _step(self, samples: list[TrainSample], train_step: int) -> StepResult:
        micro_batches = self._micro_batches(samples, self._weigh)

        def loss_fn(
            micro_batch: MicroBatch, values: torch.Tensor, index: int
        ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
            assert micro_batch.values is not None and micro_batch.returns is not None, (
                "the critic's samples have targets"
            )
            inputs = ValueLossInputs(values, micro_batch.values, micro_batch.returns, micro_batch.loss_mask)
            token_loss, metrics = self._value_loss(inputs)
            loss = (token_loss * micro_batch.loss_weights).sum()
            return loss, {**metrics, "loss_sum": loss.detach()}

        result = self.critic.train_step(micro_batches, loss_fn, self._learning_rate(train_step))
        self.counters.count(result, "critic", self._settings.max_consecutive_skips)
        return result

    def _weigh(self, samples: Sequence[TrainSample]) -> list[float]:
        trained = torch.tensor([int(sample.loss_mask.sum()) for sample in samples])
        groups = torch.tensor([sample.group_index for sample in samples])
        denominators = global_denominators(trained, groups)
        return sample_token_weights(self._settings.aggregation, trained, groups, denominators, 1).tolist()

    def _micro_batches(
        self, samples: Sequence[TrainSample], weigh: Callable[[Sequence[TrainSample]], list[float]]
    ) -> list[MicroBatch]:
        limits = MicroBatchLimits(max_tokens=self._settings.micro_batch_tokens)
        data_rank = self.layout.coordinates(self._rank).data
        return build_micro_batches(samples, weigh, self.layout, data_rank, limits)

    def _learning_rate(self, train_step: int) -> float:
        counted = self.counters.optimizer_steps if self._settings.schedule_counts_optimizer_steps else train_step
        return self._schedule.at(counted)


def _metrics(
    totals: Mapping[str, float], steps: Sequence[StepResult], learning_rate: float, counters: CriticCounters
) -> dict[str, float]:
    num_tokens = max(1.0, totals.get("num_value_tokens", 0.0))
    norms = [step.grad_norm for step in steps]
    return {
        "critic/loss": totals.get("value_loss_sum", 0.0) / num_tokens,
        "critic/clip_low_share": totals.get("value_clip_low_sum", 0.0) / num_tokens,
        "critic/clip_high_share": totals.get("value_clip_high_sum", 0.0) / num_tokens,
        "critic/trained_tokens": totals.get("num_value_tokens", 0.0),
        "critic/grad_norm": sum(norms) / max(1, len(norms)),
        "critic/learning_rate": learning_rate,
        "critic/optimizer_steps": counters.optimizer_steps,
        "critic/skipped_optimizer_steps": counters.skipped_steps,
    }
