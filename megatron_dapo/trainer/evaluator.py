"""Held-out evaluation inside a run: the policy being served, by the protocol of the configuration."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_dapo.data.dataset import PromptDataset
from megatron_dapo.engines.base import CollectiveEngine
from megatron_dapo.evaluation.protocol import EvaluationProtocol, EvaluationResult
from megatron_dapo.evaluation.runner import EvaluationProgress, evaluate
from megatron_dapo.rewards.pool import Scorer
from megatron_dapo.trainer.inputs import ModelInputs
from megatron_dapo.trainer.step_metrics import evaluation_metrics


@dataclass(frozen=True)
class EvaluationTask:
    """What rank 0 needs to evaluate."""

    dataset: PromptDataset
    protocol: EvaluationProtocol
    scorer: Scorer
    inputs: ModelInputs
    folder: Path  # results are written here, one file an evaluation


class Evaluator:
    """Evaluates on rank 0 while the engines of all ranks generate. `task` exists on rank 0."""

    def __init__(
        self,
        engine: CollectiveEngine,
        task: EvaluationTask | None,
        max_in_flight: int,
        paused: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`paused`: what keeps everybody else from the engine meanwhile."""
        self._engine = engine
        self._task = task
        self._max_in_flight = max_in_flight
        self._paused = paused

    def evaluate(self, train_step: int, progress: Callable[[EvaluationProgress], None]) -> dict[str, float] | None:
        """The "eval/" metrics of the policy after `train_step`, on rank 0; None elsewhere."""

        def run() -> dict[str, float]:
            with self._paused():
                return self._run(train_step, progress)

        return self._engine.run_on_rank0(run)

    def _run(self, train_step: int, progress: Callable[[EvaluationProgress], None]) -> dict[str, float]:
        task = self._task
        assert task is not None, "rank 0 evaluates and has the task"
        start = time.perf_counter()
        result = evaluate(
            task.dataset.prompts,
            self._engine,
            task.scorer,
            task.inputs.decode,
            replace(task.protocol, model=f"{task.protocol.model} after {train_step} train steps"),
            progress=progress,
            max_in_flight=self._max_in_flight,
        )
        self._write(train_step, result)
        return evaluation_metrics(result, time.perf_counter() - start)

    def _write(self, train_step: int, result: EvaluationResult) -> None:
        assert self._task is not None
        self._task.folder.mkdir(parents=True, exist_ok=True)
        (self._task.folder / f"step_{train_step:06d}.json").write_text(result.to_json() + "\n", encoding="utf-8")
