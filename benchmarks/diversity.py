"""Fine-tuning on a diverse selection of correct responses against a random one of equal size, through the command.

For each seed the recipe's model is sampled once; the random selection draws from these responses as
`rejection_sampling.selection = "random"` does, without duplicates. The model is fine-tuned on each selection and
evaluated on the held-out problems. The difference in accuracy is paired by problem and averaged over seeds; its
interval is bootstrapped over problems.

    python benchmarks/diversity.py [--json] [--tiny] [--recipe R] [--seeds 3] [--prompts 256] [--samples 16] [--set a.b=c]...
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import options

from megatron_dapo.algorithms.selection import KEPT, Candidates, choose_at_random
from megatron_dapo.config import load_config
from megatron_dapo.evaluation.estimators import bootstrap_mean
from megatron_dapo.evaluation.protocol import EvaluationResult

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ROOT / "examples" / "quickstart" / "quickstart.toml"
SELECTIONS = ("diverse", "random")

Row = Mapping[str, Any]  # a line of responses.jsonl or examples.jsonl


def command(name: str, recipe: Path, directory: Path, overrides: Sequence[str], layout: str = "") -> None:
    """Run one command of `megatron-dapo`; its output goes to stderr."""
    chosen = [part for override in overrides for part in ("--set", override)]
    cut = ["--layout", layout] if layout else []
    arguments = [name, str(recipe), *cut, "--output-dir", str(directory), *chosen]
    subprocess.run(
        [sys.executable, "-m", "megatron_dapo.cli.main", *arguments], cwd=ROOT, check=True, stdout=sys.stderr
    )


def selections(recipe: Path, directory: Path, seed: int, overrides: Sequence[str]) -> tuple[dict[str, Path], Row]:
    """Sample and select; return the file of examples of each selection, and the figures of the diverse one."""
    command("rejection-sample", recipe, directory, overrides)
    files = {name: directory / f"{name}.jsonl" for name in SELECTIONS}
    examples, responses = (_lines(directory / name) for name in ("examples.jsonl", "responses.jsonl"))
    for name, rows in (("diverse", examples), ("random", drawn_at_random(examples, responses, seed))):
        files[name].write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return files, json.loads((directory / "report.json").read_text(encoding="utf-8"))["figures"]


def drawn_at_random(examples: Sequence[Row], responses: Sequence[Row], seed: int) -> list[Row]:
    """Return as many correct and distinct responses of each prompt as `examples` has, drawn by `seed`."""
    prompts = {row["prompt_id"]: row["prompt"] for row in examples}
    rows = []
    for prompt_id, prompt in prompts.items():
        whole = [row for row in responses if row["prompt_id"] == prompt_id]
        # `sft` counts equal rows once, so duplicates would make this selection the smaller one.
        first = {row["response"]: row for row in reversed(whole)}
        own = [row for row in whole if first[row["response"]] is row]
        texts, lengths = [row["response"] for row in own], [row["response_tokens"] for row in own]
        candidates = Candidates(texts, lengths, [row["outcome"] == "correct" for row in own])
        num_kept = sum(row["fate"] == KEPT for row in whole)
        for index in choose_at_random(candidates, num_kept, f"{seed}/{prompt_id}"):
            rows.append(
                {"prompt": prompt, "response": texts[index], "prompt_id": prompt_id, "sample": own[index]["sample"]}
            )
    return rows


def tuned(recipe: Path, directory: Path, examples: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Fine-tune and evaluate; return the number of examples and the held-out result."""
    command("sft", recipe, directory, [*overrides, f"sft.train_paths={json.dumps([str(examples)])}"], "tp1")
    last = max((directory / "evaluations").glob("step_*.json"))
    result = EvaluationResult.from_json(last.read_text(encoding="utf-8"))
    return {
        "examples": len(_lines(examples)),
        "accuracy": result.headline.value,
        "problems": {one.problem_id: sum(one.accuracies) / len(one.accuracies) for one in result.problems},
    }


def _lines(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def compare(recipe: Path, seeds: int, directory: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the runs of each seed, and the difference of diverse and random."""
    rows = []
    for seed in range(seeds):
        place, common = directory / f"seed_{seed}", [f"run.seed={seed}", *overrides]
        files, figures = selections(recipe, place / "sampled", seed, common)
        pair = {name: tuned(recipe, place / name, path, common) for name, path in files.items()}
        # Mean cosine distance between the examples of a prompt: diverse - random.
        rows.append({"seed": seed, "distance_difference": figures["distance_difference"], **pair})
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


def head_of(path: Path, num_lines: int, target: Path) -> str:
    """Write the first lines of `path` to `target`; return `target` as a list in `--set` syntax."""
    with path.open(encoding="utf-8") as stream:
        target.write_text("".join(islice(stream, num_lines)), encoding="utf-8")
    return json.dumps([str(target)])


def main() -> None:
    """Read the arguments, compare, print."""
    parser = options.parser(__doc__, "one seed, a few prompts")
    parser.add_argument("--recipe", type=Path, default=QUICKSTART)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=256, help="first rows of the recipe's training data")
    parser.add_argument("--samples", type=int, default=16, help="responses for each prompt")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="a.b=value")
    chosen = parser.parse_args()
    seeds, prompts, samples = (1, 6, 6) if chosen.tiny else (chosen.seeds, chosen.prompts, chosen.samples)
    data = load_config(chosen.recipe).config.data
    with tempfile.TemporaryDirectory(prefix="diversity-") as scratch:
        trained, held_out = Path(scratch) / "train.jsonl", Path(scratch) / "heldout.jsonl"
        tiny = f"data.eval_paths={head_of(data.eval_paths[0], 8, held_out)}", "evaluation.num_samples=1"
        overrides = [
            f"data.train_paths={head_of(data.train_paths[0], prompts, trained)}",
            f"rejection_sampling.num_samples={samples}",
            *("evaluation.interval=0", "evaluation.at_start=false", "telemetry.progress=false", "sft.batch_size=16"),
            *("sft.optimizer.learning_rate=3e-4", *(tiny if chosen.tiny else ()), *chosen.overrides),
        ]
        result = compare(chosen.recipe, seeds, Path(scratch), overrides)
    options.show(result, chosen)


if __name__ == "__main__":
    main()
