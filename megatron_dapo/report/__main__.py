"""Writes report.html of one run: `python -m megatron_dapo.report RUN [--live]`, while the run trains."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from megatron_dapo.report.background import REPORT
from megatron_dapo.report.page import write_report

_NICE = 10  # lower priority than training on a busy node


def main() -> None:
    """Write the report into the run's directory."""
    run, *options = sys.argv[1:]
    if "--live" in options:
        os.nice(_NICE)
    try:
        write_report([Path(run)], [], Path(run) / REPORT, is_live="--live" in options)
    except (ValueError, OSError) as error:
        sys.exit(f"report: {error}")


if __name__ == "__main__":
    main()
