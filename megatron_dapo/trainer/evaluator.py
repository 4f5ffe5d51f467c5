"""Held-out evaluation inside a run: evaluates the served policy by the configured protocol."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_dapo.data.dataset import PromptDataset
from megatron_dapo.data.model_inputs import ModelInputs
from megatron_dapo.engines.base import CollectiveEngine
from megatron_dapo.evaluation.protocol import EvaluationProtocol
from megatron_dapo.evaluation.runner import Problem, evaluate
from megatron_dapo.files.durable import Files
from megatron_dapo.rewards.pool.pool import Scorer
from megatron_dapo.telemetry.completions import NUM_SHOWN, responses_file
from megatron_dapo.telemetry.samples import json_lines, sample_record
from megatron_dapo.trainer.metrics import evaluation_metrics
from megatron_dapo.trainer.recorder import Phases
from megatron_dapo.types import Group, ScoredSample
from megatron_dapo.watch.signals import Stopped

if TYPE_CHECKING:
    from megatron_dapo.engines.sglang.cluster import SglangEngines
    from megatron_dapo.rollout.async_collector import AsyncCollector


@dataclass(frozen=True)
class EvaluationTask:
    """Problems, protocol and scorer of a run's evaluations."""

    dataset: PromptDataset
    protocol: EvaluationProtocol
    scorer: Scorer
    inputs: ModelInputs
    output_dir: Path  # one file of results per evaluation
    files: Files
    num_trained: int = 0  # problems that are also trained on


class Evaluator:
    """Evaluates on rank 0 while the engines of all ranks generate. `task` and `collector` exist on rank 0."""

    def __init__(
        self,
        engine: CollectiveEngine,
        task: EvaluationTask | None,
        max_in_flight: int,
        phases: Phases,
        collector: AsyncCollector | None = None,
        check_stop: Callable[[], None] = lambda: None,
        servers: SglangEngines | None = None,
    ) -> None:
        """`collector`: pauses during an evaluation, which needs the engine exclusively. `check_stop` raises Stopped.
        `servers`: the engine if it consists of servers; the protocol names their version.
        """
        self._engine = engine
        self._task = task
        self._max_in_flight = max_in_flight
        self._phases = phases
        self._collector = collector
        self._check_stop = check_stop
        self._servers = servers

    def evaluate(self, train_step: int) -> dict[str, float] | None:
        """Return the "eval/" metrics of the policy after `train_step`, on rank 0; None on other ranks. Collective.

        Also None on rank 0 if the run was asked to stop; what was generated so far is thrown away.
        """

        def run() -> dict[str, float] | None:
            # Unfinished responses keep their tokens and continue after the evaluation.
            try:
                with self._collector.paused() if self._collector else nullcontext():
                    return self._run(train_step)
            except Stopped:
                return None

        return self._engine.run_on_rank0(run)

    def _run(self, train_step: int) -> dict[str, float]:
        task = self._task
        assert task is not None, "rank 0 evaluates and has the task"
        start = time.perf_counter()
        protocol = replace(task.protocol, model=f"{task.protocol.model} after {train_step} train steps")
        if self._servers is not None:
            protocol = replace(protocol, engine_version=f"sglang {self._servers.server_version}")
        kept: list[tuple[Problem, Sequence[ScoredSample]]] = []
        result = evaluate(
            task.dataset.prompts,
            self._engine,
            task.scorer,
            task.inputs.decode,
            protocol,
            progress=lambda seen: self._phases.show("evaluate", seen.num_finished, seen.num_total),
            max_in_flight=self._max_in_flight,
            check_stop=self._check_stop,
            keep=lambda problems, samples: kept.extend(zip(problems[:NUM_SHOWN], samples)),
        )
        task.files.make_directory(task.output_dir)
        records = [
            sample_record(train_step, Group(one.prompt.prompt_id, one.prompt, tuple(row), train_step, train_step), 0, None)
            for one, row in kept
        ]
        task.files.replace(responses_file(task.output_dir, train_step), json_lines(records))
        task.files.replace(task.output_dir / f"step_{train_step:06d}.json", result.to_json() + "\n")
        return evaluation_metrics(result, time.perf_counter() - start, task.num_trained)
