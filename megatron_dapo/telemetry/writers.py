"""Writers of metrics: metrics.jsonl and TensorBoard, by train step. A resumed run leaves no duplicate steps in either."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from megatron_dapo.files.durable import Files

logger = logging.getLogger(__name__)


class MetricWriter(Protocol):
    def write(self, train_step: int, values: Mapping[str, float]) -> None:
        """Write the metrics of one step."""

    def close(self) -> None:
        """Flush and close the destination."""


def drop_steps_from(path: Path, first_step: int) -> None:
    """Remove the records of `train_step` >= `first_step` from a JSONL file, and the unfinished last line of a killed run.

    Creates the file's directory if it does not exist.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file():
        return
    partial = path.with_suffix(".tmp")
    with open(path, encoding="utf-8", errors="replace") as old, open(partial, "w", encoding="utf-8") as new:
        new.writelines(line for line in old if _is_before(line, first_step))
        new.flush()
        os.fsync(new.fileno())  # A crash of the node must not leave an empty file under the new name.
    os.replace(partial, path)


def _is_before(line: str, first_step: int) -> bool:
    try:
        return line.endswith("\n") and json.loads(line)["train_step"] < first_step
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


class JsonlWriter:
    """Writes one JSON object per line: {"train_step": ..., name: value, ...}. A value that is not finite is null.

    `first_step` is the step that the run starts (or resumes) with: later records, from a run that got
    further, are removed.
    """

    def __init__(self, path: Path, first_step: int, files: Files) -> None:
        self._path, self._files = path, files
        files.run(drop_steps_from, path, first_step)

    def write(self, train_step: int, values: Mapping[str, float]) -> None:
        # JSON has no NaN: null keeps the line readable for every parser.
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._files.append(self._path, json.dumps({"train_step": train_step, **finite}) + "\n")

    def close(self) -> None:
        """Do nothing: each line is in the file already."""


class TensorBoardWriter:
    """Writes TensorBoard scalars, hyper-parameters and texts. Readers drop those of an earlier run from `first_step` on.

    A scalar that never changes has no series: half the schema is 0 in a run without a critic or windows. One that changes
    late is written from its first step on.
    """

    def __init__(
        self, directory: Path, first_step: int, files: Files, hyper_parameters: Mapping[str, Any] | None = None
    ) -> None:
        """`hyper_parameters`: numbers, texts and booleans by name, for the HPARAMS tab."""
        # Imported here, as runs without TensorBoard output do not need it.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        self._files = files
        files.make_directory(directory)
        # TensorBoard recognizes event files by "tfevents" in the name and reads them in name order.
        now = time.time_ns()
        self._path = directory / f"events.out.tfevents.{now // 10**9:010d}.{now % 10**9:09d}.{socket.gethostname()}"
        self._constant: dict[str, list[tuple[int, float, float]]] = {}  # name -> first and newest (step, value, time)
        self._changing: set[str] = set()
        start = SessionLog(status=SessionLog.START)
        self._append([Event(file_version="brain.Event:2"), Event(step=first_step, session_log=start)])
        if hyper_parameters:
            from tensorboard.plugins.hparams.summary_v2 import hparams_pb

            self._append([Event(step=first_step, summary=hparams_pb(dict(hyper_parameters)))])

    def write(self, train_step: int, values: Mapping[str, float]) -> None:
        now = time.time()
        self._append([event for name, value in values.items() for event in self._scalars(name, train_step, value, now)])

    def write_texts(self, train_step: int, texts: Mapping[str, str]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.plugins.text.summary_v2 import text_pb

        self._append([Event(step=train_step, summary=text_pb(name, text)) for name, text in texts.items()])

    def close(self) -> None:
        """Do nothing: each step is in the file already."""

    def _scalars(self, name: str, step: int, value: float, now: float) -> list[Any]:
        """Return the events of one value: none until the scalar changes, then also those held back."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        points = [(step, value, now)]
        if name not in self._changing:
            held = self._constant.setdefault(name, points)
            if held[0][1] == value or (math.isnan(value) and math.isnan(held[0][1])):
                self._constant[name] = [held[0], points[0]]
                return []
            # The first and the newest of equal values draw the same line as all of them.
            points = [*dict.fromkeys(self._constant.pop(name)), *points]
            self._changing.add(name)
        return [
            Event(step=at, wall_time=seconds, summary=Summary(value=[Summary.Value(tag=name, simple_value=number)]))
            for at, number, seconds in points
        ]

    def _append(self, events: Sequence[Any]) -> None:
        """Append events as records, in one write."""
        from tensorboard.summary.writer.record_writer import RecordWriter

        records = io.BytesIO()
        writer = RecordWriter(records)
        for event in events:
            event.wall_time = event.wall_time or time.time()
            writer.write(event.SerializeToString())
        if events:
            self._files.write(self._path, [records.getvalue()], "a")


class MetricRecorder:
    """Passes metrics to every writer. A writer that fails (a full disk) is counted and logged once; training continues."""

    def __init__(self, writers: Sequence[MetricWriter]) -> None:
        self._writers = tuple(writers)
        self.num_failures = 0

    def write(self, train_step: int, values: Mapping[str, float]) -> None:
        for writer in self._writers:
            self._attempt(writer.write, train_step, values)

    def write_texts(self, train_step: int, texts: Mapping[str, str]) -> None:
        for writer in self._writers:
            if isinstance(writer, TensorBoardWriter):
                self._attempt(writer.write_texts, train_step, texts)

    def close(self) -> None:
        for writer in self._writers:
            self._attempt(writer.close)

    def _attempt(self, call: Any, *arguments: Any) -> None:
        try:
            call(*arguments)
        except Exception as error:  # a lost metric must not end a training run
            self.num_failures += 1
            if self.num_failures == 1:
                logger.warning("metrics could not be written (further failures are only counted): %r", error)
