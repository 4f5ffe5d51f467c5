"""Training of the critic: values of a rollout batch, and optimizer steps towards their returns.

    samples -> packed for the critic's own layout -> forward -> values of every response token, on every rank
    finished samples with returns -> mini-batches -> forward, backward, guarded step

The critic has its own layout, mini-batches, micro-batches, schedule and number of passes. A step with a non-finite
gradient changes nothing and is counted; the policy still takes its step. Several such steps in a row end the run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from megatron_dapo.algorithms.value_loss import ValueLossInputs, value_loss
from megatron_dapo.config.schema import Config
from megatron_dapo.config.validator import critic_schedule_steps
from megatron_dapo.megatron.response_tokens import gather_response_tokens
from megatron_dapo.parallel.coordination import Progress
from megatron_dapo.trainer.updater import LearningRateSchedule, StepCounters, Updater, add_sums, cut, loss_weights
from megatron_dapo.types import MicroBatch, TrainSample

if TYPE_CHECKING:
    from megatron_dapo.megatron.critic import MegatronCritic
    from megatron_dapo.megatron.trained_model import StepResult


@dataclass
class CriticCounters(StepCounters):
    """Counters of the critic. `history`: explained variance and loss of the newest train steps, oldest first."""

    history: list[list[float]] = field(default_factory=list)

    def remember(self, explained_variance: float, loss: float, length: int) -> None:
        """Add a train step to the history, which keeps the newest `length` steps; non-finite numbers are left out."""
        # Checkpoints store the history as JSON, which has no NaN.
        if math.isfinite(explained_variance) and math.isfinite(loss):
            self.history = [*self.history, [explained_variance, loss]][-length:]


class CriticLearner:
    """Computes values and trains the critic. All its ranks call each method with the same samples."""

    def __init__(self, critic: MegatronCritic, config: Config, progress: Progress | None = None) -> None:
        self.counters = CriticCounters()
        self.critic = critic
        self._config = config
        section, training = config.critic, config.training
        self._updater = Updater(
            "critic",
            critic,
            self.counters,
            LearningRateSchedule(section.optimizer, critic_schedule_steps(config)),
            section.micro_batch_tokens or training.micro_batch_tokens,
            training.max_consecutive_skips,
            progress,
        )

    def share(self, samples: Sequence[TrainSample]) -> set[int]:
        """Return the indices of the samples that this rank may pack: all."""
        return set(range(len(samples)))

    def values(self, samples: Sequence[TrainSample]) -> list[torch.Tensor]:
        """Return [R + 1] float32 per sample: values of the states in which response tokens were drawn, then of the last."""
        micro_batches = self._updater.pack(samples).micro_batches
        outputs = self.critic.forward_values(micro_batches)
        return gather_response_tokens(outputs, micro_batches, samples, self.critic.layout, self.critic.rank, num_after=1)

    def learn(self, samples: Sequence[TrainSample], train_step: int) -> dict[str, float]:
        """Make critic.epochs passes over `samples`, which have values and returns; no step without samples.

        Returns metrics by the names of the schema. Raises TooManySkips.
        """
        totals: dict[str, float] = {}
        steps: list[StepResult] = []
        # Without a finished response there are no targets, and a step would only decay the weights.
        for epoch in range(self._config.critic.epochs if samples else 0):
            for part in self._cut(samples, train_step, epoch):
                mini_batch = self._updater.pack(part, loss_weights(part, self._config.critic.aggregation))
                steps.append(self._updater.step(mini_batch, self._loss, train_step))
                add_sums(totals, steps[-1].metrics)
        self.critic.finish_steps()
        return self._metrics(totals, steps, train_step)

    def _cut(self, samples: Sequence[TrainSample], train_step: int, epoch: int) -> list[list[TrainSample]]:
        config = self._config
        prompts = config.critic.mini_batch_prompts or config.training.mini_batch_prompts
        # The policy's ratios belong to fixed mini-batches, but the critic draws new ones in every epoch.
        seed = (config.run.seed * 1_000_003 + train_step) * 101 + epoch if config.training.shuffle else None
        return cut(samples, prompts * config.rollout.group_size, "samples", seed)

    def _loss(
        self, micro_batch: MicroBatch, values: torch.Tensor, index: int
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """Return the loss of one micro-batch and its metric sums; `values` [P] of the current critic."""
        assert micro_batch.values is not None and micro_batch.returns is not None, "the critic's samples have targets"
        inputs = ValueLossInputs(values, micro_batch.values, micro_batch.returns, micro_batch.loss_mask)
        token_loss, metrics = value_loss(self._config.critic, inputs)
        loss = (token_loss * micro_batch.loss_weights).sum()
        return loss, {**metrics, "loss_sum": loss.detach()}

    def _metrics(self, totals: Mapping[str, float], steps: Sequence[StepResult], train_step: int) -> dict[str, float]:
        num_tokens = max(1.0, totals.get("num_value_tokens", 0.0))
        norms = [step.grad_norm for step in steps]
        return {
            "critic/loss": totals.get("value_loss_sum", 0.0) / num_tokens,
            "critic/clip_low_share": totals.get("value_clip_low_sum", 0.0) / num_tokens,
            "critic/clip_high_share": totals.get("value_clip_high_sum", 0.0) / num_tokens,
            "critic/trained_tokens": totals.get("num_value_tokens", 0.0),
            "critic/grad_norm": sum(norms) / max(1, len(norms)),
            "critic/learning_rate": self._updater.last_learning_rate(train_step),
            "critic/optimizer_steps": self.counters.optimizer_steps,
            "critic/skipped_optimizer_steps": self.counters.skipped_steps,
        }
