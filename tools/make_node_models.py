"""Train the denoisers of megatron_dapo/nodes/reference.json on simulated normal data.

    python -m tools.make_node_models [OUTPUT] [--json] [--steps 2000] [--tiny]

They let a run look for faulty nodes before it has any data of its own. Nothing in them was measured on a real node.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from megatron_dapo.nodes.comparison import min_max
from megatron_dapo.nodes.denoiser import ANY_METRIC, REFERENCE, WINDOW, fit, to_json

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from node_faults.simulation import ALL_METRICS, TaskSettings, simulate

SEEDS = range(1000, 1004)  # the benchmark's tasks have others


def normal_windows(num_nodes: int) -> dict[str, np.ndarray]:
    """Return windows of healthy tasks by metric, [num, WINDOW], scaled to [0, 1]."""
    found: dict[str, list[np.ndarray]] = {metric.name: [] for metric in ALL_METRICS}
    for seed in SEEDS:
        samples = simulate(TaskSettings(num_nodes=num_nodes, num_seconds=600, has_fault=False), seed).samples
        for place, metric in enumerate(samples.metrics):
            scaled, _ = min_max(samples.values[:, :, place])
            found[metric.name].append(np.lib.stride_tricks.sliding_window_view(scaled, WINDOW, axis=1))
    return {name: np.concatenate([part.reshape(-1, WINDOW) for part in parts]) for name, parts in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the reference denoisers of the nodes' metrics.")
    parser.add_argument("output", nargs="?", type=Path, default=REFERENCE)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--tiny", action="store_true", help="few nodes and steps: checks the program")
    parser.add_argument("--steps", type=int, default=2000, help="train steps of each model")
    arguments = parser.parse_args()
    num_nodes, num_steps = (8, 20) if arguments.tiny else (100, arguments.steps)
    rows = normal_windows(num_nodes)
    rows[ANY_METRIC] = np.concatenate(list(rows.values()))
    denoisers, errors = {}, {}
    for name, part in rows.items():
        denoisers[name], errors[name] = fit(part, num_steps=num_steps)
        if not arguments.json:
            print(f"{name:24} mean squared error {errors[name]:.2e}", flush=True)
    notes = {"data": "simulated", "num_steps": num_steps, "mean_squared_error": errors}
    arguments.output.write_text(to_json(denoisers, notes), encoding="utf-8")
    if arguments.json:
        print(json.dumps({"output": str(arguments.output), **notes}))


if __name__ == "__main__":
    main()
