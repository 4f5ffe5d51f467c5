"""What happens to a rollout batch in the trainer: optimizer steps on mini-batches, with exact global denominators.

    samples -> mini-batches -> loss weights from global counts -> packed micro-batches
            -> old log-probs (same packing, same kernel) -> importance weights, mismatch with the engine
            -> for every mini-batch: forward, backward, guarded step

Every rank holds all samples and computes the same plan, so nothing about the batch has to be agreed on. The old
log-probs of the first mini-batch are those of its training forward itself: same weights, same numbers, one pass less.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_dapo.algorithms.aggregation import global_denominators, rollout_token_weight, sample_token_weights
from megatron_dapo.algorithms.objective import BehaviorTerms, PolicyObjective
from megatron_dapo.algorithms.off_policy import MismatchSums, mismatch_metrics, mismatch_sums, normalize_by_batch_mean
from megatron_dapo.algorithms.vapo import positive_token_weights, positive_tokens
from megatron_dapo.megatron.context import slice_for_context
from megatron_dapo.parallel.collectives import max_over, sum_over
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.parallel.mini_batch import WeighSamples, build_micro_batches, split_mini_batches
from megatron_dapo.parallel.packing import MicroBatchLimits
from megatron_dapo.trainer.learning_rate import LearningRateSchedule
from megatron_dapo.trainer.response_tokens import gather_response_tokens, is_reporting_rank
from megatron_dapo.types import MicroBatch, TrainSample

logger = logging.getLogger(__name__)


class Outputs(Protocol):
    """Log-probs and entropies of the targets of one micro-batch, [P_local]."""

    logprobs: torch.Tensor
    entropy: torch.Tensor


class StepResult(Protocol):
    """What an optimizer step gives back; the same on every rank."""

    metrics: dict[str, float]
    grad_norm: float
    applied: bool


class Actor(Protocol):
    """What the learner needs of the policy that is trained. Every call is collective."""

    def forward_logprobs(self, micro_batches: Sequence[MicroBatch], temperature: float) -> list[Outputs | None]: ...

    def train_step(
        self,
        micro_batches: Sequence[MicroBatch],
        loss_fn: Callable[..., object],
        temperature: float,
        learning_rate: float,
    ) -> StepResult: ...


@dataclass(frozen=True)
class LearnerSettings:
    """How a rollout batch becomes optimizer steps."""

    groups_per_mini_batch: int
    epochs: int
    micro_batch_tokens: int
    aggregation: str
    aggregation_length: int  # constant of dr_grpo, in tokens
    temperature: float
    shuffle_seed: int | None  # None keeps the order of the rollout batch
    schedule_counts_optimizer_steps: bool
    max_consecutive_skips: int
    first_train_step: int = 0  # the schedule counts train steps from here
    samples_per_mini_batch: int = 0  # above 0 mini-batches are of so many samples, and groups may straddle them


@dataclass
class LearnerCounters:
    """Counters of one model's optimizer steps; part of every checkpoint."""

    optimizer_steps: int = 0
    skipped_steps: int = 0
    consecutive_skips: int = 0

    def count(self, result: StepResult, model: str, max_consecutive_skips: int) -> None:
        """Count one optimizer step of `model`. Raises TooManySkips at `max_consecutive_skips` skipped steps in a row."""
        if result.applied:
            self.optimizer_steps += 1
            self.consecutive_skips = 0
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


@dataclass
class _MiniBatch:
    """One optimizer step's work for this rank. Behavior terms are known per micro-batch on last pipeline stages only."""

    micro_batches: list[MicroBatch]
    num_tokens: int  # trained tokens of the whole mini-batch
    behavior: list[BehaviorTerms | None] = field(default_factory=list)
    correction_sums: dict[str, float] = field(default_factory=dict)  # of this rank's tokens, without a correction empty


@dataclass(frozen=True)
class LearnResult:
    """Metrics of one rollout batch; the same on every rank."""

    metrics: dict[str, float]
    num_optimizer_steps: int
    advantages: Mapping[str, float] = field(
        default_factory=dict
    )  # by sample, where a critic made them: mean over its tokens


class MismatchError(RuntimeError):
    """The engine's log-probs are not those of the trainer's weights."""


class TooManySkips(RuntimeError):
    """Several optimizer steps in a row had a loss or gradient that was not finite."""


class PolicyLearner:
    """Trains the actor on rollout batches. All ranks call `learn` with the same samples."""

    def __init__(
        self,
        actor: Actor,
        objective: PolicyObjective,
        layout: ParallelLayout,
        rank: int,
        settings: LearnerSettings,
        schedule: LearningRateSchedule,
        phase: Callable[[str], AbstractContextManager[object]],
        reference: Actor | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """`rank` and `group`: of the ranks that hold the policy (None: all there are)."""
        self.counters = LearnerCounters()
        self._actor = actor
        self._reference = reference
        self._group = group
        self._objective = objective
        self._layout = layout
        self._coordinates = layout.coordinates(rank)
        self._is_reporting_rank = is_reporting_rank(layout, rank)
        self._settings = settings
        self._schedule = schedule
        self._phase = phase

    def learn(self, samples: Sequence[TrainSample], train_step: int, mismatch_gate: float | None = None) -> LearnResult:
        """One pass over a rollout batch (`epochs` of them). A mini-batch without a trained token makes no step.

        With `mismatch_gate` nothing is trained unless the mean |old - rollout log-prob| is at most that many nats. Raises
        MismatchError, TooManySkips; ValueError where a batch cannot be cut.
        """
        with self._phase("advantages"):
            mini_batches = self._cut(samples, train_step)
        # The first optimizer step still sees the old policy, unless something is needed of all samples before it.
        ahead = mini_batches if self._normalizes or mismatch_gate is not None else mini_batches[1:]
        mismatch: list[MismatchSums] = []
        if ahead:
            with self._phase("logprobs"):
                for mini_batch in ahead:
                    mini_batch.behavior = self._old_policy(mini_batch, mismatch)
        if mismatch_gate is not None:
            self._check_mismatch(self._mismatch(mismatch), mismatch_gate)
        totals: dict[str, float] = {}
        steps: list[StepResult] = []
        with self._phase("train"):
            for _epoch in range(self._settings.epochs):
                for mini_batch in mini_batches:
                    steps.append(self._step(mini_batch, train_step, mismatch))
                    _add(totals, steps[-1].metrics)
        return LearnResult(self._metrics(totals, steps, mini_batches, mismatch, train_step), len(steps))

    @property
    def reference(self) -> Actor | None:
        """The policy that the KL is measured from, where there is one."""
        return self._reference

    def has_converged(self) -> bool:
        """A policy is trained for as long as the run lasts."""
        return False

    def observe(
        self, samples: Sequence[TrainSample], train_step: int, mismatch_gate: float | None = None
    ) -> LearnResult:
        """What `learn` would report of a rollout batch before its first optimizer step, of which there is none."""
        with self._phase("logprobs"):
            mismatch = self.compare(samples, self._settings.temperature)
        if mismatch_gate is not None:
            self._check_mismatch(mismatch, mismatch_gate)
        return LearnResult({**self._metrics({}, [], [], [], train_step), **mismatch}, 0)

    def response_logprobs(self, samples: Sequence[TrainSample]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """[R] float32 for each of `samples`, of the policy and of the reference, on every rank. Collective."""
        mini_batch = self._mini_batch(list(samples), lambda part: [0.0] * len(part))
        assert self._reference is not None, "KL in the reward needs a reference policy"
        rank = self._layout.rank_of(self._coordinates)
        gathered = []
        for model in (self._actor, self._reference):
            outputs = model.forward_logprobs(mini_batch.micro_batches, self._settings.temperature)
            logprobs = [None if output is None else output.logprobs for output in outputs]
            gathered.append(gather_response_tokens(logprobs, mini_batch.micro_batches, samples, self._layout, rank))
        policy, reference = gathered
        return policy, reference

    def compare(self, samples: Sequence[TrainSample], temperature: float) -> dict[str, float]:
        """The mismatch of the weights as they are with the log-probs in `samples`; the same on every rank."""
        mini_batch = self._mini_batch(list(samples), lambda part: [0.0] * len(part))
        outputs = self._actor.forward_logprobs(mini_batch.micro_batches, temperature)
        parts = []
        for output, whole in zip(outputs, mini_batch.micro_batches, strict=True):
            if output is not None:
                local = self._local(whole)
                parts.append(mismatch_sums(output.logprobs, local.rollout_logprobs, local.loss_mask))
        return self._mismatch(parts)

    @staticmethod
    def _check_mismatch(metrics: Mapping[str, float], gate: float) -> None:
        gap = metrics["mismatch/abs_logprob_diff_mean"]
        if not gap <= gate:
            raise MismatchError(
                f"trainer and engine do not hold the same model: mean |log-prob difference| {gap:.3g} nats on the first batch, "
                f"mismatch.step0_max_mean_abs (sglang.fp8_step0_max_mean_abs of FP8 rollouts) allows {gate:.3g}. Check the model "
                "folder and the precision of both sides; raise the gate only if the gap is understood (e.g. bfloat16 engines)"
            )

    @property
    def _normalizes(self) -> bool:
        off_policy = self._objective.algorithm.off_policy
        return off_policy.correction != "none" and off_policy.batch_normalize

    def _cut(self, samples: Sequence[TrainSample], train_step: int) -> list[_MiniBatch]:
        settings = self._settings
        seed = None if settings.shuffle_seed is None else settings.shuffle_seed * 1_000_003 + train_step
        split, size = "groups", settings.groups_per_mini_batch
        if settings.samples_per_mini_batch:
            split, size = "samples", settings.samples_per_mini_batch
        parts = split_mini_batches([sample.group_index for sample in samples], size, split=split, seed=seed)
        weigh = self._weigh
        if settings.aggregation == OVER_ROLLOUT:
            num_tokens = int(_trained_tokens(samples).sum())
            weigh = partial(_weigh_over_rollout, weight=rollout_token_weight(num_tokens, len(parts)))
        mini_batches = [self._mini_batch([samples[index] for index in part], weigh) for part in parts]
        trained = [mini_batch for mini_batch in mini_batches if mini_batch.num_tokens]
        if len(trained) < len(mini_batches):
            # A step without a gradient would move the weights all the same, by momentum and decay.
            logger.warning(
                "train step %d: %d of %d mini-batches have no trained token and make no optimizer step",
                train_step + 1,
                len(mini_batches) - len(trained),
                len(mini_batches),
            )
        return trained

    def _mini_batch(self, samples: list[TrainSample], weigh: WeighSamples) -> _MiniBatch:
        limits = MicroBatchLimits(max_tokens=self._settings.micro_batch_tokens)
        samples = self._with_positive_weights(samples)
        micro_batches = build_micro_batches(samples, weigh, self._layout, self._coordinates.data, limits)
        return _MiniBatch(micro_batches, num_tokens=int(_trained_tokens(samples).sum()))

    def _with_positive_weights(self, samples: list[TrainSample]) -> list[TrainSample]:
        """The samples of one optimizer step; correct ones share the coefficient of the language-model loss by tokens."""
        coefficient = self._objective.algorithm.positive_example_coefficient
        if not coefficient:
            return samples
        trained = _trained_tokens(samples)
        is_positive = torch.tensor(
            [one.critic_context is not None and one.critic_context.is_correct for one in samples]
        )
        num_positive = int(positive_tokens(trained, is_positive).sum())
        weights = positive_token_weights(trained, is_positive, num_positive, coefficient).tolist()
        return [replace(one, positive_weight=weight) for one, weight in zip(samples, weights, strict=True)]

    def _weigh(self, samples: Sequence[TrainSample]) -> list[float]:
        trained = _trained_tokens(samples)
        groups = torch.tensor([sample.group_index for sample in samples])
        settings = self._settings
        denominators = global_denominators(trained, groups)
        return sample_token_weights(
            settings.aggregation, trained, groups, denominators, settings.aggregation_length
        ).tolist()

    def _old_policy(self, mini_batch: _MiniBatch, mismatch: list[MismatchSums]) -> list[BehaviorTerms | None]:
        """Old and reference log-probs and importance weights of this rank's part, before any step of this rollout batch."""
        old = self._actor.forward_logprobs(mini_batch.micro_batches, self._settings.temperature)
        reference = self._reference_logprobs(mini_batch)
        terms: list[BehaviorTerms | None] = []
        for index, outputs in enumerate(old):
            if outputs is None:
                terms.append(None)
                continue
            micro_batch = self._local(mini_batch.micro_batches[index])
            mismatch.append(_gap(outputs.logprobs, micro_batch))
            weights, sums = self._objective.importance(micro_batch, outputs.logprobs)
            _add(mini_batch.correction_sums, sums)
            terms.append(BehaviorTerms(outputs.logprobs, weights, reference[index]))
        return self._normalized(terms, mini_batch.correction_sums) if self._normalizes else terms

    def _normalized(self, terms: list[BehaviorTerms | None], sums: Mapping[str, float]) -> list[BehaviorTerms | None]:
        mine = {
            name: sums.get(name, 0.0) if self._is_reporting_rank else 0.0 for name in ("is_weight_sum", "num_tokens")
        }
        total = sum_over(mine, self._group)
        weight_sum, num_tokens = float(total["is_weight_sum"]), float(total["num_tokens"])
        return [
            term
            if term is None or term.importance_weights is None
            else replace(
                term, importance_weights=normalize_by_batch_mean(term.importance_weights, weight_sum, num_tokens)
            )
            for term in terms
        ]

    def _reference_logprobs(self, mini_batch: _MiniBatch) -> list[torch.Tensor | None]:
        if self._reference is None:
            return [None] * len(mini_batch.micro_batches)
        outputs = self._reference.forward_logprobs(mini_batch.micro_batches, self._settings.temperature)
        return [None if output is None else output.logprobs for output in outputs]

    def _local(self, micro_batch: MicroBatch) -> MicroBatch:
        return slice_for_context(micro_batch, self._coordinates.context, self._layout.context)

    def _step(self, mini_batch: _MiniBatch, train_step: int, mismatch: list[MismatchSums]) -> StepResult:
        """One optimizer step. Without behavior terms it is the first since the rollout: its own forward gives them."""
        first = not mini_batch.behavior
        if first:
            reference = self._reference_logprobs(mini_batch)
            mini_batch.behavior = [None] * len(mini_batch.micro_batches)

        def loss_fn(
            micro_batch: MicroBatch, outputs: Outputs, index: int
        ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
            if first:
                old = outputs.logprobs.detach()
                mismatch.append(_gap(old, micro_batch))
                weights, sums = self._objective.importance(micro_batch, old)
                _add(mini_batch.correction_sums, sums)
                mini_batch.behavior[index] = BehaviorTerms(old, weights, reference[index])
            behavior = mini_batch.behavior[index]
            assert behavior is not None, "a loss is computed where log-probs are"
            return self._objective(micro_batch, outputs.logprobs, outputs.entropy, behavior)

        rate = self._schedule.at(self._scheduled_step(self.counters.optimizer_steps, train_step))
        result = self._actor.train_step(mini_batch.micro_batches, loss_fn, self._settings.temperature, rate)
        self.counters.count(result, "policy", self._settings.max_consecutive_skips)
        return result

    def _scheduled_step(self, optimizer_step: int, train_step: int) -> int:
        """The step of the learning-rate schedule, in its unit."""
        settings = self._settings
        step = optimizer_step if settings.schedule_counts_optimizer_steps else train_step - settings.first_train_step
        return max(0, step)

    def _metrics(
        self,
        totals: Mapping[str, float],
        steps: Sequence[StepResult],
        mini_batches: Sequence[_MiniBatch],
        mismatch: Sequence[MismatchSums],
        train_step: int,
    ) -> dict[str, float]:
        num_tokens = max(1.0, totals.get("num_tokens", 0.0))
        means = {name: totals.get(sums, 0.0) / num_tokens for name, sums in _TOKEN_MEANS.items()}
        norms = [step.grad_norm for step in steps]
        scheduled = self._scheduled_step(self.counters.optimizer_steps - 1, train_step)
        return {
            **means,
            "actor/kl_loss": totals.get(f"kl_{self._objective.algorithm.kl_estimator}_sum", 0.0) / num_tokens,
            "actor/positive_nll": totals.get("positive_nll_sum", 0.0)
            / max(1.0, totals.get("num_positive_tokens", 0.0)),
            "actor/loss": totals.get("loss_sum", 0.0) / max(1, len(steps)),
            "actor/grad_norm": sum(norms) / max(1, len(norms)),
            "actor/grad_norm_max": max(norms, default=0.0),
            "actor/learning_rate": self._schedule.at(scheduled),
            "actor/trained_tokens": float(
                sum(mini_batch.num_tokens for mini_batch in mini_batches) * self._settings.epochs
            ),
            **self._mismatch(mismatch),
            **self._correction_metrics(mini_batches),
        }

    def _correction_metrics(self, mini_batches: Sequence[_MiniBatch]) -> dict[str, float]:
        """Mean weight of the off-policy correction and the shares of tokens it bounded and masked; 1 and 0 without one."""
        names = ("num_tokens", "is_weight_sum", "is_bounded_sum", "is_masked_sum")
        sums = dict.fromkeys(names, 0.0)
        for mini_batch in mini_batches if self._is_reporting_rank else ():
            for name in names:
                sums[name] += mini_batch.correction_sums.get(name, 0.0)
        total = (
            {name: float(value) for name, value in sum_over(sums, self._group).items()}
            if dist.is_initialized()
            else sums
        )
        if not total["num_tokens"]:
            return {"mismatch/weight_mean": 1.0, "mismatch/bounded_share": 0.0, "mismatch/masked_share": 0.0}
        return {
            "mismatch/weight_mean": total["is_weight_sum"] / total["num_tokens"],
            "mismatch/bounded_share": total["is_bounded_sum"] / total["num_tokens"],
            "mismatch/masked_share": total["is_masked_sum"] / total["num_tokens"],
        }

    def _mismatch(self, parts: Sequence[MismatchSums]) -> dict[str, float]:
        """Over all ranks; ranks that do not speak for tokens add nothing."""
        empty = mismatch_sums(torch.zeros(0), torch.zeros(0), torch.zeros(0))
        total = empty
        for part in parts if self._is_reporting_rank else ():
            total = total.combine(part)
        if dist.is_initialized():
            total = MismatchSums(sum_over(total.sums, self._group), max_over(total.maxima, self._group))
        return mismatch_metrics(total)


# Metric -> the sum over trained tokens it is the mean of.
_TOKEN_MEANS = {
    "actor/entropy": "entropy_sum",
    "actor/ratio_mean": "ratio_sum",
    "actor/approx_kl_k1": "approx_kl_k1_sum",
    "actor/approx_kl_k3": "approx_kl_k3_sum",
    "actor/clip_low_share": "clip_low_sum",
    "actor/clip_high_share": "clip_high_sum",
    "actor/dual_clip_share": "dual_clip_sum",
}


# An aggregation that reaches over the mini-batches of a rollout: see `rollout_token_weight`.
OVER_ROLLOUT = "rollout_token_mean"


def _weigh_over_rollout(samples: Sequence[TrainSample], weight: float) -> list[float]:
    return [weight] * len(samples)


def _trained_tokens(samples: Sequence[TrainSample]) -> torch.Tensor:
    """[S] int64."""
    return torch.tensor([int(sample.loss_mask.sum()) for sample in samples], dtype=torch.int64)


def _gap(old_logprobs: torch.Tensor, micro_batch: MicroBatch) -> MismatchSums:
    """Between the engine's log-probs and the trainer's [P_local], by the age of the tokens."""
    return mismatch_sums(old_logprobs, micro_batch.rollout_logprobs, micro_batch.loss_mask, micro_batch.staleness)


def _add(totals: dict[str, float], values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        totals[name] = totals.get(name, 0.0) + float(value)
