"""Writers of metrics: metrics.jsonl and TensorBoard, by train step. A resumed run leaves no duplicate steps in either."""

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
    """A destination of metrics."""

    def write(self, train_step: int, values: Mapping[str, float]) -> None:
        """Write the metrics of one step."""

    def close(self) -> None:
        """Flush and close the destination."""


def drop_steps_from(path: Path, first_step: int) -> None:
    """Remove the records of `train_step` >= `first_step` from a JSONL file, and the unfinished last line of a killed run."""
    if not path.is_file():
        return
    partial = path.with_suffix(".tmp")
    with open(path, encoding="utf-8", errors="replace") as old, open(partial, "w", encoding="utf-8") as new:
        new.writelines(line for line in old if _is_before(line, first_step))
        new.flush()
        os.fsync(new.fileno())  # or a crash of the node could leave the new name with an empty file
    os.replace(partial, path)


def _is_before(line: str, first_step: int) -> bool:
    try:
        return line.endswith("\n") and json.loads(line)["train_step"] < first_step
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


class JsonlWriter:
    """Writes one JSON object per line: {"train_step": ..., name: value, ...}. A value that is not finite is null.

    `first_step` is the step that the run starts (or resumes) with: records from there on, left by a run that got
    further, are removed.
    """

    def __init__(self, path: Path, first_step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        drop_steps_from(path, first_step)
        self._stream = open(path, "a", encoding="utf-8")

    def write(self, train_step: int, values: Mapping[str, float]) -> None:
        """Append the line of one step."""
        # JSON has no NaN: null keeps the line readable for every parser.
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._stream.write(json.dumps({"train_step": train_step, **finite}) + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


class TensorBoardWriter:
    """Writes TensorBoard scalars. Readers drop the scalars of an earlier run from `first_step` on."""

    def __init__(self, directory: Path, first_step: int) -> None:
        # Imported here: runs without TensorBoard output need not have it.
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir=str(directory), purge_step=first_step)

    def write(self, train_step: int, values: Mapping[str, float]) -> None:
        """Add the scalars of one step."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, train_step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class MetricRecorder:
    """Passes metrics to every writer. A writer that fails (a full disk) is counted and logged once; training continues."""

    def __init__(self, writers: Sequence[MetricWriter]) -> None:
        self._writers = tuple(writers)
        self.num_failures = 0

    def write(self, train_step: int, values: Mapping[str, float]) -> None:
        """Write the metrics of one step with every writer."""
        for writer in self._writers:
            self._attempt(writer.write, train_step, values)

    def close(self) -> None:
        """Close every writer."""
        for writer in self._writers:
            self._attempt(writer.close)

    def _attempt(self, call: Any, *arguments: Any) -> None:
        try:
            call(*arguments)
        except Exception as error:  # no metric is worth a training run
            self.num_failures += 1
            if self.num_failures == 1:
                logger.warning("metrics could not be written (further failures are only counted): %r", error)
