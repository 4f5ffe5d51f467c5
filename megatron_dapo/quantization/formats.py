"""Formats of quantized checkpoints: ModelOpt's recipe, required sizes and devices, and tolerances.

Every matrix of the decoder layers is quantized; embedding, output matrix and norms are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tolerance:
    """Largest accepted change of the log-probs of fixed sequences (nats) and of their perplexity (share)."""

    mean_abs: float
    max_abs: float
    perplexity: float


@dataclass(frozen=True)
class Format:
    """One format. `recipe` is ModelOpt's name for it; `row_multiple` and `column_multiple` divide every matrix."""

    name: str
    recipe: str
    scheme: str
    row_multiple: int
    column_multiple: int
    calibration_device: str  # "any" or "cuda"
    engine: str  # minimum GPU on which SGLang 0.5.17 serves it; empty: SGLang cannot read it
    tolerance: Tolerance


_EIGHT_BITS = Tolerance(mean_abs=0.05, max_abs=3.0, perplexity=0.02)
_FOUR_BITS = Tolerance(mean_abs=0.2, max_abs=6.0, perplexity=0.1)

FORMATS: Mapping[str, Format] = {
    entry.name: entry
    for entry in (
        Format(
            name="fp8",
            recipe="FP8_DEFAULT_CFG",
            scheme="e4m3, one scale a matrix and one of its inputs (calibrated)",
            row_multiple=16,
            column_multiple=16,
            calibration_device="any",
            engine="a GPU of compute capability 8.9 or more",
            tolerance=_EIGHT_BITS,
        ),
        Format(
            name="fp8_blockwise",
            recipe="FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG",
            scheme="e4m3, a power of two a 128 x 128 block; inputs 1 x 128 at run time",
            row_multiple=128,
            column_multiple=128,
            calibration_device="any",
            engine="a GPU of compute capability 8.0 or more",
            tolerance=_EIGHT_BITS,
        ),
        Format(
            name="int4_awq",
            recipe="INT4_AWQ_CFG",
            scheme="4-bit integers, a scale for 128 of a row, scaled inputs (AWQ)",
            row_multiple=2,
            column_multiple=128,
            calibration_device="any",
            engine="",
            tolerance=_FOUR_BITS,
        ),
        Format(
            name="nvfp4",
            recipe="NVFP4_DEFAULT_CFG",
            scheme="e2m1, an e4m3 scale for 16 of a row, one scale a matrix and one of its inputs",
            row_multiple=16,
            column_multiple=16,
            calibration_device="cuda",
            engine="a GPU of compute capability 8.0 or more",
            tolerance=_FOUR_BITS,
        ),
    )
}


def format_of(name: str) -> Format:
    """Return a format by name. Raises ValueError that lists the names."""
    if name not in FORMATS:
        raise ValueError(f"unknown format {name!r}, choose one of {', '.join(FORMATS)}")
    return FORMATS[name]


def check_device(entry: Format, device: torch.device) -> None:
    """Raise ValueError if ModelOpt cannot calibrate the format on the device."""
    if entry.calibration_device not in ("any", device.type):
        raise ValueError(
            f"format {entry.name}: ModelOpt rounds to it with kernels for {entry.calibration_device}, and the device is "
            f"{device.type}; run it there, or choose one of "
            f"{', '.join(name for name, other in FORMATS.items() if other.calibration_device == 'any')}"
        )


def check_shapes(entry: Format, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ValueError that names the first matrix [rows, columns] the format cannot hold, and the multiple."""
    for name, sizes in shapes.items():
        multiples = (entry.row_multiple, entry.column_multiple)
        for what, size, multiple in zip(("rows", "columns"), sizes, multiples, strict=True):
            if size % multiple:
                raise ValueError(
                    f"format {entry.name}: {name} has {size} {what}, which is no multiple of {multiple}; "
                    "choose another format"
                )
