"""What a result says about where it was taken, and where it is kept."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).resolve().parents[1] / "results"
# Dense bf16 products with fp32 sums, FLOP/s, by what the device's name has in it (data sheets, SXM form).
BF16_PEAKS = {"H200": 989.4e12, "H100": 989.4e12, "A100": 312e12}


def versions(packages: Sequence[str]) -> dict[str, str]:
    found = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def machine_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()


def bf16_peak(name: str) -> float | None:
    """FLOP/s; None for a device that is not in the table."""
    return next((peak for part, peak in BF16_PEAKS.items() if part in name), None)


def report(result: dict[str, Any], as_json: bool, save: bool) -> None:
    """Print it; where it ran and is to be kept, write benchmarks/results/<benchmark>_<machine>.json."""
    print(json.dumps(result) if as_json else json.dumps(result, indent=2))
    if save and "machine" in result:
        name = result["machine"].lower().replace(" ", "_")
        path = RESULTS / f"{result['benchmark']}_{name}.json"
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
