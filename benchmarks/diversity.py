"""Fine-tuning on a diverse selection of correct responses against a random one of equal size, through the command.

For each seed the recipe's model is sampled once for either selection (`rejection_sampling.selection`; equal seeds sample
equal responses), fine-tuned on what it keeps, and evaluated on the held-out problems. The difference of the accuracies is
paired by problem and averaged over seeds; its interval is the bootstrap's, over problems.

    python benchmarks/diversity.py [--json] [--tiny] [--recipe R] [--seeds 3] [--prompts 256] [--samples 16] [--set a.b=c]...
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_dapo.config import load_config
from megatron_dapo.evaluation.estimators import bootstrap_mean
from megatron_dapo.evaluation.protocol import EvaluationResult

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ROOT / "examples" / "quickstart" / "quickstart.toml"
SELECTIONS = ("diverse", "random")


def command(name: str, recipe: Path, directory: Path, overrides: Sequence[str], layout: str = "") -> None:
    """Run one command of `megatron-dapo`; its output goes to stderr."""
    chosen = [part for override in overrides for part in ("--set", override)]
    cut = ["--layout", layout] if layout else []
    arguments = [name, str(recipe), *cut, "--output-dir", str(directory), *chosen]
    subprocess.run(
        [sys.executable, "-m", "megatron_dapo.cli.main", *arguments], cwd=ROOT, check=True, stdout=sys.stderr
    )


def tuned(recipe: Path, directory: Path, selection: str, seed: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Sample, select, fine-tune and evaluate; return the number of examples and the held-out result."""
    common = [f"run.seed={seed}", *overrides]
    command("rejection-sample", recipe, directory / "sampled", [*common, f"rejection_sampling.selection={selection}"])
    examples = directory / "sampled" / "examples.jsonl"
    command("sft", recipe, directory / "sft", [*common, f"sft.train_paths={json.dumps([str(examples)])}"], "tp1")
    last = max((directory / "sft" / "evaluations").glob("step_*.json"))
    result = EvaluationResult.from_json(last.read_text(encoding="utf-8"))
    figures = json.loads((directory / "sampled" / "report.json").read_text(encoding="utf-8"))["figures"]
    return {
        "examples": figures["fates"]["kept"],
        "distance": figures["distance_kept"].get("value"),
        "accuracy": result.headline.value,
        "problems": {one.problem_id: sum(one.accuracies) / len(one.accuracies) for one in result.problems},
    }


def compare(recipe: Path, seeds: int, directory: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the runs of each seed, and the difference of diverse and random."""
    rows = []
    for seed in range(seeds):
        pair = {name: tuned(recipe, directory / f"{name}_{seed}", name, seed, overrides) for name in SELECTIONS}
        rows.append({"seed": seed, **pair})
    names = rows[0]["diverse"]["problems"]
    by_problem = [
        sum(row["diverse"]["problems"][name] - row["random"]["problems"][name] for row in rows) / seeds
        for name in names
    ]
    difference = bootstrap_mean(by_problem)
    for row in rows:
        for name in SELECTIONS:
            del row[name]["problems"]
    words = "diverse is better" if difference.low > 0 else "random is better" if difference.high < 0 else ""
    return {"seeds": rows, "difference": vars(difference), "verdict": words or "no difference is shown"}


def main() -> None:
    """Read the arguments, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--tiny", action="store_true", help="one seed, a few prompts: only that it runs")
    parser.add_argument("--recipe", type=Path, default=QUICKSTART)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=256, help="first rows of the recipe's training data")
    parser.add_argument("--samples", type=int, default=16, help="responses for each prompt")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="a.b=value")
    chosen = parser.parse_args()
    seeds, prompts, samples = (1, 24, 6) if chosen.tiny else (chosen.seeds, chosen.prompts, chosen.samples)
    with tempfile.TemporaryDirectory(prefix="diversity-") as scratch:
        data = Path(scratch) / "train.jsonl"
        lines = (
            load_config(chosen.recipe).config.data.train_paths[0].read_text(encoding="utf-8").splitlines(keepends=True)
        )
        data.write_text("".join(lines[:prompts]), encoding="utf-8")
        overrides = [
            f"data.train_paths={json.dumps([str(data)])}",
            f"rejection_sampling.num_samples={samples}",
            *("evaluation.interval=0", "evaluation.at_start=false", "telemetry.progress=false", "sft.batch_size=16"),
            *(("evaluation.num_samples=2",) if chosen.tiny else ()),
            *("sft.optimizer.learning_rate=3e-4", *chosen.overrides),
        ]
        result = compare(chosen.recipe, seeds, Path(scratch), overrides)
    if chosen.json:
        print(json.dumps(result))
        return
    for row in result["seeds"]:
        for name in SELECTIONS:
            print(f"seed {row['seed']} {name:8} {row[name]['examples']} examples, accuracy {row[name]['accuracy']:.4f}")
    difference = result["difference"]
    print(
        f"difference {difference['value']:+.4f} [{difference['low']:+.4f}, {difference['high']:+.4f}]: {result['verdict']}"
    )


if __name__ == "__main__":
    main()
