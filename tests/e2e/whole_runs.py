"""Starting the command in separate processes, with a deadline."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.options import NO_EVALUATION

ROOT = Path(__file__).resolve().parents[2]
RUN_TIMEOUT_S = 400.0
COMMAND_TIMEOUT_S = 400.0

# Equal steps, so that runs in other layouts or with a resume are compared step by step.
STEADY = (
    "optimizer.schedule=constant",
    "optimizer.warmup_steps=0",
    "optimizer.learning_rate=1e-4",
    "rollout.oversample=1.0",
    "rollout.max_staleness=0",
    *NO_EVALUATION,
)
THREE_STEPS = ("value_pretraining.min_steps=2", "value_pretraining.max_steps=3", "value_pretraining.loss_slope=0")


@dataclass(frozen=True)
class Outcome:
    """Exit code and terminal output of a command."""

    code: int
    lines: tuple[str, ...]

    @property
    def last(self) -> str:
        return self.lines[-1] if self.lines else ""

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


def run_command(
    *arguments: str,
    limit: Callable[[], None] | None = None,
    timeout_s: float = COMMAND_TIMEOUT_S,
    packages: Sequence[Path] = (),
) -> Outcome:
    """`megatron-dapo ARGUMENTS` to its end, both outputs in one.

    `limit` is called in the new process at first. `packages`: directories of optional ones, after the checkout on its path.
    """
    command = [sys.executable, "-W", "ignore", "-m", "megatron_dapo.cli.main", *arguments]
    python_path = os.pathsep.join(map(str, (ROOT, *packages)))
    environment = {**os.environ, "PYTHONPATH": python_path, "OMP_NUM_THREADS": "1", "COLUMNS": "1000"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, text=True, preexec_fn=limit
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
    return Outcome(process.returncode, tuple(line for line in output.splitlines() if line.strip()))


def train(
    recipe: Path, directory: Path, layout: str, *overrides: str, limit: Callable[[], None] | None = None
) -> Outcome:
    """`megatron-dapo train` to its end; `layout` "" leaves it to the recipe."""
    arguments = [
        str(recipe),
        *(["--layout", layout] if layout else []),
        "--output-dir",
        str(directory),
        *sets(overrides),
    ]
    return run_command("train", *arguments, limit=limit)


def pretrain(recipe: Path, directory: Path, *overrides: str) -> Outcome:
    """`megatron-dapo pretrain-value` at TP2 to its end, three steps from the start."""
    chosen = sets([*THREE_STEPS, *NO_EVALUATION, *overrides])
    return run_command("pretrain-value", str(recipe), "--layout", "tp2", "--output-dir", str(directory), *chosen)


def sets(overrides: Sequence[str]) -> list[str]:
    """`--set` for each."""
    return [part for override in overrides for part in ("--set", override)]


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The records of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def trained_responses(directory: Path) -> list[tuple[Any, ...]]:
    """Return (train_step, sample_id, prompt_id, response_ids) of each trained response, in order."""
    names = ("train_step", "sample_id", "prompt_id", "response_ids")
    return [tuple(record[name] for name in names) for record in lines_of(directory / "samples.jsonl")]


def checkpoint_names(directory: Path) -> list[str]:
    """Return the names in a run's checkpoint directory."""
    checkpoints = directory / "checkpoints"
    return sorted(entry.name for entry in checkpoints.iterdir()) if checkpoints.is_dir() else []
