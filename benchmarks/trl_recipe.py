"""A recipe of ours, trained by TRL's GRPOTrainer in the place of `megatron-dapo train`: a grid's `program`, e.g. of
examples/grids/smollm2_gpu.toml, or a separate command.

    python benchmarks/trl_recipe.py [RECIPE] [--set a.b=c]... [--output-dir DIR] [--trl-packages PATH] [--json] [--tiny]

TRL has the recipe's model, data files, chat template, verifier, rewards, groups, lengths, sampling, clip bounds, optimizer and
run.max_train_seconds or run.total_steps. It generates with vLLM in its own process if vLLM is installed on a GPU,
otherwise with transformers. Its model is then evaluated by `megatron-dapo eval` with the recipe, so by our engine,
problems and seeds, and DIR has what `train` leaves: metrics.jsonl, evaluations, summary.json, huggingface. Called
again, it does what is left.

TRL has no dynamic sampling and trains on groups that teach nothing; give it rollout.filter_groups = false.
TRL comes from --trl-packages, .venv-trl (make .venv-trl) or this environment.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import options
import torch
from peers.packages import installed_packages, with_packages
from peers.trl_process import peer_specification, run_logged, run_trl

from megatron_dapo.config.loader import load_config
from megatron_dapo.config.schema import Config
from megatron_dapo.telemetry.summary import RunSummary
from megatron_dapo.trainer.recorder import RunPaths

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "examples" / "quickstart" / "quickstart.toml"
TINY = (
    *options.TINY_STEP,
    "run.total_steps=2",
    "evaluation.num_samples=1",
    "parallel.tp_size=1",
    "rollout.filter_groups=false",
)
VLLM = {"use_vllm": True, "vllm_mode": "colocate"}


def rows_per_pass(config: Config, processes: int) -> int:
    """Return the most responses of one forward and backward pass that divide a process's part of a mini-batch and, at their longest,
    have no more tokens than the recipe's micro-batches."""
    mine, rest = divmod(config.training.mini_batch_prompts * config.rollout.group_size, processes)
    if rest:
        raise ValueError(f"{processes} processes do not divide a mini-batch of {mine * processes + rest} responses")
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    fitting = max(1, config.training.micro_batch_tokens // longest)
    return max(rows for rows in range(1, fitting + 1) if mine % rows == 0)


def generation_settings(device: str, packages: Path | None) -> dict[str, Any]:
    """Return TRL's settings of generation: vLLM in its own process if that can be imported on a GPU."""
    places = [*([str(packages)] if packages else []), *sys.path]
    found = device == "cuda" and importlib.machinery.PathFinder.find_spec("vllm", places) is not None
    return dict(VLLM) if found else {}


def train(config: Config, directory: Path, packages: Path | None) -> dict[str, Any]:
    """Train, or read the report of a training that came to its end; the model is in `directory`/huggingface."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    processes = max(1, config.parallel.num_processes) if device == "cpu" else 1
    settings = {
        "processes": processes,
        "rows_per_pass": rows_per_pass(config, processes),
        **generation_settings(device, packages),
    }
    specification = peer_specification(
        config,
        directory / "trl",
        settings,
        len(os.sched_getaffinity(0)),
        device,
        train_steps=config.run.total_steps,
        max_train_seconds=config.run.max_train_seconds or float("inf"),
        evaluation_interval=0,
        model_dir=str(directory / "huggingface"),
        save_bfloat16=config.model.dtype == "bfloat16",
    )
    report = Path(specification["report_path"])
    if report.is_file() and (found := json.loads(report.read_text(encoding="utf-8")))["finished"]:
        return found
    return run_trl(packages, specification, directory / "trl", processes)


def evaluate(recipe: Path, overrides: Sequence[str], directory: Path, train_steps: int) -> float:
    """Evaluate the trained model by the recipe's protocol, as its own training would; return avg@k."""
    output = RunPaths(directory).evaluations / f"step_{train_steps:06d}.json"
    command = [sys.executable, "-W", "ignore", "-m", "megatron_dapo.cli.main", "eval", str(recipe)]
    command += [part for override in overrides for part in ("--set", override)]
    command += ["--model", str(directory / "huggingface"), "--output", str(output)]
    run_logged(command, {"PYTHONPATH": with_packages()}, directory / "evaluation.txt")
    metrics = json.loads(output.read_text(encoding="utf-8"))["metrics"]
    return next(estimate["value"] for name, estimate in metrics.items() if name.startswith("avg@"))


def metric_rows(report: Mapping[str, Any], responses: int) -> list[dict[str, Any]]:
    """Return a row for each train step, by the names of our metrics."""
    begins = [0.0, *report["batch_ends"]]
    return [
        {
            "train_step": step + 1,
            "time/step": end - begin,
            "rollout/accuracy_generated": batch["accuracy"],
            "rollout/response_tokens_mean": batch["response_tokens"] / responses,
            "throughput/generated_tokens": batch["response_tokens"],
            "quality/repetition_mean": batch["repetition"],
            "actor/entropy": batch["entropy"],
            "actor/kl_loss": 0.0,  # no KL term
        }
        for step, (begin, end, batch) in enumerate(zip(begins, report["batch_ends"], report["batches"]))
    ]


def write_run(config: Config, directory: Path, report: Mapping[str, Any], accuracy: float, seconds: float) -> None:
    """Write metrics, the evaluation and, last, the summary."""
    paths, steps = RunPaths(directory), report["train_steps"]
    rows = metric_rows(report, config.rollout.prompts_per_step * config.rollout.group_size)
    paths.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    evaluation = {"train_step": steps, "eval/avg_at_k": accuracy}
    paths.evaluation_metrics.write_text(json.dumps(evaluation) + "\n", encoding="utf-8")
    trained = max(report["train_seconds"], 1e-9)
    summary = RunSummary(
        name=f"{config.run.name}, TRL",
        layout="TRL",
        stopped="finished" if steps >= config.run.total_steps else "training seconds used up",
        train_steps=steps,
        optimizer_steps=steps * (config.rollout.prompts_per_step // config.training.mini_batch_prompts),
        accuracy_before=None,
        accuracy_after=accuracy,
        train_seconds=report["train_seconds"],
        total_seconds=seconds,
        samples_per_s=report["trained_samples"] / trained,
        generated_tokens_per_s=report["response_tokens"] / trained,
        directories={"metrics": str(paths.metrics), "huggingface": str(directory / "huggingface")},
        extra={"useful_samples": report["useful_samples"]},
    )
    paths.summary.write_text(json.dumps(asdict(summary), indent=2) + "\n", encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    parser = options.parser("A recipe of ours, trained by TRL.", "two steps of a few responses")
    parser.add_argument("recipe", type=Path, nargs="?", default=RECIPE)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="a.b=value")
    parser.add_argument("--output-dir", type=Path, help="default: a temporary one")
    parser.add_argument(
        "--trl-packages", type=Path, help="directory with TRL; default: .venv-trl, else this environment"
    )
    return parser.parse_args()


def run(arguments: argparse.Namespace, directory: Path) -> None:
    """Train, evaluate and write. Raises ValueError if TRL is missing or cannot train the recipe."""
    begun = time.monotonic()
    packages = arguments.trl_packages or installed_packages("trl")
    if packages is None and importlib.machinery.PathFinder.find_spec("trl") is None:
        raise ValueError("TRL is not installed: make .venv-trl, or --trl-packages DIRECTORY")
    overrides = [*(TINY if arguments.tiny else ()), *arguments.overrides]
    config = load_config(arguments.recipe, overrides).config
    if config.rollout.filter_groups:
        raise ValueError("TRL has no dynamic sampling: --set rollout.filter_groups=false")
    directory.mkdir(parents=True, exist_ok=True)
    report = train(config, directory, packages)
    if not report["train_steps"]:
        raise ValueError(f"no train step within run.max_train_seconds = {config.run.max_train_seconds:g}")
    accuracy = evaluate(arguments.recipe, overrides, directory, report["train_steps"])
    write_run(config, directory, report, accuracy, time.monotonic() - begun)
    text = RunPaths(directory).summary.read_text(encoding="utf-8")
    found = json.loads(text)
    options.show(found, arguments)


def main() -> int:
    arguments = parse_arguments()
    try:
        with tempfile.TemporaryDirectory() as temporary:
            run(arguments, (arguments.output_dir or Path(temporary)).resolve())
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
