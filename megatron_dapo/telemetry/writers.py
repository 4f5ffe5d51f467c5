"""Where metrics go: metrics.jsonl and TensorBoard, both by train step, both continuing a resumed run without duplicate
steps."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

logger = logging.getLogger(__name__)


class MetricWriter(Protocol):
    """A place metrics are written to."""

    def write(self, train_step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def drop_steps_from(path: Path, first_step: int) -> None:
    """Remove from a JSONL file the records of `train_step` >= `first_step`, and an unfinished last line of a killed
    run."""
    if not path.is_file():
        return
    partial = path.with_suffix(".tmp")
    with open(path, encoding="utf-8", errors="replace") as old, open(partial, "w", encoding="utf-8") as new:
        new.writelines(line for line in old if _is_before(line, first_step))
        new.flush()
        os.fsync(new.fileno())
    os.replace(partial, path)


def _is_before(line: str, first_step: int) -> bool:
    try:
        return line.endswith("\n") and json.loads(line)["train_step"] < first_step
    except (ValueError, KeyError, TypeError):
        return False


class JsonlWriter:
    """One JSON object a line: {"train_step": ..., name: value, ...}. A value that is not finite is null.

    `first_step` is the step the run starts (or resumes) with: records from there on, left by a run that got further,
    go.
    """

    def __init__(self, path: Path, first_step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        drop_steps_from(path, first_step)
        self._stream = open(path, "a", encoding="utf-8")

    def write(self, train_step: int, values: Mapping[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._stream.write(json.dumps({"train_step": train_step, **finite}) + "\n")
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()


class TensorBoardWriter:
    """TensorBoard scalars over train steps. Readers drop what an earlier run wrote from `first_step` on."""

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir=str(folder), purge_step=first_step)

    def write(self, train_step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, train_step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class MetricRecorder:
    """Hands metrics to every writer. A writer that fails (a full disk) is counted and reported once; training goes
    on."""

    def __init__(self, writers: Sequence[MetricWriter]) -> None:
        self._writers = tuple(writers)
        self.num_failures = 0

    def write(self, train_step: int, values: Mapping[str, float]) -> None:
        for writer in self._writers:
            self._attempt(writer.write, train_step, values)

    def close(self) -> None:
        for writer in self._writers:
            self._attempt(writer.close)

    def _attempt(self, call: Any, *arguments: Any) -> None:
        try:
            call(*arguments)
        except Exception as error:  # no metric is worth a training run
            self.num_failures += 1
            if self.num_failures == 1:
                logger.warning("metrics could not be written (further failures are only counted): %r", error)
