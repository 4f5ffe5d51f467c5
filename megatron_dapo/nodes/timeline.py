"""Picture of a run's nodes over time: one row per node with its distance from the others in a metric, and the alerts.

Drawn as SVG or as lines for a terminal. The metric is that of the alert, or the one in which the nodes differ most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from megatron_dapo.nodes.comparison import fill_gaps
from megatron_dapo.nodes.samples import NodeAlert, NodeSamples
from megatron_dapo.svg import BLUE, GRAY, document, text

RED = "#cf222e"
_LEFT, _TOP, _ROW, _WIDTH, _FOOT = 130, 44, 26, 720, 34  # pixels
_LEVELS = " .:-=+*#"  # terminal characters, by distance
_MAX_ROWS = 48  # nodes; a larger run shows those farthest from the others
_MAX_POINTS = 600  # points per curve


@dataclass(frozen=True)
class NodeTimeline:
    """A metric of some nodes over time, means of `seconds_per_point` seconds."""

    metric: str
    unit: str
    start: float  # unix time, seconds
    seconds_per_point: int
    nodes: tuple[str, ...]
    num_all_nodes: int
    values: np.ndarray  # [num_nodes, num_points]; NaN: no sample
    deviations: np.ndarray  # [num_nodes, num_points], in [0, 1]: distance to the median of the node's role
    alerts: tuple[NodeAlert, ...]

    @property
    def seconds(self) -> int:
        """Seconds that the timeline spans, rounded up to whole points."""
        return self.values.shape[1] * self.seconds_per_point


def timeline(
    samples: NodeSamples, alerts: Sequence[NodeAlert] = (), metric: str | None = None, num_points: int = _MAX_POINTS
) -> NodeTimeline:
    """Return the timeline of `metric`; None: that of the newest alert, or the one in which a node differs most.

    Raises ValueError for a metric without samples, and lists the metrics that have some.
    """
    names = [each.name for place, each in enumerate(samples.metrics) if np.isfinite(samples.values[:, :, place]).any()]
    if not names:
        raise ValueError(f"{len(samples.nodes)} nodes in {samples.num_seconds} s have no value of any metric")
    if metric is not None and metric not in names:
        raise ValueError(f"metric {metric!r} has no samples: choose one of {', '.join(names)}")
    all_names = [each.name for each in samples.metrics]
    if metric is None:
        alarmed = [alert.metric for alert in alerts if alert.metric in names]
        metric = alarmed[-1] if alarmed else max(names, key=lambda name: _spread(samples, all_names.index(name)))
    place = all_names.index(metric)
    per_point = max(1, math.ceil(samples.num_seconds / num_points))
    values = _means(samples.values[:, :, place], per_point)
    distances = _distances(values, samples.roles)
    largest = max(float(np.nanmax(distances)), samples.metrics[place].resolution)
    deviations = distances / (largest or 1.0)
    is_named = np.isin(samples.nodes, [alert.node for alert in alerts])
    farthest = np.argsort(-(np.nan_to_num(deviations).mean(1) + 1e9 * is_named), kind="stable")[:_MAX_ROWS]
    rows = np.sort(farthest)
    return NodeTimeline(
        metric,
        samples.metrics[place].unit,
        samples.start,
        per_point,
        tuple(samples.nodes[row] for row in rows),
        len(samples.nodes),
        values[rows],
        deviations[rows],
        tuple(alerts),
    )


def to_svg(timeline: NodeTimeline) -> str:
    """Return the timeline as an SVG document: one curve per node, red during its alerts."""
    height = _TOP + _ROW * len(timeline.nodes) + _FOOT
    title = f"{timeline.metric} ({timeline.unit}) of {len(timeline.nodes)} of {timeline.num_all_nodes} nodes"
    parts = [text(10, 18, title, anchor="start")]
    finite = timeline.values[np.isfinite(timeline.values)]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 0.0)
    parts.append(text(_LEFT + _WIDTH, 18, f"rows from {low:.4g} to {high:.4g}", GRAY, "end"))
    for row, node in enumerate(timeline.nodes):
        top = _TOP + _ROW * row
        named = [alert for alert in timeline.alerts if alert.node == node]
        color = RED if named else BLUE
        parts.append(text(_LEFT - 8, top + _ROW - 9, _short(node), RED if named else "#24292f", "end"))
        for alert in named:
            left, right = (_x(timeline, second) for second in (alert.since, alert.since + alert.seconds))
            parts.append(
                f'<rect x="{left:.1f}" y="{top}" width="{max(2.0, right - left):.1f}" height="{_ROW - 2}" fill="{RED}" '
                f'fill-opacity="0.15"><title>{escape(str(alert))}</title></rect>'
            )
        parts += [_curve(points, color) for points in _pieces(timeline, row, top, low, high)]
    foot = _TOP + _ROW * len(timeline.nodes) + 18
    parts += [
        text(_LEFT + _WIDTH * share, foot, f"{share * timeline.seconds:.0f} s", GRAY, anchor)
        for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end"))
    ]
    return document(_LEFT + _WIDTH + 20, height, parts)


def to_lines(timeline: NodeTimeline) -> list[str]:
    """Return the timeline for a terminal: one character per point, denser the farther the node is from others; `!` in
    an alert."""
    width = max(len(_short(node)) for node in timeline.nodes)
    lines = [f"{timeline.metric} ({timeline.unit}), {timeline.seconds} s, a character is {timeline.seconds_per_point} s"]
    for row, node in enumerate(timeline.nodes):
        cells = [_cell(timeline, row, point) for point in range(timeline.values.shape[1])]
        mean = np.nanmean(timeline.values[row]) if np.isfinite(timeline.values[row]).any() else math.nan
        lines.append(f"{_short(node):{width}} |{''.join(cells)}| mean {mean:.4g}")
    if len(timeline.nodes) < timeline.num_all_nodes:
        lines.append(f"{timeline.num_all_nodes - len(timeline.nodes)} nodes nearer to the others are not shown")
    return lines


def _cell(timeline: NodeTimeline, row: int, point: int) -> str:
    begin = timeline.start + point * timeline.seconds_per_point
    for alert in timeline.alerts:
        overlaps = alert.since < begin + timeline.seconds_per_point and begin < alert.since + alert.seconds
        if alert.node == timeline.nodes[row] and overlaps:
            return "!"
    deviation = timeline.deviations[row, point]
    return "?" if math.isnan(deviation) else _LEVELS[min(len(_LEVELS) - 1, int(deviation * len(_LEVELS)))]


def _spread(samples: NodeSamples, place: int) -> float:
    """Return the largest mean distance of a node to its role's median, in units of the metric's resolution; 0 for a
    metric without one."""
    resolution = samples.metrics[place].resolution
    distances = _distances(samples.values[:, :, place], samples.roles)
    return float(np.nan_to_num(distances).mean(1).max()) / resolution if resolution else 0.0


def _distances(values: np.ndarray, roles: Sequence[str]) -> np.ndarray:
    """Return |value - median of the role| at each time, [num_nodes, num_points]; NaN for nodes and times without a sample."""
    distances = np.full(values.shape, np.nan)
    for role in dict.fromkeys(roles):
        rows = [row for row, each in enumerate(roles) if each == role]
        filled = fill_gaps(values[rows])
        there = filled[np.isfinite(filled).all(1)]
        if len(there):
            distances[rows] = np.abs(values[rows] - np.median(there, axis=0))
    return distances


def _means(values: np.ndarray, per_point: int) -> np.ndarray:
    """Return means of `per_point` neighbors, [num_nodes, num_points]; NaN without any sample."""
    num_points = math.ceil(values.shape[1] / per_point)
    padded = np.full((len(values), num_points * per_point), np.nan)
    padded[:, : values.shape[1]] = values
    parts = padded.reshape(len(values), num_points, per_point)
    there = np.isfinite(parts)
    counts = there.sum(2)
    return np.where(counts > 0, np.where(there, parts, 0).sum(2) / np.maximum(1, counts), np.nan)


def _x(timeline: NodeTimeline, time: float) -> float:
    share = (time - timeline.start) / max(1, timeline.seconds)
    return _LEFT + _WIDTH * min(1.0, max(0.0, share))


def _pieces(timeline: NodeTimeline, row: int, top: float, low: float, high: float) -> list[list[tuple[float, float]]]:
    """Return the points of a node's curve, split where it has no samples."""
    pieces: list[list[tuple[float, float]]] = [[]]
    for point, value in enumerate(timeline.values[row]):
        if math.isnan(value):
            pieces.append([])
            continue
        share = (value - low) / (high - low) if high > low else 0.5
        x = _x(timeline, timeline.start + (point + 0.5) * timeline.seconds_per_point)
        pieces[-1].append((x, top + (_ROW - 4) * (1 - share) + 1))
    return [piece for piece in pieces if piece]


def _curve(points: Sequence[tuple[float, float]], color: str) -> str:
    if len(points) == 1:
        return f'<circle cx="{points[0][0]:.1f}" cy="{points[0][1]:.1f}" r="1.2" fill="{color}"/>'
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.2"/>'


def _short(node: str) -> str:
    return node if len(node) <= 18 else f"{node[:8]}..{node[-8:]}"
