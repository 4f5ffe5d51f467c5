"""The loop of a run, as every rank executes it.

      rank 0                                   all ranks
      ------                                   ---------
  +-> collector: prompts, refill, filter <---> engines generate in lockstep
  |   verifier pool scores, buffer carries
  |   advantages over whole groups ----------> the same train samples everywhere (broadcast)
  |                                            learner: mini-batches, exact denominators, old log-probs,
  |                                                     forward, backward, guarded AdamW steps
  |                                            publisher: shards -> engines, checksums, policy version + 1
  |   recorder: metrics, samples, display
  +-- checkpoint and evaluation where due      every rank, then the next step

Who waits for whom: the ranks for rank 0's scoring between two polls; all for all in every collective. Every wait is a phase with a
deadline that says its name. A signal is a wish: the step is finished, saved, and the run ends.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_dapo.parallel.collectives import max_over
from megatron_dapo.telemetry.trend import TrendAlarm, TrendSettings
from megatron_dapo.trainer.actor_learner import LearnerCounters, LearnResult
from megatron_dapo.trainer.checkpointing import Checkpoints, RunProgress
from megatron_dapo.trainer.driven_engine import Publisher
from megatron_dapo.trainer.evaluator import Evaluator
from megatron_dapo.trainer.parity_probe import Parity
from megatron_dapo.trainer.phases import Phases
from megatron_dapo.trainer.recorder import Recorder
from megatron_dapo.trainer.rollout_phase import CollectedBatch, RolloutPhase
from megatron_dapo.trainer.step_metrics import (
    advantage_metrics,
    critic_metrics,
    memory_metrics,
    prefix_metrics,
    reward_metrics,
    rollout_metrics,
    throughput_metrics,
    training_seconds,
    window_metrics,
)
from megatron_dapo.types import TrainSample

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoopSettings:
    """When a run does what."""

    total_steps: int
    max_generation_steps: int  # 0: no limit
    groups_per_step: int
    groups_per_round: int  # what one generation round starts
    evaluation_interval: int  # 0: not in between
    evaluate_at_start: bool
    evaluate_at_end: bool
    checkpoint_interval: int  # 0: only at the end and on a signal
    mismatch_gate: float
    mismatch_alarm: float
    mismatch_trend: TrendSettings


class Trainee(Protocol):
    """What learns from rollout batches: the policy alone, or policy and critic."""

    @property
    def counters(self) -> LearnerCounters: ...

    def learn(
        self, samples: Sequence[TrainSample], train_step: int, mismatch_gate: float | None = None
    ) -> LearnResult: ...


@dataclass
class Parts:
    """What the loop is made of. `recorder` and the shadow verifier's share exist on rank 0."""

    rollout: RolloutPhase
    learner: Trainee
    publisher: Publisher
    parity: Parity | None  # where servers can be asked
    evaluator: Evaluator | None
    checkpoints: Checkpoints
    recorder: Recorder | None
    disagreement_share: Callable[[], float]
    epoch: Callable[[], int]
    has_converged: Callable[[], bool] = lambda: False  # there is nothing more to learn; the same on every rank


class TrainingLoop:
    """Runs a training from where `progress` stands."""

    def __init__(
        self,
        parts: Parts,
        settings: LoopSettings,
        progress: RunProgress,
        phases: Phases,
        stop_requested: Callable[[], bool],
    ) -> None:
        self._parts = parts
        self._settings = settings
        self._progress = progress
        self._phases = phases
        self._stop_requested = stop_requested
        self._trend = TrendAlarm(settings.mismatch_trend)
        self.saved_step = -1  # train step of the newest checkpoint on disk

    def run(self) -> str:
        """Train until a limit, the data or a signal ends it; returns which. The last state is saved."""
        if self._progress.mismatch_trend:
            self._trend.load_state_dict(self._progress.mismatch_trend)
        self._publish()
        if self._settings.evaluate_at_start and self._progress.train_step == 0:
            self._evaluate()
        self._phases.timer.finish_step()
        while not (reason := self._reason_to_end()):
            with self._phases.phase("generate"):
                batch = self._parts.rollout.collect(self._settings.groups_per_step)
            self._progress.generation_step = batch.generation_step
            if batch.should_stop or not batch.samples:
                reason = "data exhausted"
                break
            result = self._learn(batch)
            self._progress.train_step += 1
            self._publish()
            self._finish_step(batch, result)
        self._save()
        if self._settings.evaluate_at_end and reason in ("finished", "converged", "data exhausted"):
            self._evaluate()
        return reason

    def _reason_to_end(self) -> str:
        settings = self._settings
        if self._progress.train_step >= settings.total_steps:
            return "finished"
        if self._parts.has_converged():
            return "converged"
        if settings.max_generation_steps and self._progress.generation_step >= settings.max_generation_steps:
            return "generation steps used up"
        # A signal need not reach every rank; what one was told, all do.
        stop = max_over({"stop": float(self._stop_requested())})["stop"]
        return "stopped by a signal" if stop else ""

    def _learn(self, batch: CollectedBatch) -> LearnResult:
        step = self._progress.train_step
        gate = self._settings.mismatch_gate if step == 0 else None
        result = self._parts.learner.learn(batch.samples, step, gate)
        gap = result.metrics["mismatch/abs_logprob_diff_mean"]
        if gap > self._settings.mismatch_alarm:
            logger.warning(
                "train step %d: trainer and engine differ by %.3g nats a token on average, above mismatch.alarm %.3g",
                step + 1,
                gap,
                self._settings.mismatch_alarm,
            )
        growth = self._trend.observe(gap)
        self._progress.mismatch_trend = self._trend.state_dict()
        if growth:
            logger.warning(
                "train step %d: the difference between trainer and engine has grown from %.3g to %.3g nats a token within "
                "%d steps (mismatch.trend_factor)",
                step + 1,
                growth.before,
                growth.now,
                growth.num_steps,
            )
        return result

    def _publish(self) -> None:
        step, parity = self._progress.train_step, self._parts.parity
        with self._phases.phase("weight_sync"):
            self._parts.publisher.publish(step)
            if parity is not None and parity.is_due(step):
                parity.check()

    def _finish_step(self, batch: CollectedBatch, result: LearnResult) -> None:
        """Everything after the new policy is served: samples, due checkpoint and evaluation, then the step's metrics."""
        step = self._progress.train_step
        self._progress.num_samples += len(batch.samples)
        with self._phases.phase("record"):
            if self._parts.recorder is not None and batch.rollout is not None:
                self._progress.num_generated_tokens += batch.rollout.statistics.num_tokens
                self._parts.recorder.batch(step, batch.rollout.groups, batch.samples, result.advantages)
        # A row covers the time since the row before it: an evaluation or a checkpoint after a step is in the next one.
        times = self._phases.timer.finish_step()
        self._progress.train_seconds += training_seconds(times)
        if self._parts.recorder is not None:
            self._parts.recorder.step(step, self._metrics(batch, result, times))
        # The evaluation comes first, so that a run which goes on from this checkpoint knows it.
        if self._is_due(self._settings.evaluation_interval) and step < self._settings.total_steps:
            self._evaluate()
        if self._is_due(self._settings.checkpoint_interval):
            self._save()

    def _is_due(self, interval: int) -> bool:
        return interval > 0 and self._progress.train_step % interval == 0

    def _metrics(self, batch: CollectedBatch, result: LearnResult, times: Mapping[str, float]) -> dict[str, float]:
        assert batch.rollout is not None, "rank 0 has the groups"
        counters = self._parts.learner.counters
        return {
            "progress/generation_steps": batch.generation_step,
            "progress/optimizer_steps": counters.optimizer_steps,
            "progress/skipped_optimizer_steps": counters.skipped_steps,
            "progress/policy_version": self._progress.train_step,
            "progress/epoch": self._parts.epoch(),
            **rollout_metrics(batch.rollout, self._progress.train_step - 1, self._settings.groups_per_round),
            **prefix_metrics(batch.prefix_reuse),
            **window_metrics(batch.rollout),
            **reward_metrics(batch.rollout.groups, self._parts.disagreement_share()),
            **advantage_metrics(batch.advantage_metrics),
            **critic_metrics(result.metrics),
            **result.metrics,
            **throughput_metrics(batch.rollout, times, batch.generation_seconds),
            **memory_metrics(),
            **{f"time/{name}": seconds for name, seconds in times.items()},
        }

    def _evaluate(self) -> None:
        if self._parts.evaluator is None:
            return
        start, step = time.perf_counter(), self._progress.train_step
        recorder = self._parts.recorder
        with self._phases.phase("evaluate"):
            metrics = self._parts.evaluator.evaluate(
                step, lambda seen: self._phases.show("evaluate", seen.num_finished, seen.num_total)
            )
        if metrics is not None and recorder is not None:
            self._progress.evaluations[str(step)] = metrics
            recorder.evaluation(step, metrics)
            logger.info(
                "evaluation after %d steps: avg@k %.3f [%.3f, %.3f] in %.1f s",
                step,
                metrics["eval/avg_at_k"],
                metrics["eval/avg_at_k_low"],
                metrics["eval/avg_at_k_high"],
                time.perf_counter() - start,
            )

    def _save(self) -> None:
        """A checkpoint of the current step, once."""
        if self.saved_step == self._progress.train_step:
            return
        with self._phases.phase("checkpoint"):
            if self._parts.recorder is not None:
                self._parts.recorder.flush()  # what the checkpoint counts as done is on record
            folder = self._parts.checkpoints.save()
        self.saved_step = self._progress.train_step
        logger.info("checkpoint of train step %d in %s", self.saved_step, folder)
