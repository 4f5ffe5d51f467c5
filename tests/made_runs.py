"""Run directories made without a run, for tests of what reads them."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from megatron_dapo.evaluation.estimators import Estimate, ProblemRecord
from megatron_dapo.evaluation.protocol import EvaluationProtocol, EvaluationResult
from megatron_dapo.telemetry.metrics import EVALUATION_METRICS, PHASES, STEP_METRICS

Rows = dict[int, dict[str, Any]]  # train step -> metrics that differ from a healthy run's


def make_run(
    path: Path,
    num_steps: int = 30,
    evaluate_every: int = 10,
    scores: tuple[float, ...] = (0.4, 0.6, 0.7, 0.8),
    rows: Rows | None = None,
    samples: list[dict[str, Any]] | None = None,
    filtered: list[dict[str, Any]] | None = None,
    **config: Any,
) -> Path:
    """Write the directory of a run of healthy metrics that learns: config, metrics, evaluations with their tables, samples.

    `scores`: held-out accuracy at each evaluation, the last one for all further ones. `config`: keys with "__" for dots.
    """
    path.mkdir(parents=True)
    noise = random.Random(0)
    tree: dict[str, Any] = {
        "run": {"name": path.name, "total_steps": num_steps},
        "evaluation": {"num_samples": 8},
        "mismatch": {"alarm": 0.02, "trend_factor": 2.0, "trend_floor": 1e-3},
        "quality": {
            "repetition_alarm": 0.2,
            "tail_loop_alarm": 0.2,
            "compression_alarm": 0.0,
            "probability_alarm": 1.0,
            "reward_failure_alarm": 0.02,
        },
        "optimizer": {"learning_rate": 1e-6},
    }
    for key, value in config.items():
        section, _, name = key.partition("__")
        tree.setdefault(section, {})[name] = value
    origins = {f"{section}.{name}": "default" for section, values in tree.items() for name in values}
    origins["optimizer.learning_rate"] = "--set"
    write_json(path / "config.json", {"version": 1, "config": tree, "origins": origins})
    lines = [_row(step, num_steps, noise) | (rows or {}).get(step, {}) for step in range(1, num_steps + 1)]
    write_lines(path / "metrics.jsonl", lines)
    evaluated = []
    (path / "evaluations").mkdir()
    for place, step in enumerate(range(0, num_steps + 1, evaluate_every)):
        result = an_evaluation(scores[min(place, len(scores) - 1)], place)
        (path / "evaluations" / f"step_{step:06d}.json").write_text(result.to_json())
        headline = result.headline
        bounds = {"eval/avg_at_k_low": headline.low, "eval/avg_at_k_high": headline.high}
        values = {**dict.fromkeys(EVALUATION_METRICS, 0.5), "eval/avg_at_k": headline.value, **bounds}
        evaluated.append({"train_step": step, **values})
    write_lines(path / "evaluations.jsonl", evaluated)
    write_lines(path / "samples.jsonl", samples if samples is not None else some_samples(num_steps))
    write_lines(path / "filtered.jsonl", filtered if filtered is not None else some_samples(num_steps, "wrong"))
    write_lines(path / "attempts.jsonl", [{"attempt": 1, "began": 1.7e9, "job": "", "completed_steps": 0}])
    return path


def write_json(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document), encoding="utf-8")


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def _row(step: int, num_steps: int, noise: random.Random) -> dict[str, Any]:
    share = step / num_steps
    times = {f"time/{name}": 0.0 for name in PHASES} | {
        "time/generate": 20 + noise.random(),
        "time/train": 10 + 2 * share,
    }
    return {
        "train_step": step,
        **dict.fromkeys(STEP_METRICS, 0.0),
        "progress/optimizer_steps": 2.0 * step,
        "rollout/accuracy_generated": 0.4 + 0.4 * share + 0.02 * noise.random(),
        "rollout/response_tokens_mean": 80 + 40 * share,
        "rollout/groups_filtered_share": 0.3,
        "actor/entropy": 0.5 * math.exp(-share) + 0.01 * noise.random(),
        "actor/grad_norm": 0.1 + 0.01 * noise.random(),
        "actor/grad_norm_max": 0.12 + 0.01 * noise.random(),
        "actor/learning_rate": 1e-6,
        "mismatch/abs_logprob_diff_mean": 1e-3 * (1 + 0.1 * noise.random()),
        "mismatch/ess": 0.98,
        "quality/compression_mean": 0.4,
        "quality/probability_mean": 0.9,
        "reward/mean": 0.8 * share - 0.2,
        "throughput/generated_tokens_per_s": 2000.0 + noise.random(),
        "throughput/generated_tokens": 40000.0,
        **times,
    }


def an_evaluation(score: float, seed: int = 0, num_problems: int = 40) -> EvaluationResult:
    """Return a result of 8 responses a problem, of about this accuracy."""
    draw = random.Random(seed)
    problems = []
    for index in range(num_problems):
        right = tuple(float(draw.random() < score) for _ in range(8))
        columns = ((None,) * 8, ("correct",) * 8, (False,) * 8, (10,) * 8)
        problems.append(ProblemRecord(f"p{index}", "7", 1, right, *columns))
    value = sum(sum(one.accuracies) for one in problems) / (8 * num_problems)
    protocol = EvaluationProtocol(
        "m", "d", "0", num_problems, num_problems, 8, 1.0, 1.0, 0, 100, (2,), 0, "embedded", "1", "t", "dapo", "1"
    )
    metrics = {"avg@8": Estimate(value, value - 0.05, value + 0.05)}
    return EvaluationResult(protocol, metrics, {}, tuple(problems))


def a_sample(
    step: int, number: int = 0, outcome: str = "correct", text: str = "2 + 5 = 7\nAnswer: 7", **more: Any
) -> dict[str, Any]:
    """Return a record as samples.jsonl has it, of one token a character."""
    return {
        "train_step": step,
        "sample_id": f"{step:06d}/{number}",
        "prompt_id": f"p{step}",
        "data_source": "made",
        "prompt": [{"role": "user", "content": f"Problem {step}"}],
        "answer": "7",
        "response": text,
        "response_ids": [ord(each) for each in text],
        "finish_reason": "length" if outcome == "truncated" else "stop",
        "extracted": "7",
        "outcome": outcome,
        "accuracy": float(outcome == "correct"),
        "reward": 1.0 if outcome == "correct" else -1.0,
        "reward_parts": {"verifier": 1.0},
        "advantage": 0.5,
        "versions": [{"start": 0, "end": len(text), "version": step - 1}],
        "generation_step": step,
        "token_chars": [1] * len(text),
        "logprobs": [-0.01 * (place % 50) for place in range(len(text))],
        **more,
    }


def some_samples(num_steps: int, *outcomes: str) -> list[dict[str, Any]]:
    """Return samples of every step: by default one right, one wrong and one truncated."""
    kinds = outcomes or ("correct", "wrong", "truncated")
    return [a_sample(step, number, kind) for step in range(1, num_steps + 1) for number, kind in enumerate(kinds)]
