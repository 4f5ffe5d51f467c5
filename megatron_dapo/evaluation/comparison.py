"""Comparison of a run with a reference: whether it is on track or, if not, since when.

For every metric both have, differences (run - reference) with 95 % intervals:

    evaluations      at each of the run's. Two runs on the same problems: paired by problem. Otherwise both errors add up:
                     that of sampling the run's responses, and the reference's own
    train steps      means over blocks of BLOCK steps; the error is that of a mean of correlated numbers (AR(1))

A point deviates if its whole interval is beyond the tolerance. A run is off track from the first of the deviating
points at its end, if there are at least PATIENCE of them: one may be chance, and a run that came back is on track.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_dapo.evaluation.protocol import EvaluationResult, compare
from megatron_dapo.evaluation.reference import AVERAGE, Curve, PublishedScore, Record, read_record, sampling_interval

BLOCK = 20  # train steps
MIN_BLOCK = 5
PATIENCE = 2

Direction = Literal["at_least", "equal"]


@dataclass(frozen=True)
class TrackRule:
    """Deviations that count: below the reference (at_least), or to either side (equal), by more than the tolerance."""

    direction: Direction
    tolerance: float  # absolute; differences that training seeds by themselves make
    relative: float = 0.0  # share of the reference's value, added to it


RULES: Mapping[str, TrackRule] = {
    AVERAGE: TrackRule("at_least", 0.03),
    "rollout/accuracy_generated": TrackRule("at_least", 0.05),
    "reward/mean": TrackRule("at_least", 0.1),
    "rollout/response_tokens_mean": TrackRule("equal", 0.0, 0.25),
    "actor/entropy": TrackRule("equal", 0.02, 0.35),
}
_OTHER = TrackRule("equal", 0.0, 0.25)


@dataclass(frozen=True)
class Difference:
    """Run minus reference at one step, with the 95 % interval."""

    step: float
    run: float
    reference: float
    difference: float
    low: float
    high: float
    deviates: bool


@dataclass(frozen=True)
class MetricComparison:
    """Differences of one metric."""

    metric: str
    rule: TrackRule
    differences: tuple[Difference, ...]
    note: str = ""

    @property
    def off_since(self) -> float | None:
        """The first step of the deviating points at the end; None on track."""
        trailing: list[Difference] = []
        for point in reversed(self.differences):
            if not point.deviates:
                break
            trailing.append(point)
        # A single point, such as a published final score, decides by itself.
        enough = len(trailing) >= min(PATIENCE, len(self.differences))
        return trailing[-1].step if trailing and enough else None

    @property
    def last(self) -> Difference | None:
        """The newest difference; None if the curves have no common step yet."""
        return self.differences[-1] if self.differences else None


@dataclass(frozen=True)
class Comparison:
    """A run against a reference."""

    run: str
    reference: str
    unit: str
    metrics: tuple[MetricComparison, ...]
    nearest_scores: tuple[PublishedScore, ...] = ()  # published finals within the interval of the run's newest score

    @property
    def off_since(self) -> float | None:
        """The first step since which any metric is off track."""
        steps = [since for metric in self.metrics if (since := metric.off_since) is not None]
        return min(steps, default=None)

    def verdict(self) -> str:
        """Return one line: on track, or since when and by what not."""
        unit = self.unit.replace("_", " ")
        off = [(since, one.metric, one.last) for one in self.metrics if (since := one.off_since) is not None]
        if off:
            since, name, last = min(off, key=lambda entry: entry[0])
            assert last is not None, "a metric is off track by its differences"
            others = [other for _, other, _ in off if other != name]
            more = f"; also {', '.join(others)}" if others else ""
            return f"off track since {unit} {since:,.0f}: {_describe(name, last)}{more}"
        seen = [(metric.metric, metric.last) for metric in self.metrics if metric.last is not None]
        if not seen:
            return "too early: the reference has no point at or before the run's steps"
        warnings = [name for name, last in seen if last.deviates]
        watched = f"; watch {', '.join(warnings)}: the newest point deviates" if warnings else ""
        name, last = seen[0]
        return f"on track at {unit} {last.step:,.0f}: {_describe(name, last)}{watched}"


def _describe(name: str, last: Difference) -> str:
    return (
        f"{name} {last.run:.4g}, reference {last.reference:.4g} "
        f"({last.difference:+.3g} [{last.low:+.3g}, {last.high:+.3g}])"
    )


def compare_with(run: Path, reference: Record, rules: Mapping[str, TrackRule] | None = None) -> Comparison:
    """Compare a run's directory with a reference. `rules`: more metrics, or other tolerances.

    Raises ValueError if the two have no metric of `RULES` or `rules` in common.
    """
    record = read_record(run, reference.unit)
    chosen = {**RULES, **(rules or {})}
    common = [name for name in chosen if name in record.curves and name in reference.curves]
    missing = [name for name in rules or () if name not in common]
    if missing or not common:
        raise ValueError(
            f"{', '.join(missing) or f'none of {len(chosen)} metrics'}: not in both {record.name} and {reference.name}; the "
            f"reference has {', '.join(reference.curves)}"
        )
    metrics = tuple(_compare(name, chosen[name], record, reference) for name in common)
    return Comparison(record.name, reference.name, reference.unit, metrics, _nearest(record, reference.scores))


def rule_from(text: str) -> tuple[str, TrackRule]:
    """Return the metric and rule of NAME or NAME=TOLERANCE (absolute). ValueError for another form."""
    name, _, tolerance = text.partition("=")
    rule = RULES.get(name, _OTHER)
    if not tolerance:
        return name, rule
    try:
        return name, TrackRule(rule.direction, float(tolerance))
    except ValueError:
        raise ValueError(f"--metric {text}: the tolerance must be a number, e.g. {name}=0.05") from None


def _compare(name: str, rule: TrackRule, run: Record, reference: Record) -> MetricComparison:
    ours, theirs = run.curves[name], reference.curves[name]
    if name == AVERAGE:
        differences, note = _evaluations(rule, run, reference)
        return MetricComparison(name, rule, differences, note)
    if theirs.interpolation == "hold" or ours.has_intervals:
        return MetricComparison(name, rule, tuple(_pointwise(rule, ours, theirs)))
    return MetricComparison(name, rule, tuple(_blocks(rule, ours, theirs)))


def _judged(rule: TrackRule, step: float, run: float, reference: float, low: float, high: float) -> Difference:
    """Return the difference of one step, judged; `low`, `high`: its interval."""
    tolerance = rule.tolerance + rule.relative * abs(reference)
    deviates = high < -tolerance or (rule.direction == "equal" and low > tolerance)
    return Difference(step, run, reference, run - reference, low, high, deviates)


def _pointwise(rule: TrackRule, ours: Curve, theirs: Curve) -> list[Difference]:
    """Return the differences at the run's points; independent errors of both sides add up in squares."""
    found = []
    for point in ours.points:
        other = theirs.at(point.step)
        if other is not None:
            difference = point.value - other.value
            below = math.hypot(point.value - point.low, other.high - other.value)
            above = math.hypot(point.high - point.value, other.value - other.low)
            found.append(_judged(rule, point.step, point.value, other.value, difference - below, difference + above))
    return found


# ---- evaluations


def _evaluations(rule: TrackRule, run: Record, reference: Record) -> tuple[tuple[Difference, ...], str]:
    ours, theirs, note = run.curves[AVERAGE], reference.curves[AVERAGE], ""
    differences = {
        point.step: point for point in _pointwise(rule, _resampled(ours, run), _resampled(theirs, reference))
    }
    for step in run.results.keys() & reference.results.keys():
        a, b = (_read_result(results[step]) for results in (reference.results, run.results))
        try:
            paired = compare(a, b)[f"avg@{a.protocol.num_samples}"]
        except ValueError as error:
            note = f"not paired by problem: {error}"
            continue
        differences[step] = _judged(rule, step, b.headline.value, a.headline.value, paired.low, paired.high)
    return tuple(differences[step] for step in sorted(differences)), note


def _resampled(curve: Curve, record: Record) -> Curve:
    """Return the curve with intervals over responses, not over problems, wherever the results of all problems are kept.

    Both sides answer the same problems: which problems a benchmark happens to have is no error of the difference.
    """
    points = []
    for point in curve.points:
        if point.step in record.results:
            low, high = sampling_interval(_read_result(record.results[point.step]))
            point = type(point)(point.step, point.value, low, high)
        points.append(point)
    return Curve(tuple(points), curve.interpolation)


def _read_result(path: Path) -> EvaluationResult:
    return EvaluationResult.from_json(path.read_text(encoding="utf-8"))


def _nearest(run: Record, scores: Sequence[PublishedScore]) -> tuple[PublishedScore, ...]:
    if AVERAGE not in run.curves or not scores:
        return ()
    last = _resampled(run.curves[AVERAGE], run).points[-1]
    return tuple(score for score in scores if last.low <= score.value <= last.high)


# ---- train steps


def _blocks(rule: TrackRule, ours: Curve, theirs: Curve) -> list[Difference]:
    """Return the mean differences over blocks of train steps."""
    both = [(point, other) for point in ours.points if (other := theirs.at(point.step)) is not None]
    starts = list(range(0, len(both), BLOCK))
    if len(both) % BLOCK and len(both) % BLOCK < MIN_BLOCK:
        starts.pop()  # too few for a separate block, so they join the previous one
    edges = [*starts, len(both)]
    blocks = [both[start:end] for start, end in zip(edges, edges[1:])]
    values = [[point.value - other.value for point, other in block] for block in blocks]
    correlation = lag_one_correlation(values)
    found = []
    for block, differences in zip(blocks, values):
        error = half_width(differences, correlation)
        mean = sum(differences) / len(differences)
        run = sum(point.value for point, _ in block) / len(block)
        found.append(_judged(rule, block[-1][0].step, run, run - mean, mean - error, mean + error))
    return found


def lag_one_correlation(blocks: Sequence[Sequence[float]]) -> float:
    """Return the correlation of neighbors within blocks, in [0, 0.95], corrected for its bias in short blocks."""
    products = squares = count = 0.0
    for block in blocks:
        mean = sum(block) / len(block)
        rest = [value - mean for value in block]
        products += sum(a * b for a, b in zip(rest, rest[1:]))
        squares += sum(value * value for value in rest)
        count += len(block)
    if not squares:
        return 0.0
    # Kendall 1954: the estimate from n values is low by (1 + 3 rho) / n on average.
    n = max(4.0, count / len(blocks))
    raw = products / squares
    return min(0.95, max(0.0, (raw + 1 / n) / (1 - 3 / n)))


def half_width(values: Sequence[float], correlation: float) -> float:
    """Return half the 95 % interval of the mean of values whose neighbors are correlated."""
    n = len(values)
    mean = sum(values) / n
    # Correlated values spread less around their own mean: n (1 - rho) / (1 + rho) of them are independent.
    independent = max(3.0, n * (1 - correlation) / (1 + correlation))
    variance = sum((value - mean) ** 2 for value in values) / n * independent / (independent - 1)
    return _student95(independent - 1) * math.sqrt(variance / independent)


def _student95(freedom: float) -> float:
    """Return the 97.5 % quantile of Student's t (Cornish and Fisher's expansion; low by a tenth at 2 degrees, by 1 % at 5)."""
    z = 1.959964
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
