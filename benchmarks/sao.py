"""SAO against GRPO and VAPO: held-out accuracy by generated tokens.

    python benchmarks/sao.py [--json] [--tiny] [--jobs 2] [--grid examples/grids/sao.toml] [--results RESULTS.jsonl]

Runs the grid by `megatron-dapo ablate`, unless --results names records of one that has run, and reads its records. Variants
share prompts, model, held-out problems and, but for what they are named after, the settings of examples/grids.

    tokens_vs_grpo        tokens that SAO has generated when its held-out accuracy, the mean over seeds and linear between
                          evaluations, first reaches GRPO's final one, over the tokens of GRPO's whole runs; null: never
    all_tokens_vs_grpo    the same with the tokens of the critic's pretraining
    seconds_vs_grpo       the same for seconds of training, the critic's pretraining included
    accuracy_difference   SAO's final accuracy minus GRPO's: mean over seeds, and Student's interval of 95 % (null: one seed)

`rows` has the same of every variant. Those of examples/grids/sao.toml are on policy, those of sao_staleness.toml up to 8 versions old.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

import options

from megatron_dapo.ablation.report import paired_difference
from megatron_dapo.ablation.runs import RESULTS, read_records

ROOT = Path(__file__).resolve().parents[1]
GRID = ROOT / "examples" / "grids" / "sao.toml"
BASELINE, SAO = "GRPO", "SAO"
TINY_RUNS = 2  # GRPO and SAO
RUNS_LEFT = 75  # exit code of ablate
TINY = (
    "run.total_steps=2",
    "evaluation.interval=1",
    "evaluation.num_samples=1",
    "value_pretraining.min_steps=2",
    "value_pretraining.max_steps=2",
)

Record = Mapping[str, Any]


def run_grid(grid: Path, directory: Path, jobs: int, is_tiny: bool) -> Path:
    """Train every variant and seed of a grid below `directory`; return the file of the records."""
    command = [*(sys.executable, "-W", "ignore", "-m", "megatron_dapo.cli.main", "ablate", str(grid.absolute()))]
    command += ["--jobs", str(jobs), "--results", str(directory)]
    if is_tiny:
        command += ["--max-runs", str(TINY_RUNS), *(part for one in TINY for part in ("--set", one))]
    code = subprocess.call(command, stdout=sys.stderr, cwd=directory, env={**os.environ, "PYTHONPATH": str(ROOT)})
    if code not in ((0, RUNS_LEFT) if is_tiny else (0,)):
        raise RuntimeError(f"megatron-dapo ablate ended with exit code {code}")
    [results] = directory.glob(f"**/{RESULTS}")
    return results


def evaluations(record: Record) -> Iterator[tuple[int, float, float, float]]:
    """Yield (train step, accuracy, tokens generated until then, seconds of training until then) of each evaluation."""
    tokens, steps = [0.0, *accumulate(record["generated_tokens"])], record["train_steps"]
    for step, accuracy in zip(record["evaluated"]["train_step"], record["evaluated"]["accuracy"], strict=True):
        yield step, accuracy, tokens[step], record["pretrain_seconds"] + record["train_seconds"] * step / steps


def curve(records: Sequence[Record]) -> list[tuple[float, float, float]]:
    """Return (accuracy, tokens, seconds) at each evaluation, means over seeds."""
    return [tuple(map(fmean, list(zip(*of_seeds))[1:])) for of_seeds in zip(*map(evaluations, records), strict=True)]  # type: ignore[misc]


def reached(points: Sequence[tuple[float, float, float]], accuracy: float) -> tuple[float, float] | None:
    """Return the tokens and seconds at which a curve first reaches an accuracy, linear between points; None if it never does."""
    if points[0][0] >= accuracy:
        return points[0][1:]
    for (low, *before), (high, *after) in zip(points, points[1:]):
        if high >= accuracy:
            share = (accuracy - low) / (high - low)
            tokens, seconds = (a + share * (b - a) for a, b in zip(before, after))
            return tokens, seconds
    return None


def row(records: Mapping[int, Record], baseline: Mapping[int, Record]) -> dict[str, Any]:
    """Return the figures of a variant against the baseline, both by seed."""
    points, (final, all_tokens, all_seconds) = curve(list(records.values())), curve(list(baseline.values()))[-1]
    found, difference = reached(points, final), paired_difference(records, baseline)
    pretraining = fmean(record["pretrain_tokens"] for record in records.values())
    assert difference is not None, "variants have common seeds"
    interval = difference.over_seeds
    return {
        "seeds": len(records),
        "accuracy": [round(accuracy, 4) for accuracy, *_ in points],
        "tokens": points[-1][1],
        "seconds": round(points[-1][2], 1),
        "tokens_vs_grpo": found and found[0] / all_tokens,
        "all_tokens_vs_grpo": found and (found[0] + pretraining) / all_tokens,
        "seconds_vs_grpo": found and found[1] / all_seconds,
        "accuracy_difference": interval.value,
        "interval": [interval.low, interval.high] if difference.num_pairs > 1 else None,
    }


def summary(records: Sequence[Record]) -> dict[str, Any]:
    """Return the result of the benchmark."""
    by_variant: dict[str, dict[int, Record]] = {}
    for record in records:
        by_variant.setdefault(record["variant"], {})[record["seed"]] = record
    rows = {name: row(of_seeds, by_variant[BASELINE]) for name, of_seeds in by_variant.items()}
    keys = ("tokens_vs_grpo", "all_tokens_vs_grpo", "seconds_vs_grpo", "accuracy_difference", "interval")
    return {"benchmark": "sao", **{key: rows[SAO][key] for key in keys}, "rows": rows}


def main() -> None:
    parser = options.parser(__doc__, "two steps of GRPO and SAO with one seed")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--grid", type=Path, default=GRID)
    parser.add_argument("--results", type=Path, help="records of a grid that has run, instead of running it")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sao-") as directory:
        results = arguments.results or run_grid(arguments.grid, Path(directory), arguments.jobs, arguments.tiny)
        records = read_records(results)
    options.show(summary(records), arguments)


if __name__ == "__main__":
    main()
