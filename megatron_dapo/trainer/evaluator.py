"""Held-out evaluation inside a run: evaluates the served policy by the configured protocol.

    evaluate(t)          every rank waits; generation stands still meanwhile
    begin(t) .. finish   with evaluation.background: a thread of rank 0 evaluates while the run trains on, and `finish` waits for
                         what is left of it before the engines get other weights
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_dapo.data.dataset import PromptDataset
from megatron_dapo.data.model_inputs import ModelInputs
from megatron_dapo.engines.base import CollectiveEngine, RolloutEngine
from megatron_dapo.evaluation.protocol import EvaluationProtocol
from megatron_dapo.evaluation.runner import EvaluationProgress, Problem, evaluate
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
    from megatron_dapo.engines.shared import SharedEngine
    from megatron_dapo.rollout.async_collector import AsyncCollector


_LOOK_S = 1.0  # interval of the looks after the engines while an evaluation is waited for


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
        shared: SharedEngine | None = None,
        timeout_s: float = float("inf"),
    ) -> None:
        """`collector`: pauses during an evaluation, which needs the engine exclusively. `check_stop` raises Stopped.
        `servers`: the engine if it consists of servers; the protocol names their version. `shared`: the engine with a view
        for evaluations in the background. `timeout_s`: the longest wait for one of them without progress.
        """
        self._engine = engine
        self._task = task
        self._max_in_flight = max_in_flight
        self._phases = phases
        self._collector = collector
        self._check_stop = check_stop
        self._servers = servers
        self._shared = shared
        self._timeout_s = timeout_s
        self._background: Future[dict[str, float]] | None = None  # rank 0 only
        self._is_cancelled = threading.Event()

    def evaluate(self, train_step: int) -> dict[str, float] | None:
        """Return the "eval/" metrics of the policy after `train_step`, on rank 0; None on other ranks. Collective.

        Also None on rank 0 if the run was asked to stop; what was generated so far is thrown away.
        """

        def run() -> dict[str, float] | None:
            # Unfinished responses keep their tokens and continue after the evaluation.
            try:
                with self._collector.paused() if self._collector else nullcontext():
                    return self._run(train_step, self._engine, self._check_stop)
            except Stopped:
                return None

        return self._engine.run_on_rank0(run)

    # In the background

    def begin(self, train_step: int) -> None:
        """Begin to evaluate the policy after `train_step`, which the engines serve until `finish`."""
        if self._task is None:
            return
        assert self._shared is not None and self._background is None, "one evaluation at a time, with an engine to share"
        background: Future[dict[str, float]] = Future()
        self._is_cancelled.clear()

        def run(engine: RolloutEngine) -> None:
            try:
                background.set_result(self._run(train_step, engine, self._check_cancelled))
            except BaseException as error:  # `finish` raises it
                background.set_exception(error)

        self._background = background
        threading.Thread(target=run, args=(self._shared.evaluation,), name="evaluate", daemon=True).start()

    def finish(self, may_wait: Callable[[], bool] = lambda: True) -> dict[str, float] | None:
        """Wait for the evaluation in the background; return what `evaluate` does. Collective.

        It is cancelled once `may_wait` returns False. TimeoutError if no response finishes for `timeout_s`.
        """

        def run() -> dict[str, float] | None:
            background = self._background
            assert background is not None, "begin comes first"
            deadline = time.monotonic() + self._timeout_s
            while not wait([background], _LOOK_S).done:
                if not may_wait():
                    self.cancel()
                    return None
                if self._collector is not None and self._collector.recover_engines():
                    deadline = time.monotonic() + self._timeout_s
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no response finished for {self._timeout_s:.0f} s while an evaluation was waited for")
            self._background = None
            return background.result()

        return self._engine.run_on_rank0(run)

    def cancel(self) -> None:
        """End the evaluation in the background, if there is one; what it generated is thrown away."""
        background, self._background = self._background, None
        if background is not None:
            self._is_cancelled.set()
            wait([background], self._timeout_s)

    def _check_cancelled(self) -> None:
        if self._is_cancelled.is_set():
            raise Stopped("the evaluation was cancelled")

    def _run(self, train_step: int, engine: RolloutEngine, check_stop: Callable[[], None]) -> dict[str, float]:
        task = self._task
        assert task is not None, "rank 0 evaluates and has the task"
        start = time.perf_counter()
        protocol = replace(task.protocol, model=f"{task.protocol.model} after {train_step} train steps")
        if self._servers is not None:
            protocol = replace(protocol, engine_version=f"sglang {self._servers.server_version}")
        kept: list[tuple[Problem, Sequence[ScoredSample]]] = []
        result = evaluate(
            task.dataset.prompts,
            engine,
            task.scorer,
            task.inputs.decode,
            protocol,
            progress=self._show if engine is self._engine else lambda seen: None,
            max_in_flight=self._max_in_flight,
            check_stop=check_stop,
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

    def _show(self, seen: EvaluationProgress) -> None:
        self._phases.show("evaluate", seen.num_finished, seen.num_total)
