"""Precision and recall of the detector of faulty nodes by its default settings, and of other methods, on simulated tasks.

    python benchmarks/faulty_nodes.py [--json] [--tiny] [--nodes 1500] [--tasks 150] [--healthy 10] [--jobs 1] [--methods ...]

SIMULATED: node_faults/simulation.py makes up every sample. The figures depend on that generator and do not reproduce
the paper's (precision 0.904, recall 0.883, F1 0.893 on 150 faults of a cluster). A task lasts 900 s and has one fault of
180 to 600 s, or none. Seeds are 6000 and following; the defaults were chosen on seeds 3000 to 3060. An alert for the wrong
node counts as a false positive and a false negative, one on a healthy task as a false positive. `recall_bound` is the share
of faults that show in any metric. `precision_interval` and `recall_interval` are Wilson's of 95 %, `f1_interval` is a
bootstrap over tasks, `seconds` are of CPU a decision. `golden`: the specification's own toy simulator, without a denoiser.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from multiprocessing import get_context
from typing import Any, NamedTuple

import numpy as np
import options
import torch
from node_faults.baselines import detect_by_mahalanobis, detect_concatenated
from node_faults.simulation import ALL_METRICS, PUBLISHED_METRICS, TaskSettings, simulate, with_metrics

from megatron_dapo.nodes.denoiser import Denoiser, reference_denoisers
from megatron_dapo.nodes.detection import DetectorSettings, detect
from megatron_dapo.nodes.samples import NodeMetric, NodeSamples

GOLDEN = {"continuity 120 s": (1.00, 0.97), "continuity 240 s": (1.00, 0.75), "without continuity": (0.07, None)}
FIRST_SEED = 6000
DEFAULT = DetectorSettings()
Method = Callable[[NodeSamples, Mapping[str, Denoiser]], str | None]  # returns a node's name


def ours(
    settings: DetectorSettings, metrics: tuple[NodeMetric, ...] = PUBLISHED_METRICS, denoised: bool = True
) -> Method:
    """Return the package's detector as a method."""

    def method(samples: NodeSamples, denoisers: Mapping[str, Denoiser]) -> str | None:
        alert = detect(with_metrics(samples, metrics), settings, denoisers if denoised else None)
        return None if alert is None else alert.node

    return method


def concatenated(samples: NodeSamples, denoisers: Mapping[str, Denoiser]) -> str | None:
    """Return the node with the largest distance over all seven metrics together."""
    found = detect_concatenated(with_metrics(samples, PUBLISHED_METRICS), DEFAULT, denoisers)
    return None if found is None else samples.nodes[found.node]


def mahalanobis(samples: NodeSamples, denoisers: Mapping[str, Denoiser]) -> str | None:
    """Return the outlier by the Mahalanobis distance of moments."""
    found = detect_by_mahalanobis(with_metrics(samples, PUBLISHED_METRICS), DEFAULT)
    return None if found is None else samples.nodes[found.node]


METHODS: dict[str, Method] = {
    "default": ours(DEFAULT),
    "continuity 240 s": ours(replace(DEFAULT, continuity_s=240)),
    "without continuity": ours(replace(DEFAULT, continuity_s=1)),
    "threshold 5": ours(replace(DEFAULT, threshold=5.0)),
    "nodes that deviate together": ours(replace(DEFAULT, group_s=0)),
    "raw": ours(DEFAULT, denoised=False),
    "all metrics": ours(DEFAULT, ALL_METRICS),
    "all metrics in one distance": concatenated,
    "mahalanobis": mahalanobis,
    "manhattan": ours(replace(DEFAULT, distance="manhattan")),
    "chebyshev": ours(replace(DEFAULT, distance="chebyshev")),
}


class Decision(NamedTuple):
    """What a method said about a task."""

    named: str | None
    faulty: str | None
    seconds: float  # CPU seconds


def row_of(decisions: Sequence[Decision]) -> dict[str, Any]:
    """Return precision, recall and F1 with intervals, and seconds a decision; precision is 0 without any alert."""
    right = np.array([one.named is not None and one.named == one.faulty for one in decisions])
    false = np.array([one.named is not None and one.named != one.faulty for one in decisions])
    missed = np.array([one.faulty is not None and one.named != one.faulty for one in decisions])
    drawn = np.random.default_rng(0).integers(len(decisions), size=(4000, len(decisions)))
    resampled = [f1_of(*(int(kind[places].sum()) for kind in (right, false, missed))) for places in drawn]
    num_right, num_false, num_missed = int(right.sum()), int(false.sum()), int(missed.sum())
    seconds = [one.seconds for one in decisions]
    return {
        "precision": num_right / max(1, num_right + num_false),
        "recall": num_right / max(1, num_right + num_missed),
        "f1": f1_of(num_right, num_false, num_missed),
        "precision_interval": options.wilson_interval(num_right, num_right + num_false),
        "recall_interval": options.wilson_interval(num_right, num_right + num_missed),
        "f1_interval": [float(bound) for bound in np.quantile(resampled, (0.025, 0.975))],
        "right": num_right,
        "false_alerts": num_false,
        "missed": num_missed,
        "seconds": sum(seconds) / len(seconds),
        "slowest_seconds": max(seconds),
    }


def f1_of(num_right: int, num_false: int, num_missed: int) -> float:
    """Return the harmonic mean of precision and recall; 0 if nothing is right."""
    return 2 * num_right / max(1, 2 * num_right + num_false + num_missed)


@cache
def loaded_denoisers() -> Mapping[str, Denoiser]:
    """Return the denoisers, read once a process."""
    torch.set_num_threads(1)
    return reference_denoisers()


def decide(settings: TaskSettings, methods: Sequence[str], seed: int) -> tuple[str, bool, list[Decision]]:
    """Return a task's description, whether its fault shows in any metric, and each method's decision."""
    denoisers = loaded_denoisers()
    task = simulate(settings, seed)
    fault, decisions = task.fault, []
    for name in methods:
        start = time.process_time()
        named = METHODS[name](task.samples, denoisers)
        seconds = time.process_time() - start
        decisions.append(Decision(named, None if fault is None else task.samples.nodes[fault.node], seconds))
    return f"task {seed}: {fault}: {decisions[0].named}", fault is not None and bool(fault.metrics), decisions


def measure(
    tasks: Iterable[tuple[str, bool, list[Decision]]], methods: Sequence[str], report: Callable[[str], None]
) -> tuple[int, dict[str, dict[str, Any]]]:
    """Return how many faults show in any metric, and a row for each method."""
    num_shown, decisions = 0, []
    for text, is_shown, of_task in tasks:
        num_shown += is_shown
        decisions.append(of_task)
        report(text)
    return num_shown, {name: row_of(column) for name, column in zip(methods, zip(*decisions), strict=True)}


def main() -> None:
    parser = options.parser("Precision and recall of the detector of faulty nodes, simulated.", "few nodes and tasks")
    parser.add_argument("--nodes", type=int, default=1500, help="nodes of a task")
    parser.add_argument("--tasks", type=int, default=150, help="tasks with a fault")
    parser.add_argument("--healthy", type=int, default=10, help="tasks without one")
    parser.add_argument("--jitters", type=int, default=18, help="disturbances a task that are no fault")
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED, help="of the tasks; each has the next one")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[], help="next to the default one")
    parser.add_argument("--progress", action="store_true", help="print a line a task to stderr")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.nodes, arguments.tasks, arguments.healthy, arguments.methods = 40, 6, 1, list(METHODS)

    def report(line: str) -> None:
        if arguments.progress:
            print(line, file=sys.stderr, flush=True)

    methods = ["default", *(name for name in arguments.methods if name != "default")]
    faulty = TaskSettings(num_nodes=arguments.nodes, num_jitters=arguments.jitters)
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.tasks + arguments.healthy)
    with get_context("spawn").Pool(arguments.jobs) as pool:
        with_fault = pool.imap(partial(decide, faulty, methods), seeds[: arguments.tasks])
        healthy = pool.imap(partial(decide, replace(faulty, has_fault=False), methods), seeds[arguments.tasks :])
        num_shown, rows = measure(chain(with_fault, healthy), methods, report)
    result = {
        "simulated": True,
        **rows["default"],
        "num_nodes": arguments.nodes,
        "num_tasks": arguments.tasks,
        "num_healthy": arguments.healthy,
        "num_jitters": arguments.jitters,
        "first_seed": arguments.first_seed,
        "recall_bound": num_shown / max(1, arguments.tasks),
        "golden": {name: {"precision": golden[0], "recall": golden[1]} for name, golden in GOLDEN.items()},
        "rows": rows,
    }
    options.show(result, arguments)


if __name__ == "__main__":
    main()
