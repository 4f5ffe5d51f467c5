"""Mini-batches and guarded optimizer steps, shared by policy and critic.

    samples --cut--> mini-batches --loss weights from global counts--> packed micro-batches --step--> AdamW

Every rank knows all samples and computes the same plan, so ranks need not agree on anything about a batch. The counts
in the loss weights are taken over the whole mini-batch before its forward pass, so no later split changes the loss.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from megatron_dapo.algorithms.aggregation import global_denominators, sample_token_weights
from megatron_dapo.algorithms.group_advantages import episode_positions, of_episodes
from megatron_dapo.config.model_schema import OptimizerConfig
from megatron_dapo.parallel.coordination import Progress
from megatron_dapo.parallel.mini_batch import build_micro_batches, split_mini_batches
from megatron_dapo.parallel.packing import MicroBatchLimits, plan_micro_batches
from megatron_dapo.types import MicroBatch, TrainSample

if TYPE_CHECKING:
    from megatron_dapo.megatron.actor import MegatronActor
    from megatron_dapo.megatron.critic import MegatronCritic
    from megatron_dapo.megatron.trained_model import StepResult

logger = logging.getLogger(__name__)


class TooManySkips(RuntimeError):
    """Raised when several optimizer steps in a row had a non-finite loss or gradient."""

    is_final = True  # the same checkpoint leads to the same steps


@dataclass
class StepCounters:
    """Counters of one model's optimizer steps; part of every checkpoint."""

    optimizer_steps: int = 0
    skipped_steps: int = 0
    consecutive_skips: int = 0

    def count(self, result: StepResult, model: str, max_consecutive_skips: int) -> None:
        """Count one optimizer step of `model`. Raises TooManySkips at `max_consecutive_skips` skipped steps in a row."""
        if result.applied:
            self.optimizer_steps += 1
            self.consecutive_skips = 0  # one good step shows that the weights are sound
            return
        self.skipped_steps += 1
        self.consecutive_skips += 1
        logger.warning(
            "%s: optimizer step skipped: gradient norm %s is not finite; no rank changed any weight",
            model,
            result.grad_norm,
        )
        if self.consecutive_skips >= max_consecutive_skips:
            raise TooManySkips(
                f"{model}: {self.consecutive_skips} optimizer steps in a row had a gradient that is not finite "
                f"(training.max_consecutive_skips is {max_consecutive_skips}); lower the learning rate or resume from an "
                "earlier checkpoint"
            )


@dataclass(frozen=True)
class LearningRateSchedule:
    """Linear warm-up to learning_rate, then the optimizer section's schedule down to the minimum at `total_steps`.

    Steps count from 0 in warmup_unit: optimizer steps, or train steps from `first_train_step` on. Steps of
    the rollout never move the rate.
    """

    optimizer: OptimizerConfig
    total_steps: int
    first_train_step: int = 0

    def step(self, optimizer_step: int, train_step: int) -> int:
        """Return the schedule's step."""
        counts_optimizer_steps = self.optimizer.warmup_unit == "optimizer_step"
        return max(0, optimizer_step if counts_optimizer_steps else train_step - self.first_train_step)

    def at(self, step: int) -> float:
        """Return the rate of a schedule step; the first warm-up step already has peak / warmup_steps."""
        peak, minimum, warmup = (
            self.optimizer.learning_rate,
            self.optimizer.min_learning_rate,
            self.optimizer.warmup_steps,
        )
        # step + 1: a rate of 0 would waste the first step.
        if step < warmup:
            return peak * (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, self.total_steps - warmup))
        decay = {
            "constant": 1.0,
            "linear": 1.0 - progress,
            "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
        }[self.optimizer.schedule]
        return minimum + (peak - minimum) * decay


@dataclass
class MiniBatch:
    """One optimizer step's work for this rank."""

    micro_batches: list[MicroBatch]
    num_tokens: int  # trained tokens of the whole mini-batch, over all ranks


class Updater:
    """Packs mini-batches for one model's layout and makes its optimizer steps. Collective over the model's ranks.

    Args:
        name: the model's name in log lines and errors.
        model: this rank's part of the policy or the critic.
        progress: marked at every optimizer step, so that a long train phase does not exceed its deadline.
    """

    def __init__(
        self,
        name: str,
        model: MegatronActor | MegatronCritic,
        counters: StepCounters,
        schedule: LearningRateSchedule,
        micro_batch_tokens: int,
        max_consecutive_skips: int,
        progress: Progress | None = None,
    ) -> None:
        self.counters = counters
        self.schedule = schedule
        self._name = name
        self._model = model
        self._limits = MicroBatchLimits(micro_batch_tokens, attention_parity=model.architecture.attention_parity)
        self._max_consecutive_skips = max_consecutive_skips
        self._progress = progress or Progress()

    def packed_ids(self, samples: Sequence[TrainSample]) -> list[str]:
        """Return the ids of the samples that this rank packs for one optimizer step."""
        model = self._model
        plan = plan_micro_batches([sample.num_tokens for sample in samples], model.layout, self._limits)
        own = plan[model.layout.coordinates(model.rank).data]
        return [samples[index].sample_id for part in own for index in part]

    def pack(self, samples: Sequence[TrainSample], loss_weights: Sequence[float] | None = None) -> MiniBatch:
        """Pack all samples of one optimizer step; `loss_weights` weigh each sample's tokens (None: no loss is computed)."""
        weights = [0.0] * len(samples) if loss_weights is None else loss_weights
        model = self._model
        data_rank = model.layout.coordinates(model.rank).data
        if not model.replays_routing:
            samples = [replace(sample, routing=None) for sample in samples]
        if not model.reads_supports:
            samples = [replace(sample, support=None) for sample in samples]
        # Every rank plans for all samples and packs its own, so shares need no communication.
        micro_batches = build_micro_batches(samples, weights, model.layout, data_rank, self._limits)
        return MiniBatch(micro_batches, int(trained_tokens(samples).sum()))

    def learning_rate(self, optimizer_step: int, train_step: int) -> float:
        """Return the learning rate of an optimizer step of a train step, both counted from 0."""
        return self.schedule.at(self.schedule.step(optimizer_step, train_step))

    def last_learning_rate(self, train_step: int) -> float:
        """Return the learning rate of the newest optimizer step, which was made in `train_step`."""
        return self.learning_rate(self.counters.optimizer_steps - 1, train_step)

    def step(
        self, mini_batch: MiniBatch, loss_fn: Callable[..., Any], train_step: int, **forward_options: Any
    ) -> StepResult:
        """Make one optimizer step. `forward_options` go to the model's train_step. Raises TooManySkips."""
        rate = self.learning_rate(self.counters.optimizer_steps, train_step)
        result: StepResult = self._model.train_step(
            mini_batch.micro_batches, loss_fn, learning_rate=rate, **forward_options
        )
        self._progress.mark()
        # Count after the step, which no rank applied if any rank had a non-finite gradient.
        self.counters.count(result, self._name, self._max_consecutive_skips)
        return result


def cut(samples: Sequence[TrainSample], size: int, split: str, seed: int | None) -> list[list[TrainSample]]:
    """Cut a rollout batch into mini-batches of at most `size` groups or samples; see `split_mini_batches`.

    An episode's sequences stay together: they are one sample.
    """
    groups = [sample.group_index for sample in samples] if split == "groups" else episode_positions(samples).tolist()
    parts = split_mini_batches(groups, size, seed=seed)
    return [[samples[index] for index in part] for part in parts]


def loss_weights(
    samples: Sequence[TrainSample],
    aggregation: str,
    aggregation_length: int = 1,
    rollout_tokens: int | None = None,
    num_mini_batches: int = 1,
) -> list[float]:
    """Return the weight of each sample's trained tokens in the loss of an optimizer step on `samples`.

    The sequences of an episode have one denominator: they weigh as if they were one response. `rollout_tokens` and `num_mini_batches`: see `global_denominators`.
    """
    episodes = episode_positions(samples)
    groups = of_episodes(torch.tensor([sample.group_index for sample in samples], dtype=torch.int64), episodes)
    trained = torch.zeros_like(groups).index_add_(0, episodes, trained_tokens(samples))
    # Taken over all ranks' samples, so that the gradient does not depend on the split into ranks and micro-batches.
    denominators = global_denominators(trained, groups, rollout_tokens, num_mini_batches)
    return sample_token_weights(aggregation, trained, groups, denominators, aggregation_length)[episodes].tolist()


def trained_tokens(samples: Sequence[TrainSample]) -> torch.Tensor:
    """Return the number of trained tokens of each sample, [S] int64."""
    return torch.tensor([int(sample.loss_mask.sum()) for sample in samples], dtype=torch.int64)


def add_sums(totals: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Add `values`, numbers or tensors, to the totals of the same names."""
    for name, value in values.items():
        totals[name] = totals.get(name, 0.0) + value
