"""Phases of the loop, and what rank 0 writes about a run: metrics, samples, batch dumps, the live display."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_dapo.algorithms.group_advantages import EstimatedBatch
from megatron_dapo.config.schema import Config
from megatron_dapo.evaluation.comparison import compare_with
from megatron_dapo.evaluation.reference import Record, read_record
from megatron_dapo.files.durable import HERE, Files
from megatron_dapo.plan.comparison import COMPARED_STEP, PLAN, PlannedRun, comparison_json, comparison_line
from megatron_dapo.report.background import REPORT, start_writing, write_last
from megatron_dapo.telemetry.alarms import mismatch_limit
from megatron_dapo.telemetry.batch_dump import dump_batch
from megatron_dapo.telemetry.completions import best_and_worst, completions_table, distinct_tasks
from megatron_dapo.telemetry.metrics import EVALUATION_METRICS, PHASES, STEP_METRICS, checked
from megatron_dapo.telemetry.phases import PhaseTimer
from megatron_dapo.telemetry.progress import ProgressView, StepReport, progress_view
from megatron_dapo.telemetry.provenance import PROVENANCE, installed_versions, write_provenance
from megatron_dapo.telemetry.samples import (
    TOKENS_PER_STEP,
    SampleWriter,
    TokenTexts,
    branch_texts,
    choose,
    sample_record,
    token_details,
)
from megatron_dapo.telemetry.terminal import logging_console
from megatron_dapo.telemetry.trackers import open_trackers
from megatron_dapo.telemetry.writers import JsonlWriter, MetricRecorder, MetricWriter, TensorBoardWriter
from megatron_dapo.trainer.batch_header import with_numbers
from megatron_dapo.types import Group

logger = logging.getLogger(__name__)

_TEXT_STEPS = 10  # steps between sample texts for metric trackers; samples.jsonl has every step's
_LAST_REPORT_S = 10.0  # shorter than the silence after which a rank counts as hung


class RunPaths:
    """Paths of a run's output."""

    def __init__(self, output_dir: Path) -> None:
        self.tensorboard = output_dir / "tensorboard"
        self.metrics = output_dir / "metrics.jsonl"
        self.evaluation_metrics = output_dir / "evaluations.jsonl"
        self.evaluations = output_dir / "evaluations"
        self.samples = output_dir / "samples.jsonl"
        self.filtered = output_dir / "filtered.jsonl"  # some responses of groups left out of a batch
        self.disagreements = output_dir / "disagreements.jsonl"
        self.dumps = output_dir / "batches"
        self.huggingface = output_dir / "huggingface"
        self.critic = output_dir / "critic"  # weights and optimizer state; usable as another run's `critic.path`
        self.summary = output_dir / "summary.json"
        self.report = output_dir / REPORT


class Phases:
    """Times the phases of one rank, shows them, and ends the process with stacks if one takes too long.

    `display`: set on the rank that shows progress. `watch`: watches a phase, given its name, without timing it; see
    `watch.heartbeat`.
    """

    def __init__(
        self,
        timer: PhaseTimer | None = None,
        watch: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.timer = timer or PhaseTimer(list(PHASES))
        self.display: ProgressView | None = None
        self.watch = watch

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time everything inside as phase `name`; a phase inside another one takes its time from the outer one."""
        # Show it first: if a phase hangs, the display must name it.
        self.show(name)
        with self.timer.phase(name), self.watch(name):
            yield

    def show(self, text: str, done: float = 0.0, total: float = 0.0) -> None:
        """Show the current phase's progress, on the rank with the display."""
        if self.display is not None:
            self.display.phase(text, done, total)


def mismatch_alarm(config: Config) -> float:
    """Return the mismatch above which this run warns, on this process's device."""
    return mismatch_limit(lambda key: attrgetter(key)(config), torch.cuda.is_available())


def _settings(config: Config) -> dict[str, float | str | bool]:
    """Return the values set by the recipe or an option, by dotted key."""
    found: dict[str, float | str | bool] = {}

    def walk(prefix: str, tree: Mapping[str, Any]) -> None:
        for name, value in tree.items():
            if isinstance(value, dict):
                walk(f"{prefix}{name}.", value)
            else:
                found[prefix + name] = value if isinstance(value, (bool, int, float, str)) else str(value)

    walk("", config.model_dump(mode="json", exclude_unset=True))
    return found


def _texts(records: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the first sample of each outcome as Markdown, by name."""
    texts: dict[str, str] = {}
    for record in records:
        prompt = "\n\n".join(str(message["content"]) for message in record["prompt"])
        parts = {"prompt": prompt, "response": record["response"]}
        # Indent by four spaces, so that any markup a model writes is shown verbatim.
        blocks = [
            f"**{name}**\n\n" + "\n".join(f"    {line}" for line in text.splitlines()) for name, text in parts.items()
        ]
        head = f"reward {record['reward']:.3g}, expected {record['answer']!r}, found {record['extracted']!r}"
        texts.setdefault(f"samples/{record['outcome']}", "\n\n".join([head, *blocks]))
    return texts


class Recorder:
    """Writes records by train step; a resumed run continues its files without repeating a step."""

    def __init__(
        self,
        config: Config,
        train_step: int,
        evaluated_step: int,
        files: Files = HERE,
        tokenizer: Any = None,
        machine: str = "",
        planned: PlannedRun | None = None,
        operations: str = "",
        turns: Mapping[str, Any] | None = None,
        is_alone: bool = True,
    ) -> None:
        """`train_step`: steps the run has already made; `evaluated_step`: the newest step evaluated, -1 if none.

        `tokenizer`: a transformers tokenizer, for samples token by token; None for only texts. `machine`: describes
        layout and devices. `planned`: the run as `plan` predicts it, compared with an early step; None if the plan does
        not know the devices. `operations`: their implementations as a table, and `turns`: the template's proof, both for
        provenance.json. `is_alone`: no other run shows its progress on the same terminal.
        """
        telemetry = config.telemetry
        # Rows after the checkpoint that the run resumes from are cut off, because they will be written again.
        first_step, first_evaluation = train_step + 1, evaluated_step + 1
        self.paths = RunPaths(config.run.output_dir)
        self._telemetry, self._files = telemetry, files
        self._token_texts = TokenTexts(tokenizer) if tokenizer is not None else None
        self._planned, self._compared_step = planned, train_step + COMPARED_STEP
        self._note_provenance(config, machine, operations, turns)
        settings = _settings(config)
        others: list[MetricWriter] = [
            *open_trackers(telemetry.trackers, config.run.output_dir, config.run.name, settings, files)
        ]
        if telemetry.tensorboard:
            others.append(TensorBoardWriter(self.paths.tensorboard, first_step, files, settings))
        self._steps = MetricRecorder([JsonlWriter(self.paths.metrics, first_step, files), *others])
        evaluations = JsonlWriter(self.paths.evaluation_metrics, first_evaluation, files)
        self._evaluations = MetricRecorder([evaluations, *others])
        has_samples = bool(telemetry.samples_per_step)
        self._samples = SampleWriter(self.paths.samples, first_step, files) if has_samples else None
        self._filtered = SampleWriter(self.paths.filtered, first_step, files) if has_samples else None
        # Read references here, so that an unreadable one fails before the first step instead of warning after hours.
        self._references = [read_record(path) for path in telemetry.references]
        self.progress: ProgressView | None = None
        if telemetry.progress:
            steps = config.run.total_steps, mismatch_alarm(config), train_step
            self.progress = progress_view(*steps, is_alone=is_alone)

    def _note_provenance(
        self, config: Config, machine: str, operations: str, turns: Mapping[str, Any] | None
    ) -> None:
        """Write provenance.json. If the data cannot be read a second time, the run continues."""
        keys = ("train_paths", "eval_paths")
        data = {f"data.{key}": [str(path) for path in getattr(config.data, key)] for key in keys}
        try:
            facts = data, config.model.path, installed_versions(), machine, operations, turns
            self._files.run(write_provenance, self.paths.metrics.parent, *facts)
        except OSError as error:
            logger.warning("%s was not written: %r", PROVENANCE, error)

    def step(self, train_step: int, metrics: Mapping[str, float]) -> None:
        """Write a finished train step; `metrics` are exactly those of the schema."""
        values = checked(STEP_METRICS, metrics)
        self._steps.write(train_step, values)
        if self._planned is not None and train_step == self._compared_step:
            self._compare_plan(self._planned, train_step, values)
        if self.progress is not None:
            self.progress.step(
                StepReport(
                    finished=train_step,
                    accuracy=values["rollout/accuracy_generated"],
                    reward=values["reward/mean"],
                    tokens_per_s=values["throughput/generated_tokens_per_s"],
                    filtered_share=values["rollout/groups_filtered_share"],
                    mismatch=values["mismatch/abs_logprob_diff_mean"],
                )
            )

    def _compare_plan(self, planned: PlannedRun, train_step: int, metrics: Mapping[str, float]) -> None:
        """Log planned and measured seconds and memory of a step, and write them for the report."""
        comparison = planned.against(metrics, torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0)
        logger.info("train step %d: %s", train_step, comparison_line(comparison))
        try:
            self._files.replace(self.paths.metrics.parent / PLAN, comparison_json(train_step, comparison))
        except OSError as error:  # no comparison is worth a training run
            logger.warning("%s was not written: %r", PLAN, error)

    def evaluation(self, train_step: int, metrics: Mapping[str, float]) -> None:
        """Write an evaluation of the policy after `train_step`, and report how the run compares with its reference."""
        self._evaluations.write(train_step, checked(EVALUATION_METRICS, metrics))
        for reference in self._references:
            self._compare(reference)
        self._report()

    def _report(self) -> None:
        """Start writing a report as of now, during training: the start takes milliseconds, and nothing waits for it."""
        if self._telemetry.report:
            try:
                self._files.run(start_writing, self.paths.metrics.parent)
            except Exception as error:  # a report must not end a training run
                logger.warning("the report could not be started: %r", error)

    def last_report(self) -> None:
        """Write the report at the end of the run, waiting some seconds for it."""
        if self._telemetry.report:
            self.flush()
            try:
                problem = self._files.run(write_last, self.paths.metrics.parent, _LAST_REPORT_S)
            except Exception as error:  # the run is already complete
                problem = repr(error)
            if problem:
                logger.warning("%s: %s", self.paths.report, problem)

    def _compare(self, reference: Record) -> None:
        try:
            verdict = compare_with(self.paths.metrics.parent, reference).verdict()
        except (ValueError, OSError) as error:  # There is nothing to compare before the first train step.
            verdict = f"not compared: {error}"
        logger.info("%s: %s", reference.name, verdict)
        if self.progress is not None:
            self.progress.track(verdict)

    def batch(
        self,
        train_step: int,
        groups: Sequence[Group],
        batch: EstimatedBatch,
        of_teachers: Mapping[int, Mapping[str, np.ndarray]] | None = None,
    ) -> None:
        """Write some responses for people, and the whole batch if a dump is due. `of_teachers`: see `RolloutBatch`."""
        if self._samples is not None:
            records = self._records(train_step, groups, batch)
            self._samples.write(records)
            if train_step == 1 or train_step % _TEXT_STEPS == 0:
                self._steps.write_texts(train_step, _texts(records))
        if self._telemetry.show_completions and train_step % self._telemetry.show_completions == 0:
            self._show_group(train_step, groups)
        if self._telemetry.dump_batches and train_step % self._telemetry.dump_batches == 0:
            whole = with_numbers(batch.samples, groups, of_teachers or {})  # this rank only has the numbers of its share
            dump_batch(self.paths.dumps / f"step_{train_step:06d}", whole, {"train_step": train_step}, self._files)

    def _show_group(self, train_step: int, groups: Sequence[Group]) -> None:
        """Print best and worst response of the group whose rewards differ most."""
        group = max(groups, key=lambda each: np.ptp([sample.reward for sample in each.samples]))
        prompts = [str(each.prompt.messages[-1]["content"]) if each.prompt.messages else "" for each in groups]
        records = [sample_record(train_step, group, index, None) for index in range(len(group.samples))]
        task = distinct_tasks(prompts)[groups.index(group)]
        labels = "best", "worst"
        logging_console().print(completions_table(best_and_worst(records), labels, f"step {train_step}", task))

    def filtered(self, train_step: int, groups: Sequence[Group]) -> None:
        """Write responses of groups left out of `train_step`'s batch; they show why nothing is learned from them."""
        if self._filtered is not None:
            self._filtered.write(self._records(train_step, groups, None))

    def _records(self, train_step: int, groups: Sequence[Group], batch: EstimatedBatch | None) -> list[dict[str, Any]]:
        """Return records of some responses, the first ones token by token; without a batch they have no advantages."""
        shown = batch.shown_advantages if batch is not None else {}
        # Without a critic, an advantage is one number per response.
        by_token = {
            one.sample_id: one.advantages
            for one in (batch.policy_samples if batch is not None else ())
            if not one.advantages.is_meta
        }
        records, left = [], TOKENS_PER_STEP if self._token_texts is not None else 0
        for group, index in choose(groups, self._telemetry.samples_per_step):
            sample = groups[group].samples[index]
            tokens: dict[str, Any] = {}
            if self._token_texts is not None and sample.completion.num_tokens <= left:
                advantages = by_token.get(sample.sample_id)
                if advantages is not None and len(advantages) != sample.completion.num_tokens:
                    advantages = None
                tokens = token_details(
                    sample, self._token_texts, None if advantages is None else advantages.tolist()
                )
                tokens |= branch_texts(sample, self._token_texts)
                left -= sum(len(sample.completion.stream(one).token_ids) for one in range(1 + sample.completion.num_segments))
            records.append(sample_record(train_step, groups[group], index, shown.get(sample.sample_id), tokens))
        return records

    @property
    def num_lost(self) -> int:
        """Records that could not be written."""
        return (
            self._steps.num_failures
            + self._evaluations.num_failures
            + sum(writer.num_lost for writer in (self._samples, self._filtered) if writer)
        )

    def flush(self) -> None:
        """Wait until all samples so far are written; metrics are written at once."""
        for writer in filter(None, (self._samples, self._filtered)):
            writer.flush()

    def close(self) -> None:
        """Write everything queued and close the display."""
        self._steps.close()
        self._evaluations.close()
        for writer in filter(None, (self._samples, self._filtered)):
            writer.close()
        if self.progress is not None:
            self.progress.close()
