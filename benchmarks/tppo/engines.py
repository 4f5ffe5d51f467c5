"""Engine curves: how long a tick lasts with so many responses running. Measured, published, or computed from data sheets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

CURVES = Path(__file__).resolve().parents[1] / "results" / "tppo_engine_curve.json"

Curve = Sequence[tuple[float, float]]  # (responses running, seconds or relative length of a tick), ascending


@dataclass(frozen=True)
class Gpu:
    """One GPU by its data sheet."""

    bandwidth: float  # bytes/s
    flops: float  # bf16, dense
    memory: float  # bytes


GPUS = {"H100": Gpu(3.35e12, 989e12, 80e9), "H200": Gpu(4.8e12, 989e12, 141e9)}


@dataclass(frozen=True)
class Roofline:
    """A dense model in bf16 on the GPUs of one engine, by data sheets; only `bandwidth_reached` comes from measured ticks."""

    parameters: float = 32.8e9
    context_bytes: float = 64 * 8 * 128 * 2 * 2  # keys and values of a token: layers, heads, head size, both, bf16
    gpus: int = 8
    gpu: Gpu = GPUS["H100"]
    flops_reached: float = 0.6  # share of the GPU's peak
    bandwidth_reached: float = 0.78  # share of the peak, fitted to the published ticks of two H100
    overhead: float = 2.5e-3  # seconds per tick: all-reduces, launches, sampling

    def tick(self, running: float) -> float:
        """Seconds without the reading of contexts: weights are read once, each response multiplies them."""
        read = 2 * self.parameters / self._bytes_per_second
        multiply = 2 * self.parameters * running / (self.gpus * self.flops_reached * self.gpu.flops)
        return self.overhead + max(read, multiply)

    def curve(self) -> Curve:
        """Relative to one response."""
        return [(n, self.tick(n) / self.tick(1)) for n in (1, 64, 128, 192, 256, 384, 512)]

    @property
    def context_cost(self) -> float:
        """A token of context read by one response in one tick, in ticks of one response."""
        return self.context_bytes / self._bytes_per_second / self.tick(1)

    @property
    def context_room(self) -> float:
        """Tokens of context an engine can keep: what the weights leave of 90 % of its memory."""
        return (0.9 * self.gpus * self.gpu.memory - 2 * self.parameters) / self.context_bytes

    @property
    def _bytes_per_second(self) -> float:
        return self.gpus * self.bandwidth_reached * self.gpu.bandwidth


def tick_lengths(curve: Curve, most: int) -> torch.Tensor:
    """[most + 1] tau(0..most), linear between the points of `curve` and beyond the last two; tau(0) = 0."""
    sizes, seconds = (torch.tensor(column, dtype=torch.float64) for column in zip(*curve, strict=True))
    running = torch.arange(1, most + 1, dtype=torch.float64)
    left = (torch.searchsorted(sizes, running, right=True) - 1).clamp(0, len(curve) - 2)
    slope = (seconds[left + 1] - seconds[left]) / (sizes[left + 1] - sizes[left])
    found = seconds[left] + slope * (running - sizes[left])
    return torch.cat([torch.zeros(1, dtype=torch.float64), found])


def stored_curves() -> dict[str, Curve]:
    """By name: the measured ones, relative to their first point, and the two that are computed."""
    found: dict[str, Curve] = {}
    if CURVES.is_file():
        for name, entry in json.loads(CURVES.read_text(encoding="utf-8")).items():
            one = entry["points"][0]["seconds_a_tick"]
            found[name] = [(point["running"], point["seconds_a_tick"] / one) for point in entry["points"]]
    return {**found, "roofline": Roofline().curve(), "flat": [(1, 1.0), (512, 1.0)]}
