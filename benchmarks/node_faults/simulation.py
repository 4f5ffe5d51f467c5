"""Simulated metrics of a training task on many nodes, for benchmarks, tests and the reference denoisers.

Nothing here was measured: patterns, noise and how a fault shows are made up after the paper's descriptions. Figures of a
detector on it depend on these choices and say nothing about a real cluster; orderings between detectors may.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from megatron_dapo.nodes.samples import METRICS, PUBLISHED_ORDER, SHOWN_METRICS, NodeMetric, NodeSamples

# Percent of the faults of seven months in production (the paper's table 1); the rest is "other".
FAULT_SHARES = {
    "ecc": 38.9,
    "cuda_execution": 14.6,
    "other": 10.3,
    "gpu_execution": 7.7,
    "pcie_downgrade": 6.6,
    "unreachable": 6.0,
    "nic_dropout": 5.7,
    "hdfs": 5.7,
    "card_drop": 2.0,
    "nvlink": 1.7,
    "aoc": 0.9,
}
_GPU = ("gpu_duty_cycle", "gpu_power", "gpu_graphics_activity", "gpu_tensor_activity", "nvlink_bandwidth")
# Chance that a fault shows in a metric on its node. The paper's matrix was not at hand: these follow its text.
_IDLE = {"cpu_usage": 0.85, **dict.fromkeys(_GPU, 0.85)}
_FAINT = {"cpu_usage": 0.4, **dict.fromkeys(_GPU, 0.45)}
_SHOWS: dict[str, dict[str, float]] = {
    "ecc": {"pfc_tx_rate": 0.3, **_IDLE},
    "card_drop": {"pfc_tx_rate": 0.3, **_IDLE},
    "unreachable": _IDLE,
    "cuda_execution": _IDLE,
    "hdfs": _IDLE,
    "gpu_execution": _FAINT,
    "other": _FAINT,
    "nic_dropout": {"pfc_tx_rate": 0.6, **_IDLE},
    "nvlink": {"nvlink_bandwidth": 0.9, **dict.fromkeys(_GPU[:-1], 0.6)},
    "pcie_downgrade": {"pfc_tx_rate": 0.9},
    "aoc": {"pfc_tx_rate": 0.4},
}
# Level while training, depth of the dip in every iteration, and level under a fault; of a full scale of 1.
_LEVELS = {
    "pfc_tx_rate": (0.10, -0.05, 0.7),  # the pattern rises and the fault surges
    "cpu_usage": (0.50, 0.10, 0.05),
    "gpu_duty_cycle": (0.90, 0.20, 0.02),
    "gpu_power": (0.80, 0.25, 0.15),
    "gpu_graphics_activity": (0.85, 0.25, 0.02),
    "gpu_tensor_activity": (0.45, 0.25, 0.01),
    "nvlink_bandwidth": (0.60, 0.35, 0.01),
    "memory_usage": (0.50, 0.00, 0.2),
    "gpu_memory_usage": (0.85, 0.00, 0.1),
    "disk_rate": (0.05, 0.00, 0.05),
}
_FULL_SCALE = {"share": 1.0, "packets/s": 10_000.0, "W": 700.0, "bytes/s": 4e11, "bytes": 6e11}
_BY_NAME = {metric.name: metric for metric in (*METRICS, *SHOWN_METRICS)}
PUBLISHED_METRICS = tuple(_BY_NAME[name] for name in PUBLISHED_ORDER)
ALL_METRICS = (*PUBLISHED_METRICS, *SHOWN_METRICS)
_NOISE, _CORRELATION, _OFFSET = 0.02, 0.8, 0.005
_SPIKES_PER_SECOND = 2e-4  # Expected one-second spikes per node and metric.
_RAMP_S = 3.0
# Share of the way from the level of training to the one of a fault that its metrics go, drawn for each fault. Above 0.5 each
# fault stands out from every spike, and a denoiser has nothing to do.
_SEVERITY = (0.1, 0.5)
_GROUP_DELAY_S = 60


@dataclass(frozen=True)
class SimulatedFault:
    """A fault of one node: its kind, from `since` to `until` in seconds of the task, and the metrics that it shows in."""

    kind: str
    node: int
    since: int
    until: int
    metrics: tuple[str, ...]


@dataclass(frozen=True)
class SimulatedTask:
    """Metrics of a task, with one fault or none."""

    samples: NodeSamples
    fault: SimulatedFault | None


@dataclass(frozen=True)
class TaskSettings:
    """Settings of a simulated task."""

    num_nodes: int = 1500
    num_seconds: int = 900
    num_jitters: int = 18  # disturbances of 5 to 60 s on single nodes, none of them a fault
    has_fault: bool = True


def simulate(settings: TaskSettings, seed: int) -> SimulatedTask:
    """Return one task: AR(1) noise around a pattern that all nodes share, spikes, jitters, and a fault of 180 to 600 s.

    Raises ValueError if a fault does not fit into the task.
    """
    if settings.has_fault and settings.num_seconds < 660:
        raise ValueError(f"{settings.num_seconds} seconds: a fault lasts up to 600 and begins after 30; needs 660")
    generator = np.random.default_rng(seed)
    num_nodes, num_seconds = settings.num_nodes, settings.num_seconds
    values = np.empty((len(ALL_METRICS), num_nodes, num_seconds), np.float32)
    period, seconds = generator.uniform(10, 40), np.arange(num_seconds)
    phase = generator.uniform(0, 1)
    dip = np.clip(2 * np.cos(2 * math.pi * (seconds / period + phase)), 0, 1)  # a third of each iteration
    for place, metric in enumerate(ALL_METRICS):
        level, depth, _ = _LEVELS[metric.name]
        offsets = generator.normal(0, _OFFSET, (num_nodes, 1))
        values[place] = level - depth * dip + offsets + _ar1(generator, num_nodes, num_seconds)
        _add_spikes(generator, values[place])
    _add_jitters(generator, values, settings.num_jitters)
    _add_habits(generator, values)
    fault = _add_fault(generator, values) if settings.has_fault else None
    np.clip(values, 0, 1, out=values)
    scales = np.array([_scale(metric) for metric in ALL_METRICS], np.float32)
    samples = NodeSamples(
        tuple(f"node{node}" for node in range(num_nodes)),
        ("train",) * num_nodes,
        ALL_METRICS,
        (values * scales[:, None, None]).transpose(1, 2, 0),
        np.zeros((num_nodes, num_seconds), np.int32),
    )
    return SimulatedTask(samples, fault)


def with_metrics(samples: NodeSamples, metrics: tuple[NodeMetric, ...]) -> NodeSamples:
    """Return the samples of some metrics, in the order given."""
    places = [samples.metrics.index(metric) for metric in metrics]
    return NodeSamples(
        samples.nodes, samples.roles, metrics, samples.values[:, :, places], samples.phases, samples.start
    )


def _scale(metric: NodeMetric) -> float:
    return 1e9 if metric.name == "disk_rate" else _FULL_SCALE[metric.unit]


def _ar1(generator: np.random.Generator, num_nodes: int, num_seconds: int) -> np.ndarray:
    """Return AR(1) noise of a standard deviation of _NOISE, [num_nodes, num_seconds]."""
    noise = generator.standard_normal((num_seconds, num_nodes), np.float32)
    noise[1:] *= math.sqrt(1 - _CORRELATION**2)
    for second in range(1, num_seconds):
        noise[second] += _CORRELATION * noise[second - 1]
    return _NOISE * noise.T


def _add_spikes(generator: np.random.Generator, values: np.ndarray) -> None:
    number = generator.poisson(_SPIKES_PER_SECOND * values.size)
    nodes, seconds = generator.integers(values.shape[0], size=number), generator.integers(values.shape[1], size=number)
    values[nodes, seconds] += generator.choice([-1, 1], number) * generator.uniform(0.2, 0.6, number)


def _add_jitters(generator: np.random.Generator, values: np.ndarray, number: int) -> None:
    _, num_nodes, num_seconds = values.shape
    for _ in range(number):
        node, length = generator.integers(num_nodes), int(generator.uniform(5, 60))
        since = generator.integers(num_seconds - length)
        shift = generator.choice([-1, 1]) * generator.uniform(0.2, 0.6)
        for place in generator.choice(len(PUBLISHED_METRICS), generator.integers(1, 4), replace=False):
            values[place, node, since : since + length] += shift


def _add_habits(generator: np.random.Generator, values: np.ndarray) -> None:
    """Let single nodes differ for minutes in the metrics that are not compared: logs, caches, uploads."""
    _, num_nodes, num_seconds = values.shape
    for place in range(len(PUBLISHED_METRICS), len(ALL_METRICS)):
        for _ in range(generator.poisson(0.2)):
            node, length = generator.integers(num_nodes), int(generator.uniform(120, min(900, num_seconds)))
            since = generator.integers(num_seconds - length + 1)
            values[place, node, since : since + length] += generator.uniform(0.2, 0.5)


def _add_fault(generator: np.random.Generator, values: np.ndarray) -> SimulatedFault:
    _, num_nodes, num_seconds = values.shape
    shares = np.array(list(FAULT_SHARES.values()))
    kind = str(generator.choice(list(FAULT_SHARES), p=shares / shares.sum()))
    node, length = int(generator.integers(num_nodes)), int(generator.uniform(180, 600))
    since = int(generator.integers(30, num_seconds - length))
    until = since + length
    ramp, severity = np.clip(np.arange(1, length + 1) / _RAMP_S, 0, 1), generator.uniform(*_SEVERITY)
    shown = tuple(name for name, chance in _SHOWS[kind].items() if generator.random() < chance)
    for name in shown:
        part = values[PUBLISHED_ORDER.index(name), node, since:until]
        noise = generator.normal(0, _NOISE / 4, length)
        part[:] = (1 - severity * ramp) * part + severity * ramp * (_LEVELS[name][2] + noise)
    # Group effect: nodes that wait for this one use their GPUs less, after a while.
    group = generator.choice(num_nodes, max(1, num_nodes // (12 if kind == "pcie_downgrade" else 50)), replace=False)
    begin = min(since + _GROUP_DELAY_S, until)
    for name in _GPU:
        values[PUBLISHED_ORDER.index(name), group[group != node], begin:until] *= 0.8
    return SimulatedFault(kind, node, since, until, shown)
