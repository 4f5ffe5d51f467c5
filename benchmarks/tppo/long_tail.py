"""A task whose responses have a long tail: seven short problems for a long one, which takes some five times their tokens."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.quickstart_task import MAX_STEPS, MIN_STEPS, Problem, draw_problems, to_row

SHORT_FOR_A_LONG_ONE = 7
NUM_TRAIN, NUM_HELDOUT = 1920, 128
SEED = 20_000  # no other set of the quickstart draws from it


def long_tail_problems(seed: int, count: int) -> list[Problem]:
    """`count` different problems; of every eight, seven have the fewest steps there are and one has the most or one less."""
    drawn = draw_problems(seed, 60 * count)
    short = iter([problem for problem in drawn if len(problem.steps) == MIN_STEPS])
    long = iter([problem for problem in drawn if len(problem.steps) >= MAX_STEPS - 1])
    every = SHORT_FOR_A_LONG_ONE + 1
    return [next(short if position % every else long) for position in range(count)]


def write_task(directory: Path) -> Sequence[str]:
    """`train.jsonl` and `heldout.jsonl`; the overrides by which a recipe trains on them."""
    directory.mkdir(parents=True, exist_ok=True)
    problems = long_tail_problems(SEED, NUM_TRAIN + NUM_HELDOUT)
    paths = {"train": directory / "train.jsonl", "eval": directory / "heldout.jsonl"}
    for path, part in zip(paths.values(), (problems[NUM_HELDOUT:], problems[:NUM_HELDOUT]), strict=True):
        path.write_text("".join(json.dumps(to_row(problem)) + "\n" for problem in part), encoding="utf-8")
    return [f'data.{name}_paths=["{path.resolve()}"]' for name, path in paths.items()]
