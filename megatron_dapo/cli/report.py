"""The report of runs as a command."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_dapo.report.background import REPORT
from megatron_dapo.report.page import write_report


def make_report(runs: Sequence[Path], references: Sequence[Path], output: Path | None) -> str:
    """Write the report of runs and return the line that says where it is. ValueError or OSError for what cannot be read.

    `output`: default report.html of the only run, else in the current directory.
    """
    target = output or (runs[0] / REPORT if len(runs) == 1 else Path(REPORT))
    target.parent.mkdir(parents=True, exist_ok=True)
    num_bytes = write_report(runs, references, target)
    return f"{target}: {num_bytes / 1e6:.2f} MB, open it in any browser"
