"""Rounds through the command: every stage from the model before it, and nothing twice when it is run again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from whole_runs import COMMAND_TIMEOUT_S, Outcome, run_command, sets

from tools.prove_resume import write_recipe

pytestmark = pytest.mark.long

STAGES = 3

SMALL = (
    *(
        "rejection_sampling.num_samples=8",
        "sft.batch_size=8",
        "sft.epochs=1",
        "rounds.num_rounds=1",
        "run.total_steps=1",
    ),
    *("optimizer.warmup_steps=0", "evaluation.interval=0", "evaluation.at_end=false", "rollout.oversample=1.0"),
)


def rounds(recipe: Path, directory: Path, *overrides: str) -> Outcome:
    chosen = sets([*SMALL, *overrides])
    arguments = ("rounds", str(recipe), "--layout", "tp1", "--output-dir", str(directory), *chosen)
    return run_command(*arguments, timeout_s=STAGES * COMMAND_TIMEOUT_S)


def test_finished_stages_have_nothing_to_do_when_it_is_run_again(tmp_path: Path) -> None:
    recipe, directory = write_recipe(tmp_path / "recipe"), tmp_path / "run"
    outcome = rounds(recipe, directory)
    assert outcome.code == 0, outcome.text
    sampled, tuned, trained = (directory / name for name in ("round_1/rejection_sampling", "round_1/sft", "train"))
    config = json.loads((trained / "config.json").read_text())["config"]
    assert config["model"]["path"] == str(tuned / "huggingface")
    assert outcome.lines[-1].startswith("train: accuracy")
    files = (sampled / "report.json", tuned / "summary.json")
    times = [path.stat().st_mtime_ns for path in files]
    shutil.rmtree(trained)  # It looks stopped before its last stage.
    again = rounds(recipe, directory)
    assert again.code == 0 and (trained / "summary.json").is_file(), again.text
    assert times == [path.stat().st_mtime_ns for path in files]
    assert f"the run in {tuned} is finished: nothing to do" in again.text
    refused = rounds(recipe, directory, "sft.batch_size=4")
    assert refused.code == 2 and "begun with sft.batch_size = 8, now 4" in refused.last
