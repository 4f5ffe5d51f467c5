"""Runs with a critic through the command: pretrained, trained on, killed with windows unfinished, and refused."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForTokenClassification
from whole_runs import NO_EVALUATION, RUN_TIMEOUT_S, lines_of, run_command, train

from megatron_dapo.proof.compare_runs import run_differences
from megatron_dapo.proof.resume import (
    ResumeProofSettings,
    RunWasOver,
    after_seconds,
    kill_at,
    make_reference,
    resume_and_compare,
)
from tools.prove_resume import require_windows_once, write_recipe

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def vapo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The resume proof's recipe with a critic, at TP1 beside a policy at TP2."""
    return write_recipe(tmp_path_factory.mktemp("vapo"), "vapo")


@pytest.fixture(scope="module")
def pretrained(vapo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a value pretraining of three steps."""
    folder = tmp_path_factory.mktemp("pretrained") / "run"
    steps = ("value_pretraining.min_steps=2", "value_pretraining.max_steps=3", "value_pretraining.loss_slope=0")
    sets = [part for one in (*steps, *NO_EVALUATION) for part in ("--set", one)]
    outcome = run_command("pretrain-value", str(vapo), "--layout", "tp2", "--run-folder", str(folder), *sets)
    assert outcome.code == 0, outcome.text
    return folder


def test_pretraining_leaves_a_critic_and_says_what_it_explains(pretrained: Path) -> None:
    summary = json.loads((pretrained / "summary.json").read_text())
    rows = lines_of(pretrained / "metrics.jsonl")
    assert summary["train_steps"] == len(rows) == 3 and summary["optimizer_steps"] == 0
    explained = [row["critic/explained_variance"] for row in rows]
    assert summary["extra"]["explained_variance"] == pytest.approx(sum(explained[-2:]) / 2)
    assert all(row["critic/trained_tokens"] > 0 and row["actor/trained_tokens"] == 0 for row in rows)
    model = AutoModelForTokenClassification.from_pretrained(pretrained / "critic")
    assert model.config.num_labels == 1 and float(model.score.weight.detach().abs().sum()) > 0


def test_training_goes_on_from_the_pretrained_critic(vapo: Path, pretrained: Path, tmp_path: Path) -> None:
    critic = pretrained / "critic"
    one_step = ("run.total_steps=1", "optimizer.warmup_steps=0", *NO_EVALUATION)
    outcome = train(vapo, tmp_path / "run", "tp2", f'critic.path="{critic}"', *one_step)
    assert outcome.code == 0, outcome.text
    assert f"the critic goes on with the optimizer state of {critic}" in outcome.text
    row = lines_of(tmp_path / "run" / "metrics.jsonl")[0]
    assert row["critic/optimizer_steps"] > 0 and row["actor/positive_nll"] > 0


@pytest.mark.parametrize(
    ("algorithm", "overrides"),
    [("vapo", ()), ("tppo", ()), ("vapo", ('model.offload="all"', 'critic.offload="optimizer"'))],
)
def test_killed_and_resumed_it_is_the_same_run(algorithm: str, overrides: tuple[str, ...], tmp_path: Path) -> None:
    settings = ResumeProofSettings(
        write_recipe(tmp_path, algorithm),
        "dp2",
        tmp_path,
        ("run.total_steps=3", *overrides),
        run_timeout_s=RUN_TIMEOUT_S,
    )
    reference, _, duration = make_reference(settings)
    assert require_windows_once(reference / "samples.jsonl") > 0
    seconds = random.uniform(0.1, 0.95) * duration
    try:
        killed = kill_at(settings, tmp_path / "killed", after_seconds(seconds)[1])
    except RunWasOver:
        assert next(run_differences(reference, tmp_path / "killed"), "") == ""
        return
    assert not killed.left, "outlived the kill"
    difference = resume_and_compare(settings, reference, tmp_path / "killed")[1]
    assert difference == "", f"killed {seconds:.3f} s after start-up"


REFUSALS = {
    "no such critic": (('critic.path="/no/such/critic"',), ("critic.path", "/no/such/critic")),
    "gamma out of range": (("advantage_estimation.gamma=1.5",), ("advantage_estimation.gamma", "1.5")),
    "lambda out of range": (
        ("advantage_estimation.policy_lambda=-0.1",),
        ("advantage_estimation.policy_lambda", "-0.1"),
    ),
    "window longer than a response": (
        ('algorithm.name="tppo"', "window.tokens=97", 'advantage_estimation.lambda_rule="window"'),
        ("window.tokens", "97", "96"),
    ),
    "a filter of finished groups": (
        ('algorithm.name="tppo"', "rollout.filter_groups=true", "window.tokens=32"),
        ("rollout.filter_groups", "tppo"),
    ),
    "a critic's layout that does not fit": (("critic.parallel.tensor=3",), ("critic.parallel.tensor", "3")),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refused_before_anything_starts(case: str, vapo: Path, tmp_path: Path) -> None:
    overrides, named = REFUSALS[case]
    outcome = train(vapo, tmp_path / "run", "tp2", *overrides)
    assert outcome.code == 2, outcome.text
    for name in named:
        assert name in outcome.text
    assert not (tmp_path / "run").exists()


def test_a_critic_of_another_model_is_refused(vapo: Path, pretrained: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    config = AutoModelForTokenClassification.from_pretrained(pretrained / "critic").config
    config.num_hidden_layers, config.layer_types = 2, config.layer_types[:2]
    torch.manual_seed(0)
    AutoModelForTokenClassification.from_config(config).save_pretrained(other)
    outcome = train(vapo, tmp_path / "run", "tp2", f'critic.path="{other}"', *NO_EVALUATION)
    assert outcome.code == 1 and "num_layers" in outcome.last and "2" in outcome.last and "4" in outcome.last, (
        outcome.last
    )
