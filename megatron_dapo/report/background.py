"""The report of a run under way, written by a process of its own: training neither waits for it nor ends with it.

rank 0: Files.run(start_writing, ...) -> file process: starts `python -m megatron_dapo.report` and answers at once
This module needs the standard library alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPORT = "report.html"
_ROOT = Path(__file__).resolve().parents[2]


def start_writing(run_directory: Path) -> None:
    """Begin to write the report of a run under way; what becomes of it is not waited for.

    Written in one step, so that two that overlap leave one of them. Raises OSError where no process can be started.
    """
    _start(run_directory, "--live")


def write_last(run_directory: Path, seconds: float) -> str:
    """Write the report of a run that has ended; return what went wrong in one line, or "".

    One that takes longer than `seconds` is left to finish by itself.
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
        # Of a process that is not waited for no reader is left, and a full pipe would hold it.
        stderr=subprocess.DEVNULL if options else subprocess.PIPE,
        text=True,
    )
