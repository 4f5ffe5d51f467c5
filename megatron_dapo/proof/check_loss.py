"""`megatron-dapo check-loss`: the gradient of a policy loss under every layout, cut, packing and aggregation, against
a plain model.

The command starts its processes, unless it runs under torchrun or srun: then the launcher's ranks are the world, and
rank 0 prints. With CUDA each process takes one device (NCCL), otherwise the CPU (gloo).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_dapo.launch.environment import process_environment
from megatron_dapo.launch.local import launch_workers
from megatron_dapo.proof.losses import PROOF_LOSSES
from megatron_dapo.telemetry.terminal import quiet_libraries

WORKER = "megatron_dapo.proof.check_loss"
# Largest relative difference that rounding explains: fp32 sums in another order; bf16 weights and activations.
TOLERANCES = {"float32": 1e-5, "bfloat16": 5e-2}


@dataclass(frozen=True)
class LossCheckRow:
    """One comparison of gradients and loss with the plain model."""

    layout: str
    micro_batch: str
    packing: str
    aggregation: str
    num_micro_batches: int  # micro-batches per data-parallel rank
    rel_diff: float  # difference of the gradients, see `GradientDifference`
    worst_tensor: str
    loss_rel_diff: float  # difference of the loss


@dataclass(frozen=True)
class CheckLossReport:
    num_processes: int
    dtype: str
    tolerance: float
    rows: tuple[LossCheckRow, ...]
    skipped: tuple[Mapping[str, str], ...]  # {"layout", "reason"}
    seconds: float

    @property
    def max_rel_diff(self) -> float:
        """Largest relative difference of gradients; the largest float if nothing was compared."""
        # A comparison of nothing proves nothing; JSON has no infinity.
        return max((row.rel_diff for row in self.rows), default=sys.float_info.max)

    @property
    def passed(self) -> bool:
        return self.max_rel_diff <= self.tolerance

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-serializable object; the figures come first."""
        return {
            "max_rel_diff": self.max_rel_diff,
            "max_loss_rel_diff": max((row.loss_rel_diff for row in self.rows), default=sys.float_info.max),
            "passed": self.passed,
            "tolerance": self.tolerance,
            "num_processes": self.num_processes,
            "num_layouts": len({row.layout for row in self.rows}),
            "num_comparisons": len(self.rows),
            "dtype": self.dtype,
            "seconds": round(self.seconds, 1),
            "rows": [asdict(row) for row in self.rows],
            "skipped": [dict(entry) for entry in self.skipped],
        }


def print_report(report: CheckLossReport, console: Console | None = None) -> None:
    """Print a row a layout, a column an aggregation (largest over cuts and packings), and the result."""
    console = console or Console()
    names = list(dict.fromkeys(row.aggregation for row in report.rows))
    table = Table(title=f"Largest relative difference of gradients, {report.num_processes} processes, {report.dtype}")
    for heading in ("layout", *names, "worst cut"):
        table.add_column(heading)
    for layout in dict.fromkeys(row.layout for row in report.rows):
        rows = [row for row in report.rows if row.layout == layout]
        worst = max(rows, key=lambda row: row.rel_diff)
        cells = [f"{_largest(rows, name):.1e}" for name in names]
        table.add_row(layout, *cells, f"{worst.packing}, micro-batch {worst.micro_batch}, {worst.worst_tensor}")
    console.print(table)
    for entry in report.skipped:
        console.print(f"not run: {entry['layout']}: {entry['reason']}")
    relation = "within" if report.passed else "ABOVE"
    console.print(
        f"{len(report.rows)} comparisons in {report.seconds:.0f} s: largest relative difference "
        f"{report.max_rel_diff:.2e}, "
        f"{relation} the tolerance {report.tolerance:g}"
    )


def _largest(rows: Sequence[LossCheckRow], aggregation: str) -> float:
    return max(row.rel_diff for row in rows if row.aggregation == aggregation)


def run_check_loss(
    num_processes: int = 4, *, model: str | None = None, dtype: str = "float32", loss: str = "ppo_clip"
) -> CheckLossReport:
    """Check on `num_processes` local processes, or on the processes of the launcher, all of which call it.

    model: a Hugging Face directory, None for a small random model. loss: a key of PROOF_LOSSES. Raises ValueError for settings that make no sense
    and RuntimeError if a process fails (its own output says why).
    """
    if dtype not in TOLERANCES:
        raise ValueError(f"check-loss: dtype {dtype!r} is unknown; choose one of {', '.join(TOLERANCES)}")
    if loss not in PROOF_LOSSES:
        raise ValueError(f"check-loss: loss {loss!r} is unknown; choose one of {', '.join(PROOF_LOSSES)}")
    if num_processes < 1:
        raise ValueError(f"check-loss: {num_processes} processes; at least 1 is needed")
    if model is not None and not (Path(model) / "config.json").is_file():
        raise ValueError(f"check-loss: {model} holds no config.json; give a Hugging Face model directory")
    directory = str(Path(model).resolve()) if model else ""
    start = time.monotonic()
    # More than one: torchrun or srun has started this process as a rank.
    launched = process_environment().world_size
    if launched > 1:
        # Imported here: only processes that compute load megatron-core.
        from megatron_dapo.proof.worker import join_and_check

        result = join_and_check(directory, dtype, loss)
    else:
        result = _start_and_check(directory, dtype, num_processes, loss)
    return CheckLossReport(
        num_processes=launched if launched > 1 else num_processes,
        dtype=dtype,
        tolerance=TOLERANCES[dtype],
        rows=tuple(LossCheckRow(**row) for row in result["rows"]),
        skipped=tuple(result["skipped"]),
        seconds=time.monotonic() - start,
    )


def _start_and_check(model: str, dtype: str, num_processes: int, loss: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="check-loss-") as name:
        directory = Path(name)
        result_file = directory / "result.json"
        arguments = [str(result_file), dtype, loss, *([model] if model else [])]
        if sys.stderr.isatty():  # rank 0 then writes a line a layout
            print(f"comparing gradients: starting {num_processes} process{'' if num_processes == 1 else 'es'}", file=sys.stderr)
        code = launch_workers(WORKER, arguments, num_processes, directory)
        if code or not result_file.exists():
            raise RuntimeError(f"check-loss: a process failed (exit code {code}); its output above says why")
        return json.loads(result_file.read_text())


def check_loss(
    num_processes: int = 4,
    json_output: bool = False,
    model: str | None = None,
    dtype: str = "float32",
    loss: str = "ppo_clip",
) -> int:
    """Run the check and print a table or one JSON object. Returns exit code 0 within the tolerance, 1 above it, 2 if the
    check could not run."""
    try:
        report = run_check_loss(num_processes, model=model, dtype=dtype, loss=loss)
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if process_environment().rank == 0:
        if json_output:
            print(json.dumps(report.to_json()))
        else:
            print_report(report)
    return 0 if report.passed else 1


def _run_worker(result_file: str, dtype: str, loss: str, model: str = "") -> None:
    # Standard output belongs to the one object that the command prints.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    quiet_libraries()
    from megatron_dapo.proof.worker import run_worker

    run_worker(result_file, model, dtype, loss)


if __name__ == "__main__":
    _run_worker(*sys.argv[1:])
