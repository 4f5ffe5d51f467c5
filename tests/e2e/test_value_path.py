"""Runs with a critic through the command: pretrained, trained on, and killed with windows unfinished."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from interruptions import Finished, finish, kill_and_resume
from transformers import AutoModelForTokenClassification
from whole_runs import NO_EVALUATION, lines_of, pretrain, train

from tools.prove_resume import require_windows_once, write_recipe


@pytest.fixture(scope="module")
def vapo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The resume proof's recipe with a critic, at TP1 next to a policy at TP2."""
    return write_recipe(tmp_path_factory.mktemp("vapo"), "vapo")


@pytest.fixture(scope="module")
def pretrained(vapo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a value pretraining of three steps."""
    directory = tmp_path_factory.mktemp("pretrained") / "run"
    outcome = pretrain(vapo, directory)
    assert outcome.code == 0, outcome.text
    return directory


def test_pretraining_leaves_a_critic_and_says_what_it_explains(pretrained: Path) -> None:
    summary = json.loads((pretrained / "summary.json").read_text())
    rows = lines_of(pretrained / "metrics.jsonl")
    assert summary["train_steps"] == len(rows) == 3 and summary["optimizer_steps"] == 0
    explained = [row["critic/explained_variance"] for row in rows]
    assert summary["extra"]["explained_variance"] == pytest.approx(sum(explained[-2:]) / 2)
    assert all(row["critic/trained_tokens"] > 0 and row["actor/trained_tokens"] == 0 for row in rows)
    model = AutoModelForTokenClassification.from_pretrained(pretrained / "critic")
    assert model.config.num_labels == 1 and float(model.score.weight.detach().abs().sum()) > 0


def test_training_continues_from_the_pretrained_critic(vapo: Path, pretrained: Path, tmp_path: Path) -> None:
    critic = pretrained / "critic"
    one_step = ("run.total_steps=1", "optimizer.warmup_steps=0", *NO_EVALUATION)
    outcome = train(vapo, tmp_path / "run", "tp2", f'critic.path="{critic}"', *one_step)
    assert outcome.code == 0, outcome.text
    assert f"the critic resumes with the optimizer state of {critic}" in outcome.text
    row = lines_of(tmp_path / "run" / "metrics.jsonl")[0]
    assert row["critic/optimizer_steps"] > 0 and row["actor/positive_nll"] > 0
    assert any(sample["advantage"] for sample in lines_of(tmp_path / "run" / "samples.jsonl"))
    trained = AutoModelForTokenClassification.from_pretrained(tmp_path / "run" / "critic")
    before = AutoModelForTokenClassification.from_pretrained(critic)
    assert not torch.equal(trained.score.weight, before.score.weight)
    directories = json.loads((tmp_path / "run" / "summary.json").read_text())["directories"]
    assert directories["critic"] == str(tmp_path / "run" / "critic") and "huggingface" in directories


@pytest.mark.long
def test_killed_and_resumed_it_is_the_same_run(finished_vapo: Finished, tmp_path: Path) -> None:
    assert require_windows_once(finished_vapo.directory / "samples.jsonl") > 0
    kill_and_resume(finished_vapo, tmp_path / "killed")


@pytest.mark.long
def test_killed_with_windows_unfinished_and_resumed_it_is_the_same_run(tmp_path: Path) -> None:
    finished = finish(write_recipe(tmp_path, "tppo"), "dp2", tmp_path, "run.total_steps=3")
    assert require_windows_once(finished.directory / "samples.jsonl") > 0
    kill_and_resume(finished, tmp_path / "killed")
