"""Proves that a killed run goes on exactly: python tools/prove_resume.py --layout tp2 --points 20 --seed 0 --json

Trains the quickstart's base model on a few of its problems: several optimizer steps a rollout batch, a checkpoint every
step, epochs that wrap round, evaluations in between. --algorithm says what a checkpoint carries beside the models:

dapo   oversampled, so that the buffer carries groups
vapo   a critic on a layout of its own, with its optimizer
tppo   the same, and unfinished windows; that no window is trained twice is checked as well

--set critic.parallel.num_processes=1 gives the critic a process of its own; --set 'model.offload="all"' and the like let
models rest in host memory.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.resume_proof.kill_points import ResumeProofSettings, prove_resume  # noqa: E402

QUICKSTART = ROOT / "examples" / "quickstart"
NUM_TRAIN, NUM_HELD_OUT = 16, 4

RECIPE = """
[run]
name = "prove_resume"
total_steps = 5

[model]
path = "{model}"

[data]
train_paths = ["train.jsonl"]
eval_paths = ["heldout.jsonl"]
max_prompt_tokens = 128

[rollout]
prompts_per_step = 6
group_size = 4
max_response_tokens = 96
slots_per_rank = 32
{rollout}
{algorithm}

[training]
mini_batch_prompts = 2
micro_batch_tokens = 1024

[optimizer]
learning_rate = 1e-3
warmup_steps = 2
schedule = "cosine"

[checkpoint]
interval = 1

[evaluation]
interval = 2
num_samples = 2
top_p = 1.0

[telemetry]
samples_per_step = 1000
progress = false
"""


CRITIC = """
[algorithm]
name = "{name}"
positive_example_coefficient = 0.1

[advantage_estimation]
lambda_rule = "{rule}"

[critic]
epochs = 2

[critic.parallel]
tp_size = 1

[critic.optimizer]
learning_rate = 1e-3
warmup_steps = 2
"""

# Algorithm -> what is particular to its recipe: of [rollout], and sections of its own.
ALGORITHMS = {
    "dapo": ("oversample = 2.5\nmax_staleness = 1", '[algorithm.off_policy]\ncorrection = "tis"'),
    "vapo": ("filter_groups = false", CRITIC.format(name="vapo", rule="length_adaptive")),
    "tppo": (
        "filter_groups = false",
        CRITIC.format(name="tppo", rule="window") + "[window]\ntokens = 32\nignored_tail_tokens = 2",
    ),
}


def write_recipe(folder: Path, algorithm: str = "dapo") -> Path:
    """The configuration of the proof and its data, in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("train.jsonl", NUM_TRAIN), ("heldout.jsonl", NUM_HELD_OUT)):
        lines = (QUICKSTART / name).read_text(encoding="utf-8").splitlines(keepends=True)
        (folder / name).write_text("".join(lines[:count]), encoding="utf-8")
    recipe = folder / "recipe.toml"
    rollout, sections = ALGORITHMS[algorithm]
    model = (QUICKSTART / "base_model").as_posix()
    recipe.write_text(RECIPE.format(model=model, rollout=rollout, algorithm=sections), encoding="utf-8")
    return recipe


def require_windows_once(samples: Path) -> int:
    """The number of windows on record, of the run all others equal. AssertionError where one is there twice or a
    response's windows do not join.
    """
    ends: dict[str, int] = {}
    records = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
    for record in records:
        start, before = record["window"]["start"], ends.get(record["sample_id"], 0)
        assert start == before, f"{record['sample_id']}: a window from {start} behind one that ended at {before}"
        ends[record["sample_id"]] = len(record["response_ids"])
    return len(records)


def main(arguments: list[str]) -> int:
    """Exit code 0: every point equals the uninterrupted run; 1: one does not."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layout", default="tp2", help="parallel layout, e.g. tp2, dp2, pp2, tp2dp2")
    parser.add_argument("--algorithm", choices=list(ALGORITHMS), default="dapo")
    parser.add_argument("--points", type=int, default=20, help="random moments to kill at")
    parser.add_argument("--aimed", type=int, default=0, help="kills during checkpoint writes, in addition")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="a.b=value", help="change the recipe"
    )
    parser.add_argument("--folder", type=Path, help="keep the runs here; default: a temporary folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parsed = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="prove-resume-") as temporary:
        folder = parsed.folder or Path(temporary)
        settings = ResumeProofSettings(
            recipe=write_recipe(folder, parsed.algorithm),
            layout=parsed.layout,
            folder=folder,
            overrides=tuple(parsed.overrides),
            num_points=parsed.points,
            num_aimed=parsed.aimed,
            seed=parsed.seed,
        )
        report = prove_resume(settings, lambda line: print(line, file=sys.stderr, flush=True))
        num_windows = require_windows_once(folder / "reference" / "samples.jsonl")
        print(f"{num_windows} windows, each trained once", file=sys.stderr)
    if parsed.json:
        print(json.dumps(report.to_json()))
    else:
        print(f"{report.layout}: {report.equal} of {report.points} points equal the uninterrupted run")
        print(f"kills hit: {', '.join(f'{phase} {count}' for phase, count in report.phases.items())}")
        if report.first_difference:
            print(f"first difference: {report.first_difference}")
    return 0 if report.equal == report.points else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
