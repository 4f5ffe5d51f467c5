"""`megatron-dapo init`: what it finds in rows, what it writes, and that a run accepts it."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megatron_dapo.cli import init
from megatron_dapo.cli.main import app
from megatron_dapo.cli.recipes import schema_text
from megatron_dapo.plan import cpu
from megatron_dapo.rewards.result import RewardSample
from megatron_dapo.run.plan import ONE_NODE_OF_CPUS, Machines, make_plan

MODEL = Path(__file__).resolve().parents[3] / "examples" / "quickstart" / "base_model"


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Forty rows and a machine of two cores."""
    rows = [{"Question": f"What is {number} + 1?", "answer": str(number + 1), "level": 1} for number in range(40)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    machine = Machines(1, 0, host_gib=8.0, cores=2, has_bf16=True)
    monkeypatch.setattr(init, "machines_of", lambda dry_run: machine)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["init", *arguments])


def test_the_recipe_is_one_that_a_run_accepts(directory: Path) -> None:
    result = run("tasks.jsonl", "--model", str(MODEL))
    assert result.exit_code == 0, result.output
    assert "prompt in 'Question', answer in 'answer'" in result.output and "a step: 64 responses of up to" in result.output
    plan = make_plan(directory / "own.toml", (), None, None, ONE_NODE_OF_CPUS, inputs="quick")
    config, counts = plan.loaded.config, plan.prompts
    assert counts is not None and (counts.train, counts.held_out) == (36, 4)
    assert config.reward.verifier == f"{directory}/reward.py:partial"
    assert cpu.estimate(config, plan.architecture, 2, True).step < 60
    assert config.data.max_prompt_tokens + config.rollout.max_response_tokens <= config.training.micro_batch_tokens
    assert config.model.path == MODEL
    directive, schema = (directory / "own.toml").read_text().splitlines()[0].split()
    assert directive == "#:schema" and (directory / schema).read_text() == schema_text()


def test_a_larger_model_gets_shorter_responses(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []
    for factor in (1, 20_000):
        monkeypatch.setattr(cpu, "GENERATION_FLOPS", {"bfloat16": 75e9 / factor, "float32": 25e9 / factor})
        assert run("tasks.jsonl", "--model", str(MODEL), "--force").exit_code == 0
        plan = make_plan(directory / "own.toml", (), None, None, ONE_NODE_OF_CPUS, inputs="quick")
        lengths.append(plan.loaded.config.rollout.max_response_tokens)
    assert lengths[1] < lengths[0]


@pytest.mark.parametrize(
    ("response", "expected"),
    [("Answer: 12", (1.0, 1.0)), ("so it is **12**.", (1.0, 1.0)), ("12 or 13", (0.0, 0.5)), ("13", (0.0, 0.0)), ("", (0.0, 0.0))],
)
def test_the_rewards_that_it_writes(response: str, expected: tuple[float, float], directory: Path) -> None:
    assert run("tasks.jsonl", "--model", str(MODEL)).exit_code == 0
    sample = RewardSample((), response, "12", "", {}, "stop", 0)
    rewards = runpy.run_path(str(directory / "reward.py"))
    assert tuple(rewards[name](sample) for name in ("exact", "partial")) == expected


def test_what_it_refuses(directory: Path) -> None:
    (directory / "other.jsonl").write_text('{"text": "a", "n": 1}\n')
    result = run("other.jsonl", "--model", str(MODEL))
    assert result.exit_code == 2 and "none of its columns (text, n) is called prompt" in result.output
    assert not (directory / "own.toml").exists()
    assert run("gone.jsonl", "--model", str(MODEL)).exit_code == 2
    (directory / "own.toml").write_text("# mine\n")
    result = run("tasks.jsonl", "--model", str(MODEL))
    assert result.exit_code == 2 and "--force" in result.output and (directory / "own.toml").read_text() == "# mine\n"
