"""Packages of the projects that benchmarks compare with, installed from the locks in requirements/."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def peer_packages(name: str) -> Path:
    """Return `.venv-NAME`, and install `requirements/NAME-cpu-py311.txt` into it if it is not there yet.

    The directory holds only what this interpreter's environment lacks, so both sides run on the same torch. `make
    .venv-NAME` does the same.
    """
    directory = ROOT / f".venv-{name}"
    installed = directory / ".installed"
    if not installed.exists():
        lock = ROOT / "requirements" / f"{name}-cpu-py311.txt"
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps", "--upgrade"]
        # pip's own output goes to stderr: stdout is for the benchmark's JSON.
        subprocess.run([*pip, "--target", str(directory), "-r", str(lock)], check=True, stdout=sys.stderr)
        installed.touch()
    return directory


def with_packages(*directories: Path) -> str:
    """Return a PYTHONPATH of this project and `directories`."""
    return os.pathsep.join(map(str, (ROOT, *directories)))
