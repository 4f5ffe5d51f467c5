"""Metrics of nodes, one sample a second: the metrics themselves, samples of all nodes on one clock, and an alert.

A missing second is NaN. Nodes are compared with nodes of the same role, in seconds in which both are in the same phase.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

UNKNOWN_PHASE = ""


@dataclass(frozen=True)
class NodeMetric:
    name: str
    unit: str  # "share" is in [0, 1]
    resolution: float  # has the metric's unit; nodes that differ by less are alike, however quiet they are


# Most sensitive to faults first. The seven of the GPU and of flow control are the paper's, in its order; the others are
# for machines without GPUs, and for containers.
METRICS = (
    NodeMetric("pfc_tx_rate", "packets/s", 100.0),
    NodeMetric("cpu_throttled", "share", 0.1),
    NodeMetric("cpu_usage", "share", 0.05),
    NodeMetric("gpu_duty_cycle", "share", 0.05),
    NodeMetric("gpu_power", "W", 30.0),
    NodeMetric("gpu_graphics_activity", "share", 0.05),
    NodeMetric("gpu_tensor_activity", "share", 0.03),
    NodeMetric("nvlink_bandwidth", "bytes/s", 1e9),
    NodeMetric("network_send_queue", "bytes", 2e4),  # TCP bytes that other nodes have not acknowledged
    NodeMetric("network_retransmits", "packets/s", 5.0),
    NodeMetric("network_rate", "bytes/s", 1e6),
)
# Collected and shown, but not compared by default: healthy nodes differ in them for minutes.
SHOWN_METRICS = (
    NodeMetric("memory_usage", "bytes", 1e9),
    NodeMetric("gpu_memory_usage", "bytes", 1e9),
    NodeMetric("disk_rate", "bytes/s", 1e7),
)
PUBLISHED_ORDER = (
    "pfc_tx_rate",
    "cpu_usage",
    "gpu_duty_cycle",
    "gpu_power",
    "gpu_graphics_activity",
    "gpu_tensor_activity",
    "nvlink_bandwidth",
)


@dataclass(frozen=True)
class NodeSample:
    """The metrics of one node in one second. A metric that could not be read is left out."""

    time: float  # unix time, seconds
    values: Mapping[str, float]  # metric -> value
    phase: str = UNKNOWN_PHASE
    step: int = -1


@dataclass(frozen=True)
class NodeSeries:
    """Samples of one node, oldest first."""

    node: int
    name: str  # host name
    role: str
    samples: Sequence[NodeSample]


@dataclass(frozen=True)
class NodeSamples:
    """Metrics of all nodes on one clock, one column per second."""

    nodes: tuple[str, ...]
    roles: tuple[str, ...]  # one per node; nodes of different roles are never compared
    metrics: tuple[NodeMetric, ...]  # A detector tries them in this order.
    values: np.ndarray  # [num_nodes, num_seconds, num_metrics], float32; NaN: no sample
    phases: np.ndarray  # [num_nodes, num_seconds], integers; equal numbers are the same phase, negative ones unknown
    start: float = 0.0  # unix time of the first second

    @property
    def num_seconds(self) -> int:
        return self.values.shape[1]


@dataclass(frozen=True)
class NodeAlert:
    """A node whose `metric` has deviated from that of the others for long enough."""

    node: str
    metric: str
    since: float  # unix time of the first window, seconds
    seconds: float  # time between `since` and the end of the last window looked at
    score: float  # mean z-score over those windows as a share of the largest one possible, sqrt(n - 1); at most 1
    value: float  # mean of the metric on the node over that time, in its unit
    others: float  # median of that mean over the nodes it was compared with

    def __str__(self) -> str:
        return (
            f"{self.node}: {self.metric} {self.value:.4g} where the others have {self.others:.4g}, "
            f"for {self.seconds:.0f} s, score {self.score:.2f}"
        )


def align(
    series: Sequence[NodeSeries], metrics: Sequence[NodeMetric], num_seconds: int, end: float | None = None
) -> NodeSamples:
    """Return the newest `num_seconds` seconds of all nodes on one clock.

    A second takes the newest sample whose time rounds down to it, and is NaN without one (`fill_gaps`). `end`: unix time of
    the last second; None: that of the newest sample. Raises ValueError if no node has a sample.
    """
    if num_seconds < 1:
        raise ValueError(f"{num_seconds} seconds of samples: needs at least 1")
    newest = [one.samples[-1].time for one in series if one.samples]
    if not newest:
        raise ValueError(f"none of {len(series)} nodes has a sample: nothing to align")
    last = int(max(newest) if end is None else end)
    start = last - num_seconds + 1
    values = np.full((len(series), num_seconds, len(metrics)), np.nan, np.float32)
    phases = np.full((len(series), num_seconds), -1, np.int32)
    numbers: dict[str, int] = {}
    for row, one in enumerate(series):
        first = bisect.bisect_left(one.samples, float(start), key=lambda sample: sample.time)
        for sample in one.samples[first:]:
            column = int(sample.time) - start
            if column >= num_seconds:
                break
            values[row, column] = [sample.values.get(metric.name, np.nan) for metric in metrics]
            if sample.phase != UNKNOWN_PHASE:
                phases[row, column] = numbers.setdefault(sample.phase, len(numbers))
    names = tuple(one.name for one in series)
    return NodeSamples(names, tuple(one.role for one in series), tuple(metrics), values, phases, float(start))
