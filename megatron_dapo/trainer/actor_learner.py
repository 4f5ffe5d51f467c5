"""Training of the policy on a rollout batch.

    samples with advantages -> mini-batches -> old log-probs (same packing, same kernel)
                            -> importance weights, mismatch with the engine
                            -> for every mini-batch: forward, backward, guarded step

The old log-probs of the first mini-batch come from its own training forward: the weights and numbers are the same, and
one pass is saved. A loss whose ratio is to the rollout policy needs none, and all of these passes are saved.
With training.stream, mini-batches arrive while earlier ones are trained: their old log-probs are computed with the weights that
the step began with, which are kept in host memory.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_dapo.algorithms.distillation import with_teachers
from megatron_dapo.algorithms.objective import BehaviorTerms, PolicyObjective
from megatron_dapo.algorithms.off_policy import mismatch_metrics, mismatch_sums, normalize_by_batch_mean
from megatron_dapo.algorithms.segments import MetricSums
from megatron_dapo.algorithms.vapo import positive_token_weights, positive_tokens
from megatron_dapo.config.schema import Config
from megatron_dapo.config.validator import schedule_steps
from megatron_dapo.megatron.context import slice_for_context
from megatron_dapo.megatron.response_tokens import gather_response_tokens, is_reporting_rank
from megatron_dapo.parallel.collectives import max_over, sum_over
from megatron_dapo.parallel.coordination import Progress
from megatron_dapo.parallel.packing import to_device
from megatron_dapo.trainer.distillation import Lesson, Teachers, distillation_metrics
from megatron_dapo.trainer.offload import POLICY, REFERENCE, DeviceModels
from megatron_dapo.trainer.recorder import Phases
from megatron_dapo.trainer.updater import (
    LearningRateSchedule,
    MiniBatch,
    StepCounters,
    Updater,
    add_sums,
    cut,
    loss_weights,
    trained_tokens,
)
from megatron_dapo.types import MicroBatch, TrainSample

if TYPE_CHECKING:
    from megatron_dapo.megatron.actor import HeadInput, MegatronActor, PolicyBeforeAdapters, TokenOutputs
    from megatron_dapo.megatron.trained_model import StepResult

logger = logging.getLogger(__name__)


class MismatchError(RuntimeError):
    """Raised if the engine's log-probs do not match the trainer's weights."""

    is_final = True  # the configuration causes it


@dataclass(frozen=True)
class LearnResult:
    """Metrics of one rollout batch; the same on every rank."""

    metrics: dict[str, float]
    num_optimizer_steps: int = 0


@dataclass
class _PolicyMiniBatch(MiniBatch):
    """A mini-batch with behavior terms per micro-batch, on last pipeline stages only; empty until computed."""

    behavior: list[BehaviorTerms | None] = field(default_factory=list)
    # Sums over this rank's tokens; empty without a correction. Kept as tensors: reading one would wait for the device.
    correction_sums: dict[str, torch.Tensor] = field(default_factory=dict)
    samples: Mapping[str, TrainSample] = field(default_factory=dict)  # sample id -> sample
    lessons: list[list[Lesson]] = field(default_factory=list)  # teachers' per micro-batch; empty until computed


@dataclass
class _Trained:
    """What was trained of a rollout batch so far."""

    mini_batches: list[_PolicyMiniBatch] = field(default_factory=list)
    mismatch: list[MetricSums] = field(default_factory=list)
    steps: list[StepResult] = field(default_factory=list)
    totals: dict[str, float] = field(default_factory=dict)  # sums over the tokens of all steps


class PolicyLearner:
    """Trains the policy on rollout batches. All ranks of the policy call each method with the same samples."""

    def __init__(
        self,
        actor: MegatronActor,
        reference: MegatronActor | PolicyBeforeAdapters | None,
        objective: PolicyObjective,
        config: Config,
        phases: Phases,
        models: DeviceModels,
        progress: Progress | None = None,
        teachers: Teachers | None = None,
    ) -> None:
        """`reference`: the initial policy, if a KL term needs it. `teachers`: those that are models."""
        self.counters = StepCounters()
        self.actor = actor
        self.reference = reference
        self.teachers = teachers
        self._objective = objective
        self._config = config
        self._phases = phases
        self._models = models
        self._group = actor.part.group  # sums of metrics stay among the policy's ranks
        self._coordinates = actor.layout.coordinates(actor.rank)
        self._is_reporting = is_reporting_rank(actor.layout, actor.rank)
        training = config.training
        self.updater = Updater(
            "policy",
            actor,
            self.counters,
            LearningRateSchedule(config.optimizer, schedule_steps(config), config.policy_starts_at),
            training.micro_batch_tokens,
            training.max_consecutive_skips,
            progress,
        )

    def learn(self, samples: Sequence[TrainSample], train_step: int, mismatch_gate: float | None = None) -> LearnResult:
        """Train on a rollout batch for training.epochs passes. A mini-batch without a trained token makes no step.

        With `mismatch_gate`, nothing is trained unless the mean |old - rollout log-prob| is at most that many nats.
        Raises MismatchError, TooManySkips, and ValueError if a batch cannot be cut.
        """
        if self.teachers is not None:
            self.teachers.refresh(train_step)
        with self._phases.phase("advantages"):
            mini_batches = self.cut_batch(samples, train_step)
        trained = _Trained(mini_batches)
        # The first optimizer step still sees the old policy, so it needs no pass ahead unless all samples come first.
        first = 0 if self._normalizes or mismatch_gate is not None else 1
        self._look_ahead(mini_batches[first:], trained, mismatch_gate)
        self._make_steps(mini_batches, trained, train_step)
        return self._result(trained, train_step)

    def learn_parts(
        self, parts: Iterable[Sequence[TrainSample]], train_step: int, mismatch_gate: float | None = None
    ) -> LearnResult:
        """Train one mini-batch after another as `parts` yields their samples, in one pass.

        Equals `learn` on all samples, but `mismatch_gate` sees only the first part.
        """
        if self.teachers is not None:
            self.teachers.refresh(train_step)
        trained = _Trained()
        begin = self._copy_weights() if self._needs_old else {}
        for samples in parts:
            with self._phases.phase("advantages"):
                mini_batches = self.cut_batch(samples, train_step)
            trained.mini_batches += mini_batches
            if trained.steps:
                if self._needs_old:
                    with self._models.on_device(POLICY, REFERENCE), self.actor.with_weights(begin):
                        self._look_ahead(mini_batches, trained)
            elif self._normalizes or mismatch_gate is not None:
                self._look_ahead(mini_batches, trained, mismatch_gate)
            self._make_steps(mini_batches, trained, train_step)
        return self._result(trained, train_step)

    def _copy_weights(self) -> dict[str, torch.Tensor]:
        with self._models.on_device(POLICY):
            return self.actor.copy_weights()

    def _look_ahead(
        self, mini_batches: Sequence[_PolicyMiniBatch], trained: _Trained, mismatch_gate: float | None = None
    ) -> None:
        """Compute old log-probs before a step on the mini-batches is made, and check them against the gate."""
        if mini_batches and (self._needs_old or mismatch_gate is not None):
            with self._phases.phase("logprobs"), self._models.on_device(POLICY, REFERENCE):
                for mini_batch in mini_batches:
                    mini_batch.behavior = self._behavior_terms(mini_batch, trained.mismatch)
        # Check before any step: a wrong model must not be trained at all.
        if mismatch_gate is not None:
            _check_mismatch(self._mismatch(trained.mismatch), mismatch_gate)

    def _make_steps(self, mini_batches: Sequence[_PolicyMiniBatch], trained: _Trained, train_step: int) -> None:
        with self._phases.phase("train"), self._models.on_device(POLICY, REFERENCE, training=POLICY):
            # All epochs share the cut and the old log-probs, because the ratio is against the policy that generated.
            for _epoch in range(self._config.training.epochs):
                for mini_batch in mini_batches:
                    # Without old log-probs only the first step compares the engine with the weights that it sampled by.
                    compared = trained.mismatch if self._needs_old or not trained.steps else []
                    self._teach(mini_batch)
                    trained.steps.append(self._step(mini_batch, train_step, compared))
                    mini_batch.lessons = []
                    add_sums(trained.totals, trained.steps[-1].metrics)
            self.actor.finish_steps()

    def _teach(self, mini_batch: _PolicyMiniBatch) -> None:
        """Compute the lessons of one optimizer step: the hidden states of a whole rollout batch would not fit."""
        if self.teachers is None:
            return
        with self._phases.phase("logprobs"):
            mini_batch.lessons = self.teachers.teach(mini_batch.micro_batches, mini_batch.samples)
        with self._models.on_device(POLICY, REFERENCE, training=POLICY):
            pass  # the last teacher leaves the device

    def _result(self, trained: _Trained, train_step: int) -> LearnResult:
        metrics = self.metrics(trained.totals, trained.steps, trained.mini_batches, trained.mismatch, train_step)
        return LearnResult(metrics, len(trained.steps))

    def share(self, samples: Sequence[TrainSample], train_step: int, whole: bool = False) -> set[int]:
        """Return the indices of the samples that this rank packs in `learn`; with `whole`, also in a full-batch pass.

        They depend only on lengths and groups.
        """
        parts = [*self._parts(samples, train_step), *([samples] if whole else [])]
        packed = {name for part in parts if part for name in self.updater.packed_ids(part)}
        return {index for index, sample in enumerate(samples) if sample.sample_id in packed}

    def observe(
        self, samples: Sequence[TrainSample], train_step: int, mismatch_gate: float | None = None
    ) -> LearnResult:
        """Return what `learn` would report about a rollout batch before its first optimizer step, without any step."""
        with self._phases.phase("logprobs"), self._models.on_device(POLICY, REFERENCE):
            mismatch = self.compare(samples, self._config.rollout.temperature)
        if mismatch_gate is not None:
            _check_mismatch(mismatch, mismatch_gate)
        return LearnResult({**self.metrics({}, [], [], [], train_step), **mismatch})

    def response_logprobs(self, samples: Sequence[TrainSample]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the log-probs of the policy and of the reference, [R] float32 per sample, on every rank. Collective."""
        assert self.reference is not None, "KL in the reward needs a reference policy"
        mini_batch = self.updater.pack(samples)
        with self._phases.phase("logprobs"), self._models.on_device(POLICY, REFERENCE):
            # The policy comes first: ranks without it receive both in this order, see `RemotePolicy`.
            policy, reference = (
                gather_response_tokens(
                    self._logprobs(model, mini_batch), mini_batch.micro_batches, samples, self.actor.layout, self.actor.rank
                )
                for model in (self.actor, self.reference)
            )
        return policy, reference

    def compare(self, samples: Sequence[TrainSample], temperature: float) -> dict[str, float]:
        """Return the mismatch of the current weights with the log-probs in `samples`; the same on every rank."""
        mini_batch = self.updater.pack(samples)
        outputs = self.actor.forward_logprobs(mini_batch.micro_batches, temperature)
        sums = []
        for output, whole in zip(outputs, mini_batch.micro_batches, strict=True):
            if output is not None:
                local = self._local(whole, output.logprobs)
                sums.append(mismatch_sums(output.logprobs, local.rollout_logprobs, local.loss_mask))
        return self._mismatch(sums)

    @property
    def _needs_old(self) -> bool:
        return self._config.algorithm.loss.needs_old_logprobs and self._config.training.old_logprobs == "snapshot"

    @property
    def _normalizes(self) -> bool:
        off_policy = self._config.algorithm.off_policy
        return off_policy.correction != "none" and off_policy.batch_normalize

    def _parts(self, samples: Sequence[TrainSample], train_step: int) -> list[list[TrainSample]]:
        """Cut a rollout batch into the samples of its optimizer steps."""
        config, training = self._config, self._config.training
        # The order differs in every train step and is the same after a resume. 1,000,003 is prime: runs do not overlap.
        seed = config.run.seed * 1_000_003 + train_step if training.shuffle else None
        if config.algorithm.name == "tppo":
            # A step's windows come from many groups, with a few from each, so groups cannot stay whole.
            return cut(samples, training.mini_batch_prompts * config.rollout.group_size, "samples", seed)
        return cut(samples, training.mini_batch_prompts, "groups", seed)

    def cut_batch(self, samples: Sequence[TrainSample], train_step: int) -> list[_PolicyMiniBatch]:
        """Return the packed mini-batches of a rollout batch that have a trained token."""
        parts = self._parts(samples, train_step)
        kind, length = self._config.algorithm.loss.aggregation, self._config.aggregation_length
        num_tokens = int(trained_tokens(samples).sum())
        mini_batches = [self._pack(part, loss_weights(part, kind, length, num_tokens, len(parts))) for part in parts]
        trained = [mini_batch for mini_batch in mini_batches if mini_batch.num_tokens]
        if len(trained) < len(mini_batches):
            # Without a gradient, a step would still move the weights through momentum and decay.
            logger.warning(
                "train step %d: %d of %d mini-batches have no trained token and make no optimizer step",
                train_step + 1,
                len(mini_batches) - len(trained),
                len(mini_batches),
            )
        return trained

    def _pack(self, samples: list[TrainSample], weights: Sequence[float]) -> _PolicyMiniBatch:
        if self._config.distillation.teachers:
            samples = with_teachers(samples, self._config.distillation)
        packed = self.updater.pack(self._with_positive_weights(samples), weights)
        by_id = {sample.sample_id: sample for sample in samples}
        return _PolicyMiniBatch(packed.micro_batches, packed.num_tokens, samples=by_id)

    def _with_positive_weights(self, samples: list[TrainSample]) -> list[TrainSample]:
        """Spread the coefficient of the language-model loss over the tokens of one optimizer step's correct samples."""
        coefficient = self._config.algorithm.positive_example_coefficient
        if not coefficient:
            return samples
        trained = trained_tokens(samples)
        is_positive = torch.tensor(
            [one.critic_context is not None and one.critic_context.is_correct for one in samples]
        )
        num_positive = int(positive_tokens(trained, is_positive).sum())
        weights = positive_token_weights(trained, is_positive, num_positive, coefficient).tolist()
        return [replace(one, positive_weight=weight) for one, weight in zip(samples, weights, strict=True)]

    def _behavior_terms(self, mini_batch: _PolicyMiniBatch, mismatch: list[MetricSums]) -> list[BehaviorTerms | None]:
        """Compute this rank's old and reference log-probs and importance weights before any step on the batch."""
        old = self._logprobs(self.actor, mini_batch)
        reference = self._reference_logprobs(mini_batch)
        terms: list[BehaviorTerms | None] = []
        for index, logprobs in enumerate(old):
            if logprobs is None:  # off the last pipeline stage
                terms.append(None)
                continue
            micro_batch = self._local(mini_batch.micro_batches[index], logprobs)
            mismatch.append(_mismatch_sums(logprobs, micro_batch))
            terms.append(self._terms(mini_batch, micro_batch, logprobs, reference[index]))
        return self._normalized(terms, mini_batch.correction_sums) if self._normalizes else terms

    def _terms(
        self, mini_batch: _PolicyMiniBatch, micro_batch: MicroBatch, old: torch.Tensor, reference: torch.Tensor | None
    ) -> BehaviorTerms:
        """Return the terms of this rank's part of a micro-batch, and add up what the correction did to it."""
        weights, sums = self._objective.importance(micro_batch, old)
        add_sums(mini_batch.correction_sums, sums)
        return BehaviorTerms(old if self._needs_old else micro_batch.rollout_logprobs, weights, reference)

    def _normalized(self, terms: list[BehaviorTerms | None], sums: Mapping[str, torch.Tensor]) -> list[BehaviorTerms | None]:
        # Tensor-parallel ranks hold the same tokens, so only one of them adds its sums.
        own = {name: sums.get(name, 0.0) if self._is_reporting else 0.0 for name in ("is_weight_sum", "num_tokens")}
        total = sum_over(own, self._group)
        weight_sum, num_tokens = float(total["is_weight_sum"]), float(total["num_tokens"])
        return [
            term
            if term is None or term.importance_weights is None
            else replace(
                term, importance_weights=normalize_by_batch_mean(term.importance_weights, weight_sum, num_tokens)
            )
            for term in terms
        ]

    def _logprobs(self, model: MegatronActor | PolicyBeforeAdapters, mini_batch: MiniBatch) -> list[torch.Tensor | None]:
        outputs = model.forward_logprobs(mini_batch.micro_batches, self._config.rollout.temperature)
        return [None if output is None else output.logprobs for output in outputs]

    def _reference_logprobs(self, mini_batch: MiniBatch) -> list[torch.Tensor | None]:
        if self.reference is None:
            return [None] * len(mini_batch.micro_batches)
        return self._logprobs(self.reference, mini_batch)

    def _local(self, micro_batch: MicroBatch, output: torch.Tensor) -> MicroBatch:
        """Return this context rank's part of the micro-batch, on the device of its `output`."""
        without_records = replace(micro_batch, routing=None, is_routed=None, support=None)
        local = slice_for_context(without_records, self._coordinates.context, self.actor.layout.context)
        return to_device(local, output.device)

    def _step(self, mini_batch: _PolicyMiniBatch, train_step: int, mismatch: list[MetricSums]) -> StepResult:
        """Make one optimizer step. Without behavior terms it is the rollout's first: its own forward computes them."""
        first = not mini_batch.behavior
        if first:
            reference = self._reference_logprobs(mini_batch)
            mini_batch.behavior = [None] * len(mini_batch.micro_batches)
        # One optimizer step at a time, because the hidden states of a whole rollout batch would not fit.
        gkl, temperature = self._config.algorithm.gkl, self._config.rollout.temperature
        reference_heads: list[HeadInput | None] = []
        if gkl.coefficient and self.reference is not None:
            reference_heads = self.reference.forward_head_inputs(mini_batch.micro_batches, temperature)

        def loss_fn(
            micro_batch: MicroBatch, outputs: TokenOutputs, index: int
        ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
            if first:
                old = outputs.logprobs.detach()  # a ratio of exactly 1, with the gradient of the log-prob
                mismatch.append(_mismatch_sums(old, micro_batch))
                mini_batch.behavior[index] = self._terms(mini_batch, micro_batch, old, reference[index])
            behavior = mini_batch.behavior[index]
            assert behavior is not None, "ranks that compute a loss have log-probs"
            divergence = None
            if reference_heads:
                head, reference_head = outputs.head, reference_heads[index]
                assert head is not None and reference_head is not None, "the actor's settings keep the head's input"
                terms = head.divergence_from(reference_head, gkl.gamma, gkl.weigh_by)
                divergence = terms.weighted_mse, terms.cross_entropy
            if self.teachers is None:
                return self._objective(micro_batch, outputs.logprobs, outputs.entropy, behavior, divergence)
            assert outputs.head is not None, "the actor's settings keep the head's input"
            distilled, sums = self.teachers.loss(
                outputs.head, micro_batch, mini_batch.samples, mini_batch.lessons[index]
            )
            loss, metrics = self._objective(
                micro_batch, outputs.logprobs, outputs.entropy, behavior, divergence, distilled
            )
            return loss, {**metrics, **sums}

        return self.updater.step(mini_batch, loss_fn, train_step, temperature=temperature)

    def metrics(
        self,
        totals: Mapping[str, float],
        steps: Sequence[StepResult],
        mini_batches: Sequence[_PolicyMiniBatch],
        mismatch: Sequence[MetricSums],
        train_step: int,
    ) -> dict[str, float]:
        """Return the metrics of a rollout batch, given its optimizer steps and the sums over their tokens."""
        num_tokens = max(1.0, totals.get("num_tokens", 0.0))
        means = {name: totals.get(sums, 0.0) / num_tokens for name, sums in _TOKEN_MEANS.items()}
        norms = [step.grad_norm for step in steps]
        return {
            **means,
            **distillation_metrics(totals),
            "actor/kl_loss": totals.get(f"kl_{self._config.algorithm.kl_estimator}_sum", 0.0) / num_tokens,
            "actor/positive_nll": totals.get("positive_nll_sum", 0.0)
            / max(1.0, totals.get("num_positive_tokens", 0.0)),
            "actor/loss": totals.get("loss_sum", 0.0) / max(1, len(steps)),
            "actor/grad_norm": sum(norms) / max(1, len(norms)),
            "actor/grad_norm_max": max(norms, default=0.0),
            "actor/learning_rate": self.updater.last_learning_rate(train_step),
            "actor/trained_tokens": float(
                sum(mini_batch.num_tokens for mini_batch in mini_batches) * self._config.training.epochs
            ),
            **self._mismatch(mismatch),
            **self._correction_metrics(mini_batches),
            "mismatch/routing_agreement": self._routing_agreement(),
        }

    def _routing_agreement(self) -> float:
        """Return the share of replayed expert choices that the policy's routers would also make; 1 without a replay."""
        if not self.actor.replays_routing:
            return 1.0
        counts = sum_over(self.actor.take_replayed(), self._group)
        return float(counts["own"]) / float(counts["replayed"]) if counts["replayed"] else 1.0

    def _correction_metrics(self, mini_batches: Sequence[_PolicyMiniBatch]) -> dict[str, float]:
        """Return the off-policy correction's mean weight and its shares of bounded and masked tokens.

        Without a correction these are 1, 0 and 0.
        """
        sums: dict[str, Any] = dict.fromkeys(("num_tokens", *_CORRECTION_MEANS.values()), 0.0)
        for mini_batch in mini_batches if self._is_reporting else ():
            for name in sums:
                sums[name] += mini_batch.correction_sums.get(name, 0.0)
        if dist.is_initialized():
            sums = sum_over(sums, self._group)
        num_tokens = float(sums["num_tokens"])
        if not num_tokens:
            return {name: float(name == "mismatch/weight_mean") for name in _CORRECTION_MEANS}
        return {name: float(sums[total]) / num_tokens for name, total in _CORRECTION_MEANS.items()}

    def _mismatch(self, sums: Sequence[MetricSums]) -> dict[str, float]:
        """Add up all ranks' sums. Ranks whose tokens another rank reports add 0, so that no token counts twice."""
        total = mismatch_sums(torch.zeros(0), torch.zeros(0), torch.zeros(0))
        for part in sums if self._is_reporting else ():
            total = total.combine(part)
        if dist.is_initialized():
            total = MetricSums(sum_over(total.sums, self._group), max_over(total.maxima, self._group))
        return mismatch_metrics(total)


# Metric -> the sum whose mean over trained tokens it is.
_TOKEN_MEANS = {
    "actor/entropy": "entropy_sum",
    "actor/gkl_weighted_mse": "gkl_weighted_mse_sum",
    "actor/gkl_cross_entropy": "gkl_cross_entropy_sum",
    "actor/ratio_mean": "ratio_sum",
    "actor/approx_kl_k1": "approx_kl_k1_sum",
    "actor/approx_kl_k3": "approx_kl_k3_sum",
    "actor/clip_low_share": "clip_low_sum",
    "actor/clip_high_share": "clip_high_sum",
    "actor/dual_clip_share": "dual_clip_sum",
}
_CORRECTION_MEANS = {
    "mismatch/weight_mean": "is_weight_sum",
    "mismatch/bounded_share": "is_bounded_sum",
    "mismatch/masked_share": "is_masked_sum",
}


def _check_mismatch(metrics: Mapping[str, float], gate: float) -> None:
    gap = metrics["mismatch/abs_logprob_diff_mean"]
    if not gap <= gate:
        raise MismatchError(
            f"trainer and engine do not hold the same model: mean |log-prob difference| {gap:.3g} nats on the first batch, "
            f"mismatch.step0_max_mean_abs (sglang.fp8_step0_max_mean_abs of FP8 rollouts) allows {gate:.3g}. Check the model "
            "directory and the precision of both sides; raise the gate only if the gap is understood (e.g. bfloat16 engines)"
        )


def _mismatch_sums(old_logprobs: torch.Tensor, micro_batch: MicroBatch) -> MetricSums:
    """Compare the engine's log-probs with the trainer's [P_local], grouped by token age."""
    return mismatch_sums(old_logprobs, micro_batch.rollout_logprobs, micro_batch.loss_mask, micro_batch.staleness)
