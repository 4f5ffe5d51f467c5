"""Supervised fine-tuning through the command: evaluated, exported, and resumed bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from whole_runs import Outcome, lines_of, run_command, sets

from tools.prove_resume import write_recipe

ANSWER = "The result is {0}.\nAnswer: {0}"
STEPS = (
    "sft.batch_size=8",
    "sft.epochs=3",
    "sft.optimizer.learning_rate=1e-3",
    "evaluation.interval=0",
    "checkpoint.keep=9",
)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe of the resume proof, and 16 of its problems with a response of one line and the answer."""
    recipe = write_recipe(tmp_path_factory.mktemp("sft"))
    rows = [json.loads(line) for line in (recipe.parent / "train.jsonl").read_text().splitlines()]
    lines = [
        json.dumps({"prompt": row["prompt"], "response": ANSWER.format(row["reward_model"]["ground_truth"])})
        for row in rows
    ]
    (recipe.parent / "given.jsonl").write_text("\n".join(lines))
    return recipe


def fine_tune(recipe: Path, directory: Path, *overrides: str) -> Outcome:
    given = f'sft.train_paths=["{recipe.parent / "given.jsonl"}"]'
    chosen = sets([given, *STEPS, *overrides])
    return run_command("sft", str(recipe), "--layout", "tp1", "--output-dir", str(directory), *chosen)


@pytest.fixture(scope="module")
def tuned(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of six train steps."""
    directory = tmp_path_factory.mktemp("tuned") / "run"
    outcome = fine_tune(recipe, directory)
    assert outcome.code == 0, outcome.text
    assert "supervised fine-tuning on given.jsonl: 6 train steps of 8 responses, token_mean" in outcome.text
    return directory


def test_it_learns_is_evaluated_and_exported(tuned: Path) -> None:
    summary, rows = json.loads((tuned / "summary.json").read_text()), lines_of(tuned / "metrics.jsonl")
    assert summary["train_steps"] == summary["optimizer_steps"] == len(rows) == 6
    assert summary["accuracy_before"] is not None and summary["accuracy_after"] is not None
    losses = [row["actor/loss"] for row in rows]
    assert losses[-1] < 0.7 * losses[0], losses
    assert all(row["rollout/groups_trained"] == 8 and row["actor/entropy"] > 0 for row in rows)
    model = AutoModelForCausalLM.from_pretrained(tuned / "huggingface")
    assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())


@pytest.mark.long  # Fine-tuning writes the checkpoints that test_interrupted_runs.py resumes.
def test_resumed_it_is_the_same_run(recipe: Path, tuned: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    (directory / "checkpoints").mkdir(parents=True)
    (third,) = (tuned / "checkpoints").glob("*3")
    shutil.copytree(third, directory / "checkpoints" / third.name)
    outcome = fine_tune(recipe, directory)
    assert outcome.code == 0 and "resuming from" in outcome.text, outcome.text
    rows = {row["train_step"]: row["actor/loss"] for row in lines_of(tuned / "metrics.jsonl")}
    resumed = {row["train_step"]: row["actor/loss"] for row in lines_of(directory / "metrics.jsonl")}
    assert resumed == {step: rows[step] for step in (4, 5, 6)}
    one, other = (path / "huggingface" / "model.safetensors" for path in (tuned, directory))
    assert one.read_bytes() == other.read_bytes()


@pytest.mark.long
def test_bad_rows_end_the_run_with_one_line(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"prompt": "1+1?"}\n')
    outcome = fine_tune(recipe, tmp_path / "run", f'sft.train_paths=["{tmp_path / "bad.jsonl"}"]', "data.eval_paths=[]")
    assert outcome.code not in (0, 75) and "no response; a row has prompt and response" in outcome.last
    absent = fine_tune(recipe, tmp_path / "run", 'sft.train_paths=["/no/such.jsonl"]')
    assert absent.code == 2 and "/no/such.jsonl does not exist" in absent.last
