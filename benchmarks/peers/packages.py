"""Packages of the projects that benchmarks compare with, installed from the locks in requirements/."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def installed_packages(name: str) -> Path | None:
    """Return `.venv-NAME`, the target of `requirements/NAME-cpu-py311.txt`; None if it is missing."""
    directory = ROOT / f".venv-{name}"
    return directory if (directory / ".installed").exists() else None


def peer_packages(name: str) -> Path:
    """Return `.venv-NAME`, installed if necessary.

    The directory holds only what this interpreter's environment lacks, so both sides run on the same torch.
    """
    directory = ROOT / f".venv-{name}"
    if installed_packages(name) is None:
        lock = ROOT / "requirements" / f"{name}-cpu-py311.txt"
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps", "--upgrade"]
        # pip's own output goes to stderr: stdout is for the benchmark's JSON.
        subprocess.run([*pip, "--target", str(directory), "-r", str(lock)], check=True, stdout=sys.stderr)
        (directory / ".installed").touch()
    return directory


def with_packages(*directories: Path) -> str:
    """Return a PYTHONPATH of this project and `directories`."""
    return os.pathsep.join(map(str, (ROOT, *directories)))
