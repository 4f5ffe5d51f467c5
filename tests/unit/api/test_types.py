"""The package passes mypy; its public interface and what a user writes with it do so in strict mode."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mypy") is None,
    reason="mypy is not installed: make .venv-mypy && PYTHONPATH=.venv-mypy pytest tests/unit/api/test_types.py",
)

USER = """
from collections.abc import Sequence

from megatron_dapo import Group, Prompt, Recipe, RewardSample, evaluate, generate, train


def reward(sample: RewardSample) -> float:
    return float(sample.answer in sample.response)


def keep(group: Group) -> bool:
    return len(group.samples) > 1


def order(prompts: Sequence[Prompt], epoch: int) -> list[int]:
    return list(range(len(prompts)))


rows = [{"prompt": "1 + 1 =", "answer": "2"}]
recipe = Recipe("model", rows, reward, rollout={"group_filter": keep}, settings={"data.order": order})
result = train(recipe)
steps: list[dict[str, float]] = result.metrics
accuracy: float | None = result.summary.accuracy_after
low: float = evaluate(recipe).headline.low
texts: list[str] = [response.text for response in generate(recipe, ["1 + 1 ="])]
"""
WRONG = """
from megatron_dapo import Recipe, train

train(Recipe("model", 3))
train("recipe.toml")
"""


def mypy(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "MYPYPATH": str(ROOT)}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_package_and_a_users_script_pass_mypy(tmp_path: Path) -> None:
    (tmp_path / "users_script.py").write_text(USER)
    cache = ("--cache-dir", str(tmp_path / "cache"))
    done = mypy(*cache)
    assert done.returncode == 0, done.stdout + done.stderr
    done = mypy(*cache, str(tmp_path / "users_script.py"))
    assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "users_script.py").write_text(WRONG)
    done = mypy(*cache, str(tmp_path / "users_script.py"))
    assert done.returncode == 1 and done.stdout.count(" error: ") == 2, done.stdout + done.stderr
