"""Two recipes trained here, whole responses and windows, and what their records say."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def run_command(command: str, recipe: Path, run_directory: Path, overrides: Sequence[str]) -> Path:
    """Run `megatron-dapo COMMAND` on a recipe and return its output directory. Raises RuntimeError with the log's end."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run_directory.parent.mkdir(parents=True, exist_ok=True)
    arguments = [sys.executable, "-W", "ignore", "-m", "megatron_dapo.cli.main", command, str(recipe)]
    arguments += ["--output-dir", str(run_directory), *(part for each in overrides for part in ("--set", each))]
    log = run_directory.with_suffix(".log")
    with open(log, "w", encoding="utf-8") as stream:
        code = subprocess.run(
            arguments, env=environment, stdout=stream, stderr=subprocess.STDOUT, check=False
        ).returncode
    if code:
        raise RuntimeError(
            f"{command} {recipe.name} ended with code {code}; {log} ends:\n{log.read_text('utf-8')[-1500:]}"
        )
    return run_directory


def train(
    full: Path, windows: Path, directory: Path, overrides: Sequence[str], windows_overrides: Sequence[str]
) -> tuple[Path, Path]:
    """Train both recipes one after the other from one pretrained critic and return their output directories."""
    pretrained = run_command("pretrain-value", full, directory / "value_pretraining", overrides)
    start = [*overrides, f"critic.path={pretrained / 'critic'}"]
    whole_run = run_command("train", full, directory / "full", start)
    return whole_run, run_command("train", windows, directory / "windows", [*start, *windows_overrides])


def run_report(directory: Path, responses_a_step: int, window: int | None) -> dict[str, Any]:
    """A run's speeds and curve of accuracy from its metrics; `window` is None if responses come whole."""
    steps, evaluations = (_read_lines(directory / name) for name in ("metrics.jsonl", "evaluations.jsonl"))
    if len(steps) < 2:
        raise ValueError(
            f"{directory}: metrics.jsonl has {len(steps)} steps, two are needed: is it the directory of a run?"
        )
    ends, generating, training, tokens, trained, idle = [0.0], 0.0, 0.0, 0.0, 0.0, []
    # ends[i]: seconds of training when step i has ended, without evaluation and checkpoints.
    for step in steps:
        ends.append(ends[-1] + step["time/step"] - step["time/evaluate"] - step["time/checkpoint"])
    for step in steps[1:]:  # the first one warms up
        generating += step["time/generate"]
        training += step["time/train"]
        tokens += step["throughput/generated_tokens"]
        trained += step["actor/trained_tokens"]
        longest = step["rollout/response_tokens_max"]
        # A step of windows never waits longer than for a whole window, however long the response is by then.
        longest = longest if window is None else min(longest, window)
        idle.append(1 - step["throughput/generated_tokens"] / (responses_a_step * longest))
    seconds = ends[-1] - ends[1]
    return {
        "train_steps": len(steps),
        "seconds": ends[-1],
        "generated_tokens_per_s": tokens / generating,
        "trained_tokens_per_s": trained / seconds,
        "seconds_a_step": seconds / (len(steps) - 1),
        "seconds_a_rollout": generating / (len(steps) - 1),
        "training_share": training / seconds,
        "idle_share": sum(idle) / len(idle),
        "evaluations": [
            {
                "train_step": int(one["train_step"]),
                "train_seconds": ends[min(int(one["train_step"]), len(steps))],
                "accuracy": one["eval/avg_at_k"],
            }
            for one in evaluations
        ],
    }


def compare(full: Mapping[str, Any], windows: Mapping[str, Any], target: float) -> dict[str, Any]:
    """The ratios, above 1 if windows are faster."""
    sides = {"full": full, "windows": windows}
    seconds, steps = (
        {name: reached_at(target, side["evaluations"], clock) for name, side in sides.items()}
        for clock in ("train_seconds", "train_step")
    )
    return {
        "measured_speedup": full["seconds_a_rollout"] / windows["seconds_a_rollout"],
        "measured_speedup_tokens": windows["generated_tokens_per_s"] / full["generated_tokens_per_s"],
        "measured_speedup_step": full["seconds_a_step"] / windows["seconds_a_step"],
        "measured_speedup_step_tokens": windows["trained_tokens_per_s"] / full["trained_tokens_per_s"],
        "idle_share": {"full": full["idle_share"], "windows": windows["idle_share"]},
        "target_accuracy": target,
        "seconds_to_target": seconds,
        "time_to_accuracy_ratio": _ratio(seconds),
        "steps_to_target": steps,
        "steps_to_accuracy_ratio": _ratio(steps),
        "full": full,
        "windows": windows,
    }


def reached_at(target: float, evaluations: Sequence[Mapping[str, float]], clock: str) -> float | None:
    """`clock` (seconds or steps) when the accuracy first reaches `target`, on the straight lines between evaluations."""
    for before, after in itertools.pairwise(evaluations):
        if before["accuracy"] < target <= after["accuracy"]:
            share = (target - before["accuracy"]) / (after["accuracy"] - before["accuracy"])
            return before[clock] + share * (after[clock] - before[clock])
    return None


def _ratio(sides: Mapping[str, float | None]) -> float | None:
    """Whole responses / windows; None if one of them never got there."""
    full, windows = sides["full"], sides["windows"]
    return full / windows if full is not None and windows is not None else None


def compare_runs(full: Path, windows: Path, target: float) -> dict[str, Any]:
    """Compare two run directories, each with the configuration it ran under."""
    configs = [json.loads((directory / "config.json").read_text("utf-8"))["config"] for directory in (full, windows)]
    sizes = [config["rollout"]["prompts_per_step"] * config["rollout"]["group_size"] for config in configs]
    window = configs[1]["window"]["tokens"]
    return compare(run_report(full, sizes[0], None), run_report(windows, sizes[1], window), target)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
