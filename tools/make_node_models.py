"""Train the denoisers of megatron_dapo/nodes/reference.json on simulated normal data.

    python -m tools.make_node_models [OUTPUT] [--json] [--steps 2000] [--tiny]

They let a run look for faulty nodes before it has any data. Nothing in them was measured on a real node.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from megatron_dapo.nodes.comparison import min_max
from megatron_dapo.nodes.denoiser import ANY_METRIC, LATENT, REFERENCE, WINDOW, Denoiser

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from node_faults.simulation import ALL_METRICS, TaskSettings, simulate

_KL_WEIGHT = 1e-5
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


def fit(rows: np.ndarray, num_steps: int) -> tuple[Denoiser, float]:
    """Return a denoiser trained on windows of normal data, and its mean squared error on held-out windows.

    rows: [num, size], scaled to [0, 1]. A call scales each metric by its extremes, so one node's fault shrinks the range
    of the others. Windows are therefore shrunk and shifted at random within [0, 1], so that the model sees all levels.
    Raises ValueError for too few rows and for NaN.
    """
    if len(rows) < 2 or rows.ndim != 2:
        raise ValueError(f"windows of the shape {rows.shape}: needs at least 2 rows to train on and to check")
    if not np.isfinite(rows).all():
        raise ValueError("windows hold NaN or infinite values: fill the gaps first")
    generator = torch.Generator().manual_seed(0)
    data = torch.from_numpy(np.ascontiguousarray(rows, np.float32))
    data = data[torch.randperm(len(data), generator=generator)]
    num_held = max(1, min(2000, len(data) // 10))
    held, data = data[:num_held], data[num_held:]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Denoiser()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / num_steps))
    )
    for _ in range(num_steps):
        batch = data[torch.randint(len(data), (min(256, len(data)),), generator=generator)]
        scale, shift = torch.rand(2, len(batch), 1, generator=generator)
        batch = batch * scale + shift * (1 - scale)
        found, divergence = model(batch, torch.randn(len(batch), LATENT, generator=generator))
        loss = (found - batch).square().mean() + _KL_WEIGHT * divergence
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval(), float((model.denoise(held) - held).square().mean())


def to_json(denoisers: Mapping[str, Denoiser], notes: Mapping[str, Any]) -> str:
    """Return denoisers by metric as JSON, weights to 5 digits, with `notes` on how they were made."""
    models = {
        name: {key: _rounded(value.tolist()) for key, value in model.state_dict().items()}
        for name, model in denoisers.items()
    }
    return json.dumps({"window": WINDOW, "notes": dict(notes), "models": models}, separators=(",", ":")) + "\n"


def _rounded(values: Any) -> Any:
    return [_rounded(value) for value in values] if isinstance(values, list) else float(f"{values:.5g}")


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
