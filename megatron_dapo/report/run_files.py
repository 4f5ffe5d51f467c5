"""A run's directory, as the report reads it: small files whole, large ones in evenly spaced pieces."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_dapo.plan.comparison import PLAN
from megatron_dapo.telemetry.alarms import mismatch_limit
from megatron_dapo.telemetry.provenance import PROVENANCE
from megatron_dapo.untrusted import one_line
from megatron_dapo.watch.attempts import ATTEMPTS

_WHOLE_BYTES = 1 << 25  # limit for reading a file of samples whole
_PIECE_BYTES = 1 << 19
_NUM_PIECES = 48  # pieces read of a larger file

Row = Mapping[str, Any]


@dataclass(frozen=True)
class RunFiles:
    """Records of a run. Missing or truncated files are empty, so that a run that died early still gets a report."""

    path: Path
    config: Mapping[str, Any]  # key -> value, e.g. "run.name"
    origins: Mapping[str, str]
    steps: Sequence[Row]  # metrics.jsonl, by train step
    evaluations: Sequence[Row]  # evaluations.jsonl
    samples: Sequence[Row] = ()
    filtered: Sequence[Row] = ()
    attempts: Sequence[Row] = ()
    failure: Mapping[str, Any] = field(default_factory=dict)  # failure.json
    summary: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)  # plan.json: planned and measured values of an early step

    @property
    def name(self) -> str:
        """The run's name."""
        return str(self.config.get("run.name") or self.path.name)

    def column(self, metric: str) -> list[float]:
        """Return a metric of every train step; NaN if a row lacks it or the value was not finite."""
        return [_number(row.get(metric)) for row in self.steps]


def read_run(path: Path) -> RunFiles:
    """Read a run's directory. Raises a one-line ValueError for a directory without a run."""
    if not (path / "config.json").is_file():
        raise ValueError(f"{path}: no config.json, so no run's directory; name the run.output_dir of a run")
    document, provenance = _document(path / "config.json"), _document(path / PROVENANCE)
    config = dict(_flat(document.get("config", {})))
    if "mismatch.alarm" in config:
        # A run that died before it wrote its provenance is on an unknown device: the larger bound holds there.
        is_on_gpu = not str(provenance.get("machine", "")).partition(";")[0].endswith("CPU")
        config["mismatch.alarm"] = mismatch_limit(config.get, is_on_gpu)
    return RunFiles(
        path,
        config,
        document.get("origins", {}),
        _by_step(_lines(path / "metrics.jsonl")),
        _by_step(_lines(path / "evaluations.jsonl")),
        list(_some_lines(path / "samples.jsonl")),
        list(_some_lines(path / "filtered.jsonl")),
        read_attempts(path),
        _document(path / "failure.json"),
        _document(path / "summary.json"),
        provenance,
        _document(path / PLAN),
    )


def read_attempts(path: Path) -> list[Row]:
    """Return the records of a run's starts and ends; none if it has not begun."""
    return list(_lines(path / ATTEMPTS))


def _by_step(rows: Iterator[Row]) -> list[Row]:
    steps = {row["train_step"]: row for row in rows if isinstance(row.get("train_step"), int)}
    return [steps[step] for step in sorted(steps)]


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan


def _document(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _lines(path: Path) -> Iterator[Row]:
    if path.is_file():
        with open(path, encoding="utf-8", errors="replace") as stream:
            for line in stream:
                if (row := _row(line)) is not None:
                    yield row


def _some_lines(path: Path) -> Iterator[Row]:
    """Yield the records of a file, of a large one those in pieces spread evenly from its begin to its end."""
    size = path.stat().st_size if path.is_file() else 0
    if size <= _WHOLE_BYTES:
        yield from _lines(path)
        return
    with open(path, "rb") as stream:
        for piece in range(_NUM_PIECES):
            start = piece * (size - _PIECE_BYTES) // (_NUM_PIECES - 1)
            stream.seek(start)
            content = stream.read(_PIECE_BYTES)
            # The first line is cut unless the piece begins the file; so is the last one.
            lines = content[: content.rfind(b"\n") + 1].splitlines()[1 if start else 0 :]
            yield from filter(None, (_row(line.decode("utf-8", "replace")) for line in lines))


def _row(line: str) -> Row | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # cut short by a kill, or being written
        return None
    return row if isinstance(row, dict) else None


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def shown(value: Any) -> str:
    """Return a value as a recipe would write it, in one line."""
    return one_line(json.dumps(value, ensure_ascii=False), 400)
