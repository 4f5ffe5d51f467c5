"""The commands `train` and `pretrain-value` as the queue of runs sees them: steps on record, a checkpoint at SIGTERM, resume, results.

A step takes run.stopped_timeout_seconds. A learning rate of 666 fails, and so does a start in a directory that another holds.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path

from megatron_dapo.telemetry.summary import RunSummary

PROBLEMS = 5
# As the trainer writes them; importing it would take longer than the runs.
CURVES = ("rollout/accuracy_generated", "actor/entropy", "rollout/response_tokens_mean", "quality/repetition_mean")
TOKENS = "throughput/generated_tokens"


def main() -> int:
    verb, _, *options = sys.argv[1:]
    overrides = [value for name, value in zip(options, options[1:]) if name == "--set"]
    directory = Path(options[options.index("--output-dir") + 1])
    # Read as JSON: loading the configuration would take longer than the run.
    given = {"critic.path": "", **dict(override.split("=", 1) for override in overrides)}
    wait_s, num_steps = float(given["run.stopped_timeout_seconds"]), int(given["run.total_steps"])
    with open(directory / "starts.txt", "a") as stream:
        stream.write(f"{verb} {os.environ['OMP_NUM_THREADS']}\n")
    if float(given.get("optimizer.learning_rate", 0)) == 666.0:
        print("the loss is not finite")
        return 1
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    metrics = directory / "metrics.jsonl"
    step = len(metrics.read_text().splitlines()) if metrics.is_file() else 0
    if (directory / "summary.json").is_file():
        return 0  # nothing to do
    if verb == "pretrain-value":
        time.sleep(wait_s)
        (directory / "critic").mkdir()
        write(directory, "finished", step)
        return 0
    assert not given["critic.path"] or Path(given["critic.path"].strip('"')).is_dir()
    if step == 0:
        evaluate(directory, given, 0)
    while step < num_steps:
        time.sleep(wait_s)
        step += 1
        with open(metrics, "a") as stream:
            row = {"train_step": step, TOKENS: 100.0, "actor/kl_loss": 0.0, **dict.fromkeys(CURVES, step / 10)}
            stream.write(json.dumps(row) + "\n")
        if stopped:
            return 75
    evaluate(directory, given, step)
    write(directory, "finished", step)
    return 0


def evaluate(directory: Path, given: dict[str, str], step: int) -> None:
    # A clip range of 0.3 solves one problem more than 0.2 does; the seed is the first response's luck.
    solved = (float(given["algorithm.loss.clip_ratio_high"]) >= 0.3) + 2 if step else 1
    responses = {
        "extracted": ["1"] * 2,
        "outcomes": ["correct"] * 2,
        "truncated": [False] * 2,
        "response_tokens": [9] * 2,
    }
    accuracies = [[float(index < solved), float(given["run.seed"] == "2")] for index in range(PROBLEMS)]
    records = [
        {"problem_id": f"p{index}", "answer": "1", "num_rows": 1, "accuracies": own, **responses}
        for index, own in enumerate(accuracies)
    ]
    protocol = {
        **dict.fromkeys(("model", "dataset_path", "dataset_sha256", "engine", "engine_version"), "x"),
        **dict.fromkeys(("chat_template_sha256", "verifier", "verifier_version"), "x"),
        "num_dataset_rows": PROBLEMS,
        "num_problems": PROBLEMS,
        "num_samples": 2,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "max_new_tokens": 8,
        "stop_token_ids": [0],
        "seed": int(given["run.seed"]),
    }
    result = {
        "format": "megatron_dapo evaluation 1",
        "metrics": {},
        "rates": {},
        "protocol": protocol,
        "problems": records,
    }
    (directory / "evaluations").mkdir(exist_ok=True)
    (directory / "evaluations" / f"step_{step:06d}.json").write_text(json.dumps(result))
    accuracy = sum(map(sum, accuracies)) / (2 * PROBLEMS)
    with open(directory / "evaluations.jsonl", "a") as stream:
        stream.write(json.dumps({"train_step": step, "eval/avg_at_k": accuracy}) + "\n")


def write(directory: Path, stopped: str, step: int) -> None:
    summary = RunSummary("run", "TP1", stopped, step, step, 0.1, 0.2, 1.5, 2.0, 1.0, 1.0)
    (directory / "summary.json").write_text(json.dumps(asdict(summary)))


if __name__ == "__main__":
    sys.exit(main())
