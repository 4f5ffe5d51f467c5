"""Check that a smoke run (examples/gpu/smoke.toml, run twice) trained, resumed, evaluated and exported.

    python -m tools.check_smoke runs/smoke-gpu [--steps 3]

Exit code 0, and one line each of what was found; 1, and what is missing.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open

MUST_BE_FINITE = ("actor/loss", "actor/grad_norm")


def records(path: Path) -> list[dict[str, Any]]:
    """Raises ValueError if the run has not written the file."""
    if not path.is_file():
        raise ValueError(f"{path} is not there: the run did not come that far")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def check(directory: Path, steps: int) -> Iterator[str]:
    """Findings, one a line. ValueError with what is missing."""
    rows = records(directory / "metrics.jsonl")
    found = [row["train_step"] for row in rows]
    # A resumed run may record a step twice.
    if sorted(set(found)) != list(range(1, steps + 1)):
        raise ValueError(f"{directory}: metrics of the steps {found}, expected 1 to {steps}")
    for name in MUST_BE_FINITE:
        values = [row.get(name) for row in rows]
        if any(value is None or not math.isfinite(value) for value in values):
            raise ValueError(f"{directory}: {name} is {values}, expected numbers at every step")
        yield f"{name}: {', '.join(f'{value:.4g}' for value in values)}"
    if not any(row["actor/grad_norm"] > 0 for row in rows):
        raise ValueError(f"{directory}: no step had a gradient: nothing was trained")
    evaluations = records(directory / "evaluations.jsonl")
    last = [row for row in evaluations if row["train_step"] == steps]
    if not last:
        raise ValueError(
            f"{directory}: no evaluation at step {steps}, only {[row['train_step'] for row in evaluations]}"
        )
    yield f"evaluation at step {steps}: {len(last)} record"
    checkpoints = sorted(path.name for path in (directory / "checkpoints").iterdir() if path.is_dir())
    if len(checkpoints) < 2:
        raise ValueError(f"{directory}: checkpoints {checkpoints}, expected those of two steps")
    yield f"checkpoints: {', '.join(checkpoints)}"
    yield f"exported: {_num_tensors(directory / 'huggingface')} tensors"


def _num_tensors(directory: Path) -> int:
    files = sorted(directory.glob("*.safetensors")) if directory.is_dir() else []
    if not files:
        raise ValueError(f"{directory}: no exported weights")
    count = 0
    for file in files:
        with safe_open(file, "pt") as stored:
            count += len(list(stored.keys()))
    return count


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args(arguments)
    try:
        for line in check(options.directory, options.steps):
            print(line)
    except (ValueError, OSError) as error:
        print(f"check_smoke: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
