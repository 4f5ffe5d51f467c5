"""Curves of this run, another run or a publication, by step.

    a run's directory | reference.json | .csv or .jsonl with a step column (a W&B export, for example) -> Record

`examples/references` has the published figures. A paper's text names few points, so nothing is claimed between two of
them, and each holds until the next (`interpolation: "hold"`). A record with many points is interpolated linearly.
"""

from __future__ import annotations

import csv
import json
import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron_dapo.evaluation.protocol import EvaluationResult
from megatron_dapo.untrusted import blamed_on, read_json

FORMAT = "megatron_dapo reference 1"
AVERAGE = "eval/avg_at_k"

Unit = Literal["train_step", "optimizer_step"]
Interpolation = Literal["linear", "hold"]

_Z95 = 1.959964  # half the width of a normal 95 % interval, in standard errors
_STEP_COLUMNS: dict[str, Literal["train_step", "optimizer_step"]] = {
    "optimizer_step": "optimizer_step",
    "train_step": "train_step",
    "step": "train_step",
    "global_step": "train_step",
    "_step": "train_step",
}
# Names that verl's records give to the same quantities.
_ALIASES = {
    r"val-core/.*acc/mean@\d+": AVERAGE,
    r"actor/entropy(_loss)?": "actor/entropy",
    r"response_length/mean": "rollout/response_tokens_mean",
    r"critic/(score|rewards)/mean": "reward/mean",
    r"value": AVERAGE,  # a table of two columns, step and value
}


@dataclass(frozen=True)
class CurvePoint:
    """A value and its 95 % interval; low = high = value if the record states none."""

    step: float
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Curve:
    """The points of one metric, by ascending step."""

    points: tuple[CurvePoint, ...]
    interpolation: Interpolation = "linear"

    @property
    def has_intervals(self) -> bool:
        """True if any point has an interval."""
        return any(point.low < point.high for point in self.points)

    def at(self, step: float) -> CurvePoint | None:
        """Return the curve at `step`; None before its first point and, unless the last one holds, after its last."""
        index = bisect_right([point.step for point in self.points], step)
        if index == 0:
            return None
        left = self.points[index - 1]
        if self.interpolation == "hold" or left.step == step:
            return left
        if index == len(self.points):
            return None
        right = self.points[index]
        share = (step - left.step) / (right.step - left.step)
        value, low, high = (
            a + share * (b - a) for a, b in ((left.value, right.value), (left.low, right.low), (left.high, right.high))
        )
        return CurvePoint(step, value, low, high)


@dataclass(frozen=True)
class PublishedScore:
    """A final score that is published without a curve."""

    name: str
    value: float
    source: str


@dataclass(frozen=True)
class Record:
    """Curves by metric over steps of one unit."""

    name: str
    unit: Unit
    curves: Mapping[str, Curve]
    scores: tuple[PublishedScore, ...] = ()  # published values of `eval/avg_at_k`
    results: Mapping[float, Path] = field(default_factory=dict)  # evaluations with every problem, by step


def read_record(path: Path, unit: Unit | None = None) -> Record:
    """Read a run's directory or a reference file. `unit`: of the steps; a directory has both, a table names its own.

    Raises ValueError, in one line, for a file that has no step column, no known metric, or another form.
    """
    if path.is_dir():
        return _read_run(path, unit or "train_step")
    if not path.is_file():
        raise ValueError(f"{path}: neither a run's directory nor a file")
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise ValueError(f"{path}: unknown kind of reference, choose a directory or one of {', '.join(_READERS)}")
    with blamed_on(path, csv.Error):
        record = reader(path)
    if unit is not None and unit != record.unit:
        raise ValueError(f"{path} counts {record.unit}s, not {unit}s")
    return record


# ---- runs


def _read_run(path: Path, unit: Unit) -> Record:
    rows = _json_lines(path / "metrics.jsonl")
    # Evaluations are recorded by train step, with 0 before the first.
    steps: dict[int, float] = {0: 0.0}
    for row in rows:
        steps[row["train_step"]] = row["train_step"] if unit == "train_step" else row["progress/optimizer_steps"]
    curves = _curves((steps[row["train_step"]], row) for row in rows)
    file = path / "evaluations.jsonl"
    evaluations = [row for row in (_json_lines(file) if file.is_file() else []) if row["train_step"] in steps]
    results = {
        steps[row["train_step"]]: result
        for row in evaluations
        if (result := path / "evaluations" / f"step_{row['train_step']:06d}.json").is_file()
    }
    points = [(steps[row["train_step"]], row) for row in evaluations]
    curves |= _curves(points, {AVERAGE: ("eval/avg_at_k_low", "eval/avg_at_k_high")})
    if not curves:
        raise ValueError(f"{path}: metrics.jsonl has no train step yet")
    return Record(str(path), unit, curves, results=results)


def _json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file; a line that is being written is left out."""
    if not path.is_file():
        raise ValueError(f"{path} is not there: {path.parent} is no run's directory")
    with blamed_on(path):
        text = path.read_text(encoding="utf-8")
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines() if line.strip()]


def _curves(
    rows: Iterable[tuple[float, Mapping[str, Any]]], bounds: Mapping[str, tuple[str, str]] | None = None
) -> dict[str, Curve]:
    """Return a curve for each column of numbers. `bounds`: the columns of a metric's interval."""
    points: dict[str, dict[float, CurvePoint]] = {}
    for step, row in rows:
        for name, value in row.items():
            if isinstance(value, (int, float)) and math.isfinite(value) and name != "train_step":
                low, high = (row[bound] for bound in (bounds or {}).get(name, (name, name)))
                points.setdefault(name, {})[step] = CurvePoint(step, float(value), low, high)
    return {name: Curve(tuple(by_step[step] for step in sorted(by_step))) for name, by_step in points.items()}


# ---- reference files


def _read_reference(path: Path) -> Record:
    document = read_json(path)
    found = document.get("format") if isinstance(document, dict) else None
    if found != FORMAT:
        raise ValueError(f"{path}: format {found!r}, expected {FORMAT!r}")
    if document["unit"] not in _STEP_COLUMNS.values():
        raise ValueError(f"{path}: unit {document['unit']!r}, choose train_step or optimizer_step")
    curves = {}
    for metric, content in document["curves"].items():
        missing = [point for point in content["points"] if "step" not in point]
        if missing:
            raise ValueError(f"{path}: {metric}: point {missing[0]} has no step")
        points = [_published_point(point, content.get("num_responses", 0)) for point in content["points"]]
        curves[metric] = Curve(tuple(sorted(points, key=lambda point: point.step)), content["interpolation"])
    scores = tuple(PublishedScore(**score) for score in document.get("scores", []))
    return Record(document["name"], document["unit"], curves, scores)


def _published_point(point: Mapping[str, Any], num_responses: int) -> CurvePoint:
    """Return the point with its stated interval, or with that of an accuracy over `num_responses` responses."""
    value = float(point["value"])
    # Responses to one problem are alike: the binomial error is an upper bound of the sampling error on fixed problems.
    error = _Z95 * math.sqrt(value * (1 - value) / num_responses) if num_responses else 0.0
    return CurvePoint(
        float(point["step"]), value, float(point.get("low", value - error)), float(point.get("high", value + error))
    )


def _read_csv(path: Path) -> Record:
    with path.open(newline="", encoding="utf-8-sig") as file:
        return _from_table(path, list(csv.DictReader(file)))


def _from_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> Record:
    if not rows:
        raise ValueError(f"{path} has no rows")
    names = list(dict.fromkeys(name for row in rows for name in row))
    column = next((name for name in names if name.lower() in _STEP_COLUMNS), None)
    if column is None:
        raise ValueError(f"{path}: no step column ({', '.join(_STEP_COLUMNS)}); found: {', '.join(names)}")
    known = {name: metric for name in names if name != column and (metric := _metric(name))}
    if not known:
        raise ValueError(f"{path}: no column of a known metric; found: {', '.join(names)}")
    table = [
        (float(row[column]), {known[name]: _number(row.get(name)) for name in known}) for row in rows if row[column]
    ]
    return Record(str(path), _STEP_COLUMNS[column.lower()], _curves(table))


def _metric(column: str) -> str | None:
    """Return the metric of a column of a table, None for other columns."""
    if column.endswith(("__MIN", "__MAX")):  # W&B's envelopes of smoothed lines
        return None
    name = column.rpartition(" - ")[2]  # W&B: "RUN - METRIC"
    alias = next((metric for pattern, metric in _ALIASES.items() if re.fullmatch(pattern, name)), name)
    return alias if re.fullmatch(r"[a-z]+/[a-z0-9_]+", alias) else None


def _number(text: Any) -> float | None:
    return float(text) if text not in (None, "", "NaN", "null") else None


_READERS = {
    ".json": _read_reference,
    ".csv": _read_csv,
    ".jsonl": lambda path: _from_table(path, _json_lines(path)),
}


def sampling_interval(result: EvaluationResult) -> tuple[float, float]:
    """Return the 95 % interval of avg@n on these problems: how far it would be off if the same model were sampled again.

    Problems are fixed, as they are for everybody who reports the same benchmark. From the variance within each problem;
    of one response a problem nothing is known but that it is at most a quarter.
    """
    variances = []
    for record in result.problems:
        n, mean = len(record.accuracies), sum(record.accuracies) / len(record.accuracies)
        variances.append(mean * (1 - mean) / (n - 1) if n > 1 else 0.25)
    error = _Z95 * math.sqrt(sum(variances)) / len(variances)
    return result.headline.value - error, result.headline.value + error
