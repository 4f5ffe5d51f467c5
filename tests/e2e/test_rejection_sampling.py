"""Rejection sampling through the command: sampled, selected, repeated bit for bit, and learned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from whole_runs import Outcome, lines_of, run_command, sets

from tools.prove_resume import write_recipe


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(tmp_path_factory.mktemp("rejection"))


def sample(recipe: Path, directory: Path, *overrides: str) -> Outcome:
    chosen = sets(["rejection_sampling.num_samples=12", "rejection_sampling.cluster_similarity=0.9", *overrides])
    return run_command("rejection-sample", str(recipe), "--output-dir", str(directory), *chosen)


@pytest.mark.long
def test_examples_are_sampled_selected_and_learned(recipe: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for directory in (first, second):
        outcome = sample(recipe, directory)
        assert outcome.code == 0, outcome.text
    names = ("examples.jsonl", "responses.jsonl", "README.md", "report.json", "fates.svg", "lengths.svg")
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    responses, examples = lines_of(first / "responses.jsonl"), lines_of(first / "examples.jsonl")
    assert len(responses) == 16 * 12 and 0 < len(examples) == [one["fate"] for one in responses].count("kept")
    kept = {(one["prompt_id"], one["sample"]) for one in responses if one["fate"] == "kept"}
    assert {(one["prompt_id"], one["sample"]) for one in examples} == kept
    assert all(one["outcome"] == "correct" for one in responses if one["fate"] == "kept")
    before = (first / "report.json").stat().st_mtime_ns
    again = sample(recipe, first)
    assert again.code == 0 and (first / "report.json").stat().st_mtime_ns == before, "equal settings: nothing to do"
    tuned = run_command(
        *("sft", str(recipe), "--layout", "tp1", "--output-dir", str(tmp_path / "sft")),
        *sets(
            [
                f'sft.train_paths=["{first / "examples.jsonl"}"]',
                "sft.batch_size=4",
                "sft.epochs=1",
                "data.eval_paths=[]",
            ]
        ),
        *sets(["evaluation.interval=0"]),
    )
    assert tuned.code == 0, tuned.text
    assert json.loads((tmp_path / "sft" / "summary.json").read_text())["train_steps"] == -(-len(examples) // 4)


@pytest.mark.long
def test_what_cannot_be_sampled_is_one_line(recipe: Path, tmp_path: Path) -> None:
    outcome = sample(recipe, tmp_path / "none", "rejection_sampling.min_tokens=96", "rollout.max_response_tokens=96")
    assert outcome.code == 2 and "responses is kept" in outcome.last, outcome.text
    same = sample(recipe, tmp_path / "none", f'data.eval_paths=["{recipe.parent / "train.jsonl"}"]')
    assert same.code == 2 and "every prompt of data.train_paths is in data.eval_paths" in same.last
    encoder = sample(recipe, tmp_path / "none", "rejection_sampling.embedding=encoder")
    assert encoder.code == 2 and "rejection_sampling.encoder_path" in encoder.text
    assert not (tmp_path / "none").exists()
