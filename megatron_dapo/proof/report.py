"""Report of `check-loss`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

# Largest relative difference that rounding explains: fp32 sums in another order; bf16 weights and activations.
TOLERANCES = {"float32": 1e-5, "bfloat16": 5e-2}


@dataclass(frozen=True)
class LossCheckRow:
    """One comparison of gradients and loss with the plain model."""

    layout: str
    micro_batch: str
    packing: str
    aggregation: str
    num_micro_batches: int  # of each data-parallel rank
    rel_diff: float  # of the gradients, see `GradientDifference`
    worst_tensor: str
    loss_rel_diff: float  # of the value of the loss


@dataclass(frozen=True)
class CheckLossReport:
    """All comparisons of one check."""

    num_processes: int
    dtype: str
    tolerance: float
    rows: tuple[LossCheckRow, ...]
    skipped: tuple[Mapping[str, str], ...]  # {"layout", "reason"}
    seconds: float

    @property
    def max_rel_diff(self) -> float:
        """Largest relative difference of gradients; the largest float if nothing was compared."""
        # Nothing compared is nothing proved; JSON has no infinity.
        return max((row.rel_diff for row in self.rows), default=sys.float_info.max)

    @property
    def passed(self) -> bool:
        """True if every comparison is within the tolerance."""
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
