"""Whole runs whose rollouts come from SGLang servers that the run starts itself."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.options import NO_EVALUATION, RANDOM_WEIGHTS
from tools.prove_resume import QUICKSTART

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
RUN_S = 600.0
# The first step trains the policy that was sampled from: both must give every token the same log-prob.
SETTINGS = ('rollout.engine="sglang"', *NO_EVALUATION, "mismatch.step0_max_mean_abs=1e-4")
UNTRAINED = (*RANDOM_WEIGHTS, "run.total_steps=3", "sglang.parity_interval=1")


def add_tokenizer(save_model: Callable[..., Path], directory: Path, **fields: Any) -> Path:
    """Save a model with the quickstart's tokenizer to `directory`."""
    base = QUICKSTART / "base_model"
    vocab_size = json.loads((base / "config.json").read_text())["vocab_size"]
    save_model(directory, vocab_size=vocab_size, eos_token_id=2, pad_token_id=0, **fields)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(base / name, directory / name)
    return directory


def command(recipe: Path, directory: Path, python: Path, *overrides: str, layout: str = "tp2") -> list[str]:
    """`megatron-dapo train` in `directory`, with servers of the interpreter `python`."""
    settings = (*SETTINGS, f'sglang.python="{python}"', *overrides)
    return [
        *(sys.executable, "-W", "ignore", "-m", "megatron_dapo.cli.main", "train", str(recipe)),
        *("--layout", layout, "--output-dir", str(directory)),
        *(part for setting in settings for part in ("--set", setting)),
    ]


def finish(recipe: Path, directory: Path, python: Path, *overrides: str, layout: str = "tp2") -> None:
    """Run `command` to its end."""
    started = command(recipe, directory, python, *overrides, layout=layout)
    done = subprocess.run(started, env=ENVIRONMENT, capture_output=True, text=True, timeout=RUN_S, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
