"""The package passes mypy; its public interface and what a user writes with it do so in strict mode."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dapo.config.loader import tomllib

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


@pytest.mark.slow
def test_the_package_and_a_users_script_pass_mypy(tmp_path: Path) -> None:
    """In one call of mypy, which reads the package and torch once: of all files only the wrong script has errors."""
    for name, text in (("users_script", USER), ("wrong_script", WRONG)):
        (tmp_path / f"{name}.py").write_text(text)
    scripts = [str(tmp_path / name) for name in ("users_script.py", "wrong_script.py")]
    settings = ROOT / "pyproject.toml"
    package = tomllib.loads(settings.read_text())["tool"]["mypy"]["files"]  # arguments replace them
    command = [sys.executable, "-m", "mypy", "--config-file", str(settings), "--cache-dir", os.devnull]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "MYPYPATH": str(ROOT)}
    done = subprocess.run(
        [*command, *package, *scripts], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    errors = [line for line in done.stdout.splitlines() if " error: " in line]
    assert done.returncode == 1 and len(errors) == 2, done.stdout + done.stderr
    assert all("wrong_script.py" in line for line in errors), done.stdout
