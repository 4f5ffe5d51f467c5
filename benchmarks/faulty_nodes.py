"""Precision and recall of the detector of faulty nodes, and of its parts, on simulated tasks.

    python benchmarks/faulty_nodes.py [--json] [--tiny] [--nodes 1500] [--tasks 9] [--healthy 2] [--jitters 18 ...]

SIMULATED: node_faults/simulation.py makes up every sample. The figures depend on that generator and do not reproduce
the paper's (precision 0.904, recall 0.883); only orderings are compared. A task lasts 900 s and has one fault of 180 to
600 s, or none; seeds are 0, 1, ... An alert for the wrong node counts as a false positive and a false negative, one on
a healthy task as a false positive. `golden`: the specification's own toy simulator, which needs no denoiser. A
continuity of 4 minutes cannot find a shorter fault: `recall_bound` is the share of faults that last as long and show in
any metric.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import options
from node_faults.baselines import detect_by_mahalanobis, detect_concatenated
from node_faults.simulation import ALL_METRICS, PUBLISHED_METRICS, TaskSettings, simulate, with_metrics

from megatron_dapo.nodes.denoiser import Denoiser, reference_denoisers
from megatron_dapo.nodes.detection import DetectorSettings, detect
from megatron_dapo.nodes.samples import NodeMetric, NodeSamples

GOLDEN = {"continuity 120 s": (1.00, 0.97), "continuity 240 s": (1.00, 0.75), "without continuity": (0.07, None)}
FOUR, TWO, NONE = (DetectorSettings(continuity_s=seconds) for seconds in (240, 120, 1))
ALL_CANDIDATES = replace(FOUR, all_candidates=True)
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
    found = detect_concatenated(with_metrics(samples, PUBLISHED_METRICS), FOUR, denoisers)
    return None if found is None else samples.nodes[found.node]


def mahalanobis(samples: NodeSamples, denoisers: Mapping[str, Denoiser]) -> str | None:
    """Return the outlier by the Mahalanobis distance of moments."""
    found = detect_by_mahalanobis(with_metrics(samples, PUBLISHED_METRICS), FOUR)
    return None if found is None else samples.nodes[found.node]


METHODS: dict[str, Method] = {
    "continuity 240 s": ours(FOUR),
    "continuity 240 s, all candidates": ours(ALL_CANDIDATES),
    "continuity 120 s": ours(TWO),
    "continuity 120 s, all candidates": ours(replace(TWO, all_candidates=True)),
    "without continuity": ours(NONE),
    "raw": ours(FOUR, denoised=False),
    "raw, all candidates": ours(ALL_CANDIDATES, denoised=False),
    "all metrics": ours(FOUR, ALL_METRICS),
    "all metrics in one distance": concatenated,
    "mahalanobis": mahalanobis,
    "manhattan": ours(replace(FOUR, distance="manhattan")),
    "chebyshev": ours(replace(FOUR, distance="chebyshev")),
}
SHIPPED = ("continuity 240 s", "continuity 240 s, all candidates")  # their seconds per decision are the result
# (better, worse) by F1, according to the paper.
ORDERINGS = {
    "with continuity above without": ("continuity 240 s", "without continuity"),
    "denoised above raw": ("continuity 240 s", "raw"),
    "metric order above all metrics": ("continuity 240 s", "all metrics"),
    "metric order above one distance": ("continuity 240 s", "all metrics in one distance"),
    "distance above mahalanobis": ("continuity 240 s", "mahalanobis"),
}


@dataclass
class Counts:
    """Decisions of one method."""

    right: int = 0
    false_alerts: int = 0
    missed: int = 0
    seconds: float = 0.0
    slowest_s: float = 0.0

    def add(self, named: str | None, faulty: str | None, seconds: float) -> None:
        """Count one decision."""
        self.right += named is not None and named == faulty
        self.false_alerts += named is not None and named != faulty
        self.missed += faulty is not None and named != faulty
        self.seconds += seconds
        self.slowest_s = max(self.slowest_s, seconds)

    def row(self, num_decisions: int) -> dict[str, float]:
        """Return precision, recall, F1 and seconds a decision; precision is 0 without any alert."""
        precision = self.right / max(1, self.right + self.false_alerts)
        recall = self.right / max(1, self.right + self.missed)
        return {
            "precision": precision,
            "recall": recall,
            "f1": 2 * precision * recall / max(1e-9, precision + recall),
            "right": self.right,
            "false_alerts": self.false_alerts,
            "missed": self.missed,
            "seconds": self.seconds / num_decisions,
            "slowest_seconds": self.slowest_s,
        }


def measure(
    settings: TaskSettings, num_tasks: int, num_healthy: int, methods: Sequence[str], report: Callable[[str], None]
) -> dict[str, Any]:
    """Return the rows of `methods` on the same tasks, and how many of their faults can be found at all."""
    denoisers = reference_denoisers()
    counts = {name: Counts() for name in methods}
    lasting = dict.fromkeys((120, 240), 0)
    for seed in range(num_tasks + num_healthy):
        task = simulate(replace(settings, has_fault=seed < num_tasks), seed)
        fault = task.fault
        faulty = None if fault is None else task.samples.nodes[fault.node]
        for seconds in lasting:
            lasting[seconds] += fault is not None and fault.until - fault.since >= seconds and bool(fault.metrics)
        for name in methods:
            start = time.process_time()
            named = METHODS[name](task.samples, denoisers)
            counts[name].add(named, faulty, time.process_time() - start)
        report(f"task {seed}: {fault}")
    rows = {name: each.row(num_tasks + num_healthy) for name, each in counts.items()}
    bounds = {f"continuity {seconds} s": number / max(1, num_tasks) for seconds, number in lasting.items()}
    return {"num_jitters": settings.num_jitters, "recall_bound": bounds, "rows": rows}


def main() -> None:
    parser = options.parser("Precision and recall of the detector of faulty nodes, simulated.", "few nodes and tasks")
    parser.add_argument("--nodes", type=int, default=1500, help="nodes of a task")
    parser.add_argument("--tasks", type=int, default=9, help="tasks with a fault")
    parser.add_argument("--healthy", type=int, default=2, help="tasks without one")
    parser.add_argument("--jitters", type=int, nargs="+", default=[18], help="disturbances a task, e.g. 18 150")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="subset to compare")
    parser.add_argument("--progress", action="store_true", help="print a line a task to stderr")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.nodes, arguments.tasks, arguments.healthy, arguments.jitters = 40, 4, 1, [18]

    def report(line: str) -> None:
        if arguments.progress:
            print(line, file=sys.stderr, flush=True)

    results = []
    for num_jitters in arguments.jitters:
        settings = TaskSettings(num_nodes=arguments.nodes, num_jitters=num_jitters)
        found = measure(settings, arguments.tasks, arguments.healthy, arguments.methods, report)
        rows = found["rows"]
        found["orderings"] = {
            name: rows[better]["f1"] > rows[worse]["f1"]
            for name, (better, worse) in ORDERINGS.items()
            if better in rows and worse in rows
        }
        results.append(found)
    result = {
        "simulated": True,
        "num_nodes": arguments.nodes,
        "num_tasks": arguments.tasks,
        "num_healthy": arguments.healthy,
        "seconds": max(row["seconds"] for found in results for name, row in found["rows"].items() if name in SHIPPED),
        "golden": {name: {"precision": golden[0], "recall": golden[1]} for name, golden in GOLDEN.items()},
        "results": results,
    }
    options.show(result, arguments)


if __name__ == "__main__":
    main()
