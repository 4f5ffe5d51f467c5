"""DAPO by TRL's GRPOTrainer and by this project: same model, prompts, rewards, learning rate and two cores, in one run.

    python benchmarks/dapo_vs_trl.py [--json] [--quick | --tiny] [--steps 28] [--target 0.7] [--layout dp2] [--tune]
                                     [--trl-packages PATH] [--output DIRECTORY]

Both sides run one after the other on the same two cores, from the recipe (the quickstart): groups, group size, response
length, sampling, verifier and overlong punishment, clip bounds, optimizer steps a rollout batch, AdamW, warm-up. TRL
is installed from its lock into `.venv-trl`, on top of this environment's packages, and runs with the fastest of
`CANDIDATES`; `--tune` times them all again. Both sides are timed while they train: model loading, evaluation and
checkpoints do not count.

    samples_per_s_ratio      responses trained on per second, ours / TRL's, over the steps both have made but the first
    time_to_accuracy_ratio   seconds of training until held-out avg@k first reaches the target, TRL's / ours

Ours also generates the groups that dynamic sampling filters out, more of them the better the policy gets: its
`generated_samples_per_s` counts them. TRL trains on groups that are all right or all wrong, which teach nothing: its
`useful_samples_per_s` leaves them out. So the two sides' samples are not comparable, and the second key is the one
that a user notices.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import options
from peers.packages import installed_packages, peer_packages, with_packages
from peers.trl_process import Settings, peer_specification, run_logged, run_trl

from megatron_dapo.config.loader import load_config
from megatron_dapo.config.schema import Config

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "examples" / "quickstart" / "quickstart.toml"
NUM_CORES = 2
ROLLOUT_PHASES, TRAIN_PHASES = ("generate",), ("logprobs", "advantages", "train")
QUICK_STEPS = 3
TUNE_STEPS = 3
TINY_STEPS = 2  # speeds leave out the first step
TRL_MISSING = "make .venv-trl installs TRL"
TINY_TRL = {"processes": 1, "rows_per_pass": 8}

# What `--tune` times: processes x threads, rows of one forward and backward pass, and GRPOConfig's own settings.
CANDIDATES: Mapping[str, Settings] = {
    "2 threads, 32 rows": {"processes": 1, "rows_per_pass": 32},
    "2 threads, 64 rows": {"processes": 1, "rows_per_pass": 64},
    "2 threads, 128 rows": {"processes": 1, "rows_per_pass": 128},
    "2 threads, 64 rows, static cache": {"processes": 1, "rows_per_pass": 64, "cache_implementation": "static"},
    "2 threads, 64 rows, continuous batching": {
        "processes": 1,
        "rows_per_pass": 64,
        "use_transformers_continuous_batching": True,
    },
    "2 processes, 32 rows": {"processes": 2, "rows_per_pass": 32},
    "2 processes, 64 rows": {"processes": 2, "rows_per_pass": 64},
    "2 processes, 64 rows, static cache": {"processes": 2, "rows_per_pass": 64, "cache_implementation": "static"},
}
FASTEST = "2 processes, 64 rows"


# ---- the two sides


def run_ours(overrides: Sequence[str], recipe: Path, layout: str, directory: Path) -> dict[str, Any]:
    """This project's report, in TRL's terms, from the run's own metrics."""
    command = [sys.executable, "-W", "ignore", "-m", "megatron_dapo.cli.main", "train", str(recipe)]
    command += ["--output-dir", str(directory / "run"), "--layout", layout]
    command += [part for override in overrides for part in ("--set", override)]
    directory.mkdir(parents=True, exist_ok=True)
    run_logged(command, {"PYTHONPATH": with_packages()}, directory / "log.txt")
    steps = _read_lines(directory / "run" / "metrics.jsonl")
    evaluations = _read_lines(directory / "run" / "evaluations.jsonl")
    group_size = load_config(recipe, overrides).config.rollout.group_size
    return ours_report(steps, evaluations, group_size)


def ours_report(steps: Sequence[Settings], evaluations: Sequence[Settings], group_size: int) -> dict[str, Any]:
    """The report of a run from its metrics, one record a train step."""
    ends, total = [0.0], 0.0
    for step in steps:
        total += step["time/step"] - step["time/evaluate"] - step["time/checkpoint"]
        ends.append(total)
    trained = sum(step["rollout/groups_trained"] for step in steps) * group_size
    generated = [step["rollout/groups_generated"] * group_size for step in steps]
    excluded = ("time/step", "time/evaluate", "time/checkpoint")
    names = [name for name in steps[0] if name.startswith("time/") and name not in excluded]
    return {
        "train_steps": len(steps),
        "train_seconds": total,
        "trained_samples": trained,
        "generated_by_batch": generated,
        "batch_ends": ends[1:],
        "filtered_share": 1 - trained / sum(generated),
        "phase_shares": {name.removeprefix("time/"): sum(step[name] for step in steps) / total for name in names},
        "evaluations": [
            {
                "train_step": entry["train_step"],
                "train_seconds": ends[int(entry["train_step"])],
                "accuracy": entry["eval/avg_at_k"],
            }
            for entry in evaluations
        ],
    }


def _read_lines(path: Path) -> list[Settings]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


# ---- TRL's settings


def tune(packages: Path, config: Config, directory: Path) -> dict[str, float | str]:
    """Samples per second of every candidate without its first, warming step; or why it does not run."""
    speeds: dict[str, float | str] = {}
    for name, settings in CANDIDATES.items():
        limits = {"train_steps": TUNE_STEPS, "evaluation_interval": 0, "target": 2.0, "max_train_seconds": 90.0}
        try:
            place = directory / name.replace(" ", "_").replace(",", "")
            specification = peer_specification(config, place, settings, NUM_CORES, **limits)
            report = run_trl(packages, specification, place, settings["processes"])
        except RuntimeError as error:
            speeds[name] = str(error).strip().splitlines()[-1][:300]
            continue
        if report["train_steps"] < 2:
            speeds[name] = f"no two steps within {limits['max_train_seconds']:.0f} s"
            continue
        speeds[name] = warm_speed(report, report["train_steps"])
        print(f"{name}: {speeds[name]:.1f} samples/s", file=sys.stderr)
    return speeds


def warm_speed(report: Settings, num_batches: int) -> float:
    """Trained samples per second over batches 2 to `num_batches`, counted from 1: the first one warms up."""
    ends = report["batch_ends"]
    samples = report["trained_samples"] / report["train_steps"]
    return samples * (num_batches - 1) / (ends[num_batches - 1] - ends[0])


# ---- the comparison


def seconds_to(target: float, evaluations: Sequence[Settings]) -> float | None:
    """Training seconds at the first evaluation that reaches `target`; None if none does."""
    return next((entry["train_seconds"] for entry in evaluations if entry["accuracy"] >= target), None)


def interpolated_seconds_to(target: float, evaluations: Sequence[Settings]) -> float | None:
    """The same, interpolated linearly between evaluations, so that it does not depend on how often they run."""
    for before, after in zip(evaluations, evaluations[1:]):
        if before["accuracy"] < target <= after["accuracy"]:
            share = (target - before["accuracy"]) / (after["accuracy"] - before["accuracy"])
            return before["train_seconds"] + share * (after["train_seconds"] - before["train_seconds"])
    return None


def compare(ours: Settings, theirs: Settings, target: float) -> dict[str, Any]:
    """Return the two keys and the figures that go with them."""
    common = min(ours["train_steps"], theirs["train_steps"])
    speed, peer_speed = warm_speed(ours, common), warm_speed(theirs, common)
    useful = peer_speed * theirs["useful_samples"] / theirs["trained_samples"]
    per_batch = ours["trained_samples"] / ours["train_steps"]
    generated = speed * sum(ours["generated_by_batch"][1:common]) / (per_batch * (common - 1))
    sides = (theirs["evaluations"], ours["evaluations"])
    first, between = ([find(target, side) for side in sides] for find in (seconds_to, interpolated_seconds_to))
    return {
        "samples_per_s_ratio": speed / peer_speed,
        "time_to_accuracy_ratio": _ratio(*first),
        "time_to_accuracy_ratio_interpolated": _ratio(*between),
        "steps_compared": common,
        "samples_per_s": {"ours": speed, "trl": peer_speed},
        "useful_samples_per_s": {"ours": speed, "trl": useful},
        "generated_samples_per_s": {"ours": generated, "trl": peer_speed},
        "target_accuracy": target,
        "seconds_to_target": {"ours": first[1], "trl": first[0]},
        "what_bounds_it": bounds(ours, theirs),
    }


def _ratio(theirs: float | None, ours: float | None) -> float | None:
    return theirs / ours if theirs is not None and ours else None


def bounds(ours: Settings, theirs: Settings) -> str:
    """Describe the shares of our step's time in one sentence."""
    shares = ours["phase_shares"]
    rollout, train = (sum(shares[name] for name in names) for names in (ROLLOUT_PHASES, TRAIN_PHASES))
    rest = 1 - rollout - train
    idle = 1 - theirs["useful_samples"] / theirs["trained_samples"]
    return (
        f"ours: {rollout:.0%} of a step generates (matrix products, and reading keys and values when many responses run), "
        f"{train:.0%} computes log-probs and trains (matrix products and attention), {rest:.1%} is the rest (weight sync, "
        f"records); {ours['filtered_share']:.0%} of what is generated is "
        f"filtered. TRL: {idle:.0%} of what it trains on has no advantage"
    )


def parse_arguments() -> argparse.Namespace:
    parser = options.parser(
        "DAPO by TRL's GRPOTrainer and by this project on two cores.",
        f"{TINY_STEPS} steps on a few short responses, TRL only if it is installed",
    )
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS} steps, no evaluation: only the speed")
    parser.add_argument("--steps", type=int, default=20, help="train steps at most")
    parser.add_argument("--target", type=float, default=0.7, help="held-out avg@k to reach")
    parser.add_argument("--evaluation-interval", type=int, default=2, help="train steps between evaluations")
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--layout", default="dp2", help="ours, e.g. tp2 as in the recipe; dp2 is the fastest here")
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="a.b=value", help="both sides' recipe"
    )
    parser.add_argument("--trl-packages", type=Path, help="directory with TRL; default: .venv-trl, installed if absent")
    parser.add_argument("--trl-settings", choices=list(CANDIDATES), default=FASTEST, help="of the candidates")
    parser.add_argument("--tune", action="store_true", help="time all candidates first and take the fastest")
    parser.add_argument("--output", type=Path, help="directory for logs and runs; default: a temporary one")
    return parser.parse_args()


def measure(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Run both sides, one after the other."""
    # Both sides inherit the same cores, so the kernel cannot give one of them more.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:NUM_CORES])
    if arguments.tiny:
        arguments.overrides = [*options.TINY_STEP, *arguments.overrides]
    config = load_config(arguments.recipe, arguments.overrides).config
    packages = arguments.trl_packages or (installed_packages if arguments.tiny else peer_packages)("trl")
    steps, interval = arguments.steps, arguments.evaluation_interval
    if arguments.quick or arguments.tiny:
        steps, interval = QUICK_STEPS if arguments.quick else TINY_STEPS, 0
    tried: dict[str, float | str] = {}
    chosen, settings = arguments.trl_settings, CANDIDATES[arguments.trl_settings]
    if arguments.tune and packages:
        tried = tune(packages, config, directory / "tune")
        chosen = max((name for name, speed in tried.items() if isinstance(speed, float)), key=lambda name: tried[name])
        settings = CANDIDATES[chosen]
    if arguments.tiny:
        chosen, settings = "tiny", TINY_TRL
    load_before = os.getloadavg()[0]
    # TRL trains until it reaches the target, but no longer than this on a slow machine.
    limits = {
        "train_steps": steps,
        "evaluation_interval": interval,
        "target": arguments.target,
        "max_train_seconds": 400.0,
    }
    theirs = None
    if packages:
        specification = peer_specification(config, directory / "trl", settings, NUM_CORES, **limits)
        theirs = run_trl(packages, specification, directory / "trl", settings["processes"])
    overrides = [
        *arguments.overrides,
        f"run.total_steps={steps}",
        f"evaluation.interval={interval}",
        f"evaluation.at_start={str(interval > 0).lower()}",
        f"evaluation.at_end={str(interval > 0).lower()}",
        "checkpoint.interval=0",
    ]
    ours = run_ours(overrides, arguments.recipe, arguments.layout, directory / "ours")
    return {
        **(compare(ours, theirs, arguments.target) if theirs else {}),
        "optimizer_steps_per_batch": config.rollout.prompts_per_step // config.training.mini_batch_prompts,
        "layout": arguments.layout,
        "trl_settings": chosen,
        "trl_tried": tried,
        "load_average": [load_before, os.getloadavg()[0]],
        "ours": ours,
        "trl": theirs or f"not run: {TRL_MISSING}",
    }


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory() as temporary:
        result = measure(arguments, arguments.output or Path(temporary))
    options.show(result, arguments)


if __name__ == "__main__":
    main()
