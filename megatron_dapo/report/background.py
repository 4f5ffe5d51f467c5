"""The report of a live run, written by a separate process: training neither waits for it nor fails with it.

rank 0: Files.run(start_writing, ...) -> file process: starts `python -m megatron_dapo.report` and answers at once
This module imports only the standard library.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPORT = "report.html"
_ROOT = Path(__file__).resolve().parents[2]


def start_writing(run_directory: Path) -> None:
    """Start writing the report of a live run, without waiting for it.

    The file is replaced atomically, so overlapping writers leave one whole report. Raises OSError if no process starts.
    """
    _start(run_directory, "--live")


def write_last(run_directory: Path, seconds: float) -> str:
    """Write the report of a run that has ended; return what went wrong in one line, or "".

    A writer that takes longer than `seconds` is left to finish by itself.
    """
    process = _start(run_directory)
    try:
        _, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"not yet written after {seconds:g} s; it still may be"
    lines = errors.strip().splitlines()
    return "" if process.returncode == 0 else lines[-1] if lines else f"exit code {process.returncode}"


def _start(run_directory: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "megatron_dapo.report", str(run_directory), *options],
        cwd="/",
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH", "")]))},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        # Nobody reads the output of a process that is not waited for, and a full pipe would block it.
        stderr=subprocess.DEVNULL if options else subprocess.PIPE,
        text=True,
    )
