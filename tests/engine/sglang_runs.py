"""Whole runs whose rollouts come from SGLang servers that the run starts itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
RUN_S = 600.0
# The first step trains the policy that was sampled from: both must give every token the same log-prob.
SETTINGS = (
    'rollout.engine="sglang"',
    "data.eval_paths=[]",
    "evaluation.interval=0",
    "evaluation.at_start=false",
    "evaluation.at_end=false",
    "mismatch.step0_max_mean_abs=1e-4",
)


def command(recipe: Path, directory: Path, python: Path, *overrides: str, layout: str = "tp2") -> list[str]:
    """`megatron-dapo train` in `directory`, with servers of the interpreter `python`."""
    settings = (*SETTINGS, f'sglang.python="{python}"', *overrides)
    return [
        *(sys.executable, "-W", "ignore", "-m", "megatron_dapo.cli.main", "train", str(recipe)),
        *("--layout", layout, "--output-dir", str(directory)),
        *(part for setting in settings for part in ("--set", setting)),
    ]


def finish(recipe: Path, directory: Path, python: Path, *overrides: str) -> None:
    """Run `command` to its end."""
    started = command(recipe, directory, python, *overrides)
    done = subprocess.run(started, env=ENVIRONMENT, capture_output=True, text=True, timeout=RUN_S, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
