"""The training loop that every rank runs.

    run()
      _update_weights     policy version 0 into the engines, verified
      each train step:
        _generate         all ranks; rank 0: AsyncCollector.next_batch, the others serve in CollectiveEngine.run_on_rank0
                            waits for: verifiers to score enough groups        unblocked by: rank 0's broadcast of the batch
        _learn            Learner.learn; with training.stream, learn_parts, which calls _generate for each further part
          score             the critic's values, KL penalties
          estimate_advantages
          train_critic      waits for: all ranks of the critic, in collectives
          train_actor       waits for: all ranks of the policy, in collectives
          finish            waits for: the other model's ranks                 unblocked by: ConcurrentUpdate.exchange
        _update_weights   waits for: an evaluation in the background, AsyncCollector to pause, engines to empty
                            unblocks: the collector's thread, with the new policy version
        _record, then _evaluate and _start_save if due
      _save, _evaluate    at the end

A checkpoint is copied while the next batch is generated, and written while the run continues. _learn waits for the
copy. _reason_to_end, where all ranks meet at each step, does not wait: it reports that the checkpoint is in place or
why it failed.

`DeviceModels` moves models between device and host: offload_all before _generate and _evaluate, on_device(...) around
each use. Every wait belongs to a phase with a deadline, and a timeout error names the phase. On SIGTERM, _generate and
_evaluate end at once and training finishes its step. Then a checkpoint is written, if time allows, and the run ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_dapo.algorithms.group_advantages import EstimatedBatch
from megatron_dapo.checkpoints.save import IN_FLIGHT
from megatron_dapo.engines.sglang.servers import ServersFailed
from megatron_dapo.parallel.collectives import max_over
from megatron_dapo.rollout.batch import joined
from megatron_dapo.telemetry.trend import TrendAlarm
from megatron_dapo.trainer.actor_learner import LearnResult
from megatron_dapo.trainer.checkpointing import Checkpoints, RunProgress
from megatron_dapo.trainer.evaluator import Evaluator
from megatron_dapo.trainer.learner import Learner
from megatron_dapo.trainer.memory_check import MemoryCheck
from megatron_dapo.trainer.metrics import node_metrics, quality_warnings, step_metrics, training_seconds
from megatron_dapo.trainer.offload import POLICY
from megatron_dapo.trainer.parity import Parity
from megatron_dapo.trainer.recorder import Recorder, mismatch_alarm
from megatron_dapo.trainer.rollout import CollectionEnded, Rollout, nothing_trained
from megatron_dapo.types import TrainSample
from megatron_dapo.watch.attempts import STOPPED_BY_SIGNAL
from megatron_dapo.watch.verdict import STEP

if TYPE_CHECKING:
    from megatron_dapo.hooks import Callbacks
    from megatron_dapo.nodes.watch import NodeWatch
    from megatron_dapo.rollout.async_collector import AsyncCollector
    from megatron_dapo.rollout.batch import RolloutBatch
    from megatron_dapo.trainer.build_rollout import RolloutData
    from megatron_dapo.trainer.connect_engines import Publisher
    from megatron_dapo.trainer.context import RunContext

logger = logging.getLogger(__name__)

TIME_USED_UP = "training seconds used up"  # run.max_train_seconds
_MARGIN = 1.5  # time allowed for a checkpoint, as a multiple of the last one's


@dataclass
class Parts:
    """The parts of the loop. `recorder`, `collector` and `data` exist on rank 0 only."""

    rollout: Rollout
    learner: Learner
    publisher: Publisher
    parity: Parity | None  # only with servers, which can compute a prompt's log-probs
    evaluator: Evaluator | None
    checkpoints: Checkpoints
    recorder: Recorder | None
    collector: AsyncCollector | None
    data: RolloutData | None
    node_watch: NodeWatch | None = None  # rank 0 of several nodes
    callbacks: Callbacks | None = None  # rank 0 only
    memory_check: MemoryCheck | None = None


class TrainingLoop:
    """Runs the training from the point that `progress` records."""

    def __init__(self, context: RunContext, parts: Parts, progress: RunProgress) -> None:
        self._config, self._phases, self._stop = context.config, context.phases, context.stop
        self._files = context.files
        self._parts = parts
        self._progress = progress
        mismatch = context.config.mismatch
        self._mismatch_alarm, self._has_warned = mismatch_alarm(context.config), False
        self._trend = TrendAlarm(mismatch.trend_factor, mismatch.trend_floor)
        self.saved_step = -1  # train step of the newest checkpoint on disk
        self._save_seconds = 0.0  # duration of the newest save, from start to commit
        self._recorded_save = 0.0  # the same, for a save not yet in a row of metrics
        self._saving_step = -1  # train step of the newest save that has started
        self._evaluated_step = -1  # train step of this attempt's newest evaluation
        self._evaluating_step = -1  # train step of the evaluation in the background; -1: none
        self._served_step = -1  # train step of the policy that the engines hold
        self._step_parts: list[RolloutBatch] = []  # parts of the step that is being trained
        self._unrecorded: tuple[RolloutBatch, EstimatedBatch, LearnResult] | None = None  # a step not served yet

    def run(self) -> str:
        """Train until a limit, the data or a signal ends the run; return the reason. The last state is saved.

        The state is also saved before an error is raised because no batch can be collected, an evaluation fails, or the
        servers are lost for good.
        """
        *_, reason = self.turns()
        return reason

    def turns(self, is_settled: bool = False) -> Iterator[str]:
        """Do the work of `run`; yield "" after each train step, and last the reason. `is_settled`: with no save in flight."""
        self._begin()
        try:
            while not (reason := self._reason_to_end() or self._step()):
                if is_settled:
                    self._finish_save()
                with self._phases.timer.paused():
                    yield ""
        except ServersFailed:
            self._save_after_failure()
            raise
        yield self._end(reason)

    def _end(self, reason: str) -> str:
        """Save and evaluate at the end for `reason`; return it, or that a signal cut the evaluation short."""
        if reason == STOPPED_BY_SIGNAL:
            if self._parts.evaluator is not None:
                self._parts.evaluator.cancel()  # a run that resumes with this step repeats it
            self._save_in_time()
            return reason
        # Save first: the last evaluation takes long and can be repeated from the checkpoint.
        self._save()
        self._finish_evaluation()
        ends = ("finished", "converged", "data exhausted", TIME_USED_UP)
        # Only the last of total_steps is known in advance; any other last step may already have been evaluated.
        if self._config.evaluation.at_end and reason in ends and self._evaluated_step != self._progress.train_step:
            if not self._evaluate():
                return STOPPED_BY_SIGNAL
        return reason

    def _begin(self) -> None:
        """Serve the policy that the run starts from."""
        progress, evaluation = self._progress, self._config.evaluation
        if self._parts.callbacks is not None:
            self._call_back("on_run_start", self._config.model_dump(mode="json"))
        # In a new run the trend is empty, and the alarm starts without history.
        if progress.mismatch_trend:
            self._trend.load_state_dict(progress.mismatch_trend)
        # Engines start without weights, even after a resume, so serve the restored policy first.
        self._serve()
        # A resumed run repeats an evaluation that a signal cut short.
        is_due = evaluation.at_start if progress.train_step == 0 else self._evaluation_is_due()
        if is_due and str(progress.train_step) not in progress.evaluations:
            self._begin_evaluation()
        # The first row of metrics covers only the first train step, not the start-up.
        self._phases.timer.finish_step()

    def _step(self) -> str:
        """Make one train step; return the reason if the run ends without it."""
        batch, step = self._generate(), self._progress.train_step
        if batch is None:
            return STOPPED_BY_SIGNAL
        # An empty batch has no step: AdamW would move the weights without a gradient.
        if batch.should_stop or not batch.samples:
            return "data exhausted"
        self._learn(batch, step)
        self._serve()
        self._record()
        # The evaluation comes before the checkpoint, so that a run resumed from the checkpoint knows of it.
        if self._evaluation_is_due():
            self._begin_evaluation()
        if self._is_due(self._config.checkpoint.interval):
            self._start_save()
        return ""

    def _learn(self, batch: RolloutBatch, step: int) -> None:
        """Train one batch."""
        self._wait_for_copy()
        gate = self._config.mismatch_gate if step == 0 else None
        learner = self._parts.learner
        if batch.is_last:
            estimated, result = learner.learn(batch.samples, step, gate)
        else:
            self._step_parts = [batch]
            estimated, result = learner.learn_parts(self._streamed(), step, gate)
            batch, self._step_parts = joined(self._step_parts), []
        self._watch_mismatch(result)
        # The engines' next policy version is the number of completed train steps.
        self._progress.train_step += 1
        self._unrecorded = batch, estimated, result

    def _streamed(self) -> Iterator[Sequence[TrainSample]]:
        """Yield the samples of the step's parts; each is generated once the one before it is trained."""
        while True:
            yield self._step_parts[-1].samples
            if self._step_parts[-1].is_last:
                return
            part = self._generate()
            assert part is not None, "a signal does not end a step that has begun"
            self._step_parts.append(part)

    def _reason_to_end(self) -> str:
        run, progress = self._config.run, self._progress
        if progress.train_step >= run.total_steps:
            return "finished"
        if self._parts.learner.has_converged():
            return "converged"
        if run.max_generation_steps and progress.generation_step >= run.max_generation_steps:
            return "generation steps used up"
        with self._phases.watch(STEP):
            self._files.require_held()
            # All ranks must leave the loop at the same step, but a signal may reach only some, and their clocks differ.
            save = self._parts.checkpoints.saves.status
            seen = max_over({"stop": float(self._stop.requested), "seconds": progress.train_seconds, "save": save})
        if seen["save"] != IN_FLIGHT:
            self._finish_save()
        if seen["stop"]:
            return STOPPED_BY_SIGNAL
        return TIME_USED_UP if 0 < run.max_train_seconds <= seen["seconds"] else ""

    def _generate(self) -> RolloutBatch | None:
        """Return the next rollout batch, or its next part, the same samples on every rank. None after a signal.

        Raises a collection's error once the state is saved, and NothingTrained if the first batch is empty.
        """
        models = self._parts.learner.models
        with self._phases.phase("generate"):
            # Engines on the same GPUs have reclaimed their memory in the weight sync.
            models.offload_all()
            models.log_moved()
            step, learner = self._progress.train_step, self._parts.learner
            batch, error = None, None
            try:
                batch = self._parts.rollout.generate(
                    self._config.rollout.prompts_per_step,
                    lambda samples: learner.share(samples, step),
                    self._config.part_size,
                )
                self._progress.generation_step = batch.generation_step
            except CollectionEnded as end:
                self._progress.generation_step, error = end.generation_step, end.error
            if batch is not None and not batch.samples and step == 0 and not self._step_parts:
                self._record_filtered(batch)
                recorder = self._parts.recorder
                error = nothing_trained(batch, None if recorder is None else recorder.paths.filtered)
            if error is not None:
                self._save_after_failure()
                raise error  # Raised inside the phase, so that the failure record names it.
        return batch

    def _serve(self) -> None:
        """Serve the current weights to the engines that generate the next batch."""
        self._update_weights()

    def _update_weights(self) -> None:
        """Serve the current weights, verified, as the next policy version. Generation pauses meanwhile."""
        self._finish_evaluation()
        step, parts = self._progress.train_step, self._parts
        self._served_step = step
        with self._phases.phase("weight_sync"), parts.learner.models.on_device(POLICY):
            if parts.collector is not None:
                parts.collector.before_update()
            parts.publisher.publish(step)  # raises rather than serve weights that are not verified
            if parts.collector is not None:
                parts.collector.after_update(step)
            # Checked in this phase because the policy is on the device and the engines hold the same version.
            if parts.parity is not None and parts.parity.is_due(step):
                parts.parity.check_all()

    def _watch_mismatch(self, result: LearnResult) -> None:
        """Warn if the mismatch between trainer and engine is too large or keeps growing."""
        step = self._progress.train_step
        gap = result.metrics["mismatch/abs_logprob_diff_mean"]
        if gap > self._mismatch_alarm and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "train step %d: trainer and engine differ by %.3g nats a token on average, above %.3g (mismatch.alarm); "
                "further steps are only marked in the report",
                *(step + 1, gap, self._mismatch_alarm),
            )
        growth = self._trend.observe(gap)
        self._progress.mismatch_trend = self._trend.state_dict()
        if growth:
            logger.warning(
                "train step %d: the difference between trainer and engine has grown from %.3g to %.3g nats a token within "
                "%d steps (mismatch.trend_factor)",
                *(step + 1, growth.before, growth.now, growth.num_steps),
            )

    def _record(self) -> None:
        """Write the step's responses and metrics, on rank 0, once the new policy is served."""
        assert self._unrecorded is not None, "a step was trained"
        (batch, estimated, result), self._unrecorded = self._unrecorded, None
        step, recorder = self._progress.train_step, self._parts.recorder
        self._progress.num_samples += len(batch.samples)
        with self._phases.phase("record"):
            if recorder is not None and batch.groups:
                self._progress.num_generated_tokens += batch.statistics.num_tokens
                recorder.batch(step, batch.groups, estimated, batch.of_teachers)
                self._record_filtered(batch)
        # A row covers the time since the previous row: the next row has an evaluation or checkpoint after this step.
        times = self._phases.timer.finish_step()
        self._progress.train_seconds += training_seconds(times)
        if recorder is not None:
            metrics = self._metrics(batch, result, times)
            recorder.step(step, metrics)
            self._call_back("on_step_end", step, metrics)
        if self._parts.memory_check is not None:
            self._parts.memory_check.after_step(step)
        self._recorded_save = 0.0

    def _record_filtered(self, batch: RolloutBatch) -> None:
        """Write some responses of groups that the filter rejected, on rank 0."""
        if self._parts.recorder is not None:
            self._parts.recorder.filtered(max(1, self._progress.train_step), batch.filtered)

    def _is_due(self, interval: int) -> bool:
        return interval > 0 and self._progress.train_step % interval == 0

    def _evaluation_is_due(self) -> bool:
        """Return True if the current step is due for an evaluation and is not the last step."""
        is_last = self._progress.train_step >= self._config.run.total_steps
        return self._is_due(self._config.evaluation.interval) and not is_last

    def _metrics(self, batch: RolloutBatch, result: LearnResult, times: Mapping[str, float]) -> dict[str, float]:
        data, counters = self._parts.data, self._parts.learner.counters
        assert data is not None, "rank 0 has the data"
        progress = {
            "progress/generation_steps": batch.generation_step,
            "progress/optimizer_steps": counters.optimizer_steps,
            "progress/skipped_optimizer_steps": counters.skipped_steps,
            "progress/policy_version": self._progress.train_step,
            "progress/epoch": data.stream.epoch,
            "checkpoint/blocked_seconds": times["checkpoint"],
            "checkpoint/save_seconds": self._recorded_save,
            **{
                f"checkpoint/loaded_{name}_bytes": count for name, count in self._parts.checkpoints.loaded_bytes.items()
            },
        }
        watch = self._parts.node_watch
        return {
            **progress,
            **self._step_metrics(batch, result, times),
            **(node_metrics(watch.num_alerts, watch.stragglers) if watch is not None else {}),
        }

    def _step_metrics(self, batch: RolloutBatch, result: LearnResult, times: Mapping[str, float]) -> dict[str, float]:
        """Return the step's metrics of all parts but the loop; warn if responses degenerate. On rank 0."""
        assert self._parts.data is not None, "rank 0 has the data"
        step, disagreement = self._progress.train_step, self._parts.data.disagreement_share()
        busy = self._parts.rollout.busy_seconds()
        metrics = step_metrics(self._config, batch, step - 1, result.metrics, times, disagreement, busy)
        for warning in quality_warnings(metrics, self._config.quality, batch.groups):
            logger.warning("train step %d: %s", step, warning)
        return metrics

    def _evaluate(self) -> bool:
        """Evaluate the current policy; return False, on every rank, if a signal cut it short."""
        evaluator, step = self._parts.evaluator, self._progress.train_step
        if evaluator is None:
            return True
        if self._served_step != step:
            self._update_weights()
        with self._phases.phase("evaluate"):
            self._parts.learner.models.offload_all()  # the engines generate with the whole device
        return self._note_evaluation(step, lambda: evaluator.evaluate(step))

    def _begin_evaluation(self) -> None:
        """Evaluate the current policy, while the run trains on if evaluation.background is set."""
        if self._parts.evaluator is None or not self._config.evaluation.background:
            self._evaluate()
            return
        self._evaluating_step = self._progress.train_step
        self._parts.evaluator.begin(self._evaluating_step)

    def _finish_evaluation(self) -> None:
        """Wait for the evaluation in the background, if there is one."""
        step, evaluator, stop = self._evaluating_step, self._parts.evaluator, self._stop
        if step < 0 or evaluator is None:
            return
        self._evaluating_step, reserve = -1, _MARGIN * self._save_seconds

        def has_time() -> bool:
            return not stop.requested or reserve < stop.seconds_left < float("inf")

        if not self._note_evaluation(step, lambda: evaluator.finish(has_time)):
            logger.warning("no evaluation of train step %d: a signal left no time for the rest of it", step)

    def _note_evaluation(self, step: int, evaluate: Callable[[], dict[str, float] | None]) -> bool:
        """Record what `evaluate` returns on rank 0; return False, on every rank, if a signal cut it short.

        All ranks raise the same error, so the state is consistent and is saved first.
        """
        try:
            with self._phases.phase("evaluate"):
                metrics = evaluate()
        except (ServersFailed, TimeoutError):
            raise  # `run` saves after the first; after the second, ranks may be unreachable
        except Exception:
            self._save_after_failure()
            raise
        with self._phases.phase("evaluate"):
            is_cut = max_over({"is_cut": float(self._parts.recorder is not None and metrics is None)})["is_cut"]
        if metrics is not None and self._parts.recorder is not None:
            self._progress.evaluations[str(step)] = metrics
            self._parts.recorder.evaluation(step, metrics)
            self._call_back("on_evaluation", step, metrics)
            shown = [metrics[f"eval/{name}"] for name in ("avg_at_k", "avg_at_k_low", "avg_at_k_high", "seconds")]
            logger.info("evaluation after %d steps: avg@k %.3f [%.3f, %.3f] in %.1f s", step, *shown)
        if not is_cut:
            self._evaluated_step = step
        return not is_cut

    def _save_in_time(self) -> None:
        """Save within the time left after a signal. If that is too short, the last checkpoint remains the newest."""
        self._finish_save()
        step, left = self._progress.train_step, self._stop.seconds_left
        if self.saved_step == step:
            self._keep_collection()
        elif max_over({"is_late": float(left < _MARGIN * self._save_seconds)})["is_late"]:
            logger.warning(
                "no checkpoint of train step %d: %.0f s are left and the last one took %.0f s; that of step %d stands",
                *(step, left, self._save_seconds, self.saved_step),
            )
        else:
            self._save()

    def _save_after_failure(self) -> None:
        """Save the state after an error that left it consistent. If this fails too, log it and keep the first error."""
        if self._step_parts:
            logger.warning(
                "no checkpoint: train step %d was trained in part; a resumed run repeats what follows step %d",
                *(self._progress.train_step + 1, max(0, self.saved_step)),
            )
            return
        try:
            if self._unrecorded is not None:
                self._record()
            self._finish_save()
            if self.saved_step == self._progress.train_step:
                self._keep_collection()
            self._save()
        except Exception:
            logger.exception("the state could not be saved after a failure")

    def _keep_collection(self) -> None:
        """Write what has been collected since the current step's checkpoint."""
        with self._phases.phase("checkpoint"):
            if path := self._parts.checkpoints.keep_collection():
                logger.info("collection of train step %d in %s", self._progress.train_step, path)

    def _save(self) -> None:
        """Write a checkpoint of the current step, once, and wait until it is complete."""
        self._start_save()
        self._finish_save()

    def _start_save(self) -> None:
        """Start a checkpoint of the current step, once, after waiting for any earlier one still being written."""
        if self.saved_step == self._progress.train_step or self._saving_step == self._progress.train_step:
            return
        self._finish_save()
        with self._phases.phase("checkpoint"):
            self._files.require_held()
            if self._parts.recorder is not None:
                self._parts.recorder.flush()  # the checkpoint counts these samples as written
            self._parts.checkpoints.start_save()
        self._saving_step = self._progress.train_step
        if self._parts.learner.models.is_offloading:
            self._wait_for_copy()  # moving models between device and host changes what is saved

    def _wait_for_copy(self) -> None:
        """Wait until the state being saved may change."""
        if self._parts.checkpoints.saves.is_copying:
            with self._phases.phase("checkpoint"):
                self._parts.checkpoints.saves.wait_for_copy()

    def _finish_save(self) -> None:
        """Wait for the save in flight, if there is one. CheckpointError on all ranks if it failed on any."""
        if not self._parts.checkpoints.saves.is_in_flight:
            return
        with self._phases.phase("checkpoint"):
            saved = self._parts.checkpoints.finish_save()
        self.saved_step, self._save_seconds = saved.step, saved.seconds
        self._recorded_save = saved.seconds
        logger.info("checkpoint of train step %d in %s", saved.step, saved.directory)
        self._call_back("on_checkpoint", saved.step, saved.directory)

    def _call_back(self, event: str, *arguments: Any) -> None:
        """Call the user's callbacks, on rank 0."""
        if self._parts.callbacks is not None:
            with self._phases.phase("record"):
                self._parts.callbacks.call(event, *arguments)
