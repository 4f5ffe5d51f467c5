"""Functions of scripts and notebooks as files: what they use comes along, and what cannot says so in one line."""

from __future__ import annotations

import linecache
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron_dapo.api.source import path_of, source_of
from megatron_dapo.rewards.verifiers.verifier import load_verifier

CELL = '''
import math
import re as regex
from collections import Counter
from dataclasses import dataclass
from functools import cache
from megatron_dapo.rewards.result import RewardResult

WEIGHTS = {"right": 1.0, "short": [0.1, 0.2]}
NUMBER = regex.compile(r"-?\\d+", regex.M)
model = object()

@dataclass
class Parts:
    right: float
    count: Counter

    def total(self) -> float:
        return self.right * WEIGHTS["right"]

def helper(text):
    return math.floor(float(NUMBER.findall(text)[-1]))

@cache
def again(text):
    return helper(text) if text else again("0")

def reward(sample: "RewardSample", scale=WEIGHTS["short"][0]) -> RewardResult:
    model = Parts(again(sample.response), Counter(sample.response))
    return RewardResult(score=model.total() * scale, is_correct=True)

def uses_model(sample):
    return model is None

def uses_unknown(sample):
    return len([missing for missing in sample.response])

async def later(sample):
    return math.pi

def outer(bonus):
    def inner(sample):
        return bonus + helper(sample.response)
    return inner

def holds(thing):
    def inner(sample):
        return thing
    return inner

class Watch:
    """A class of a notebook."""
    factor = math.e

    def on_step_end(self, step, metrics):
        return helper("7") * self.factor

short = lambda sample: 1.0
'''


def cell(monkeypatch: pytest.MonkeyPatch, text: str = CELL) -> ModuleType:
    """Run a cell as IPython does: its lines are only in the line cache, its names in __main__."""
    name = f"<ipython-input-{abs(hash(text))}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    module = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    exec(compile(text, name, "exec"), vars(module))
    return module


def loaded(path: str) -> Any:
    """The function of a written file, in a process of its own that knows nothing of this one."""
    file, _, name = path.rpartition(":")
    code = f"import sys, runpy; print(runpy.run_path({file!r})[{name!r}])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_function_of_a_notebook_takes_along_what_it_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = cell(monkeypatch)
    path = path_of(module.reward, tmp_path / "reward.py")
    assert path == f"{tmp_path / 'reward.py'}:reward"
    verifier = load_verifier(path)
    from megatron_dapo.rewards.result import RewardSample

    sample = RewardSample((), "so 40", "", "", {}, "stop", 0)
    assert verifier.score(sample).reward == pytest.approx(4.0)
    assert "uses_model" not in (tmp_path / "reward.py").read_text()


def test_async_functions_and_closures_over_constants_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = cell(monkeypatch)
    assert load_verifier(path_of(module.later, tmp_path / "later.py")).score_later is not None
    assert "bonus = 2.5" in source_of(module.outer(2.5))
    loaded(path_of(module.outer(2.5), tmp_path / "inner.py"))


def test_a_class_of_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Watch" in loaded(path_of(cell(monkeypatch).Watch, tmp_path / "watch.py"))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda module: module.uses_model, "uses_model uses model, a object, which cannot be written"),
        (lambda module: module.holds(object()), "inner uses thing, a object"),
        (lambda module: module.short, "a lambda has no name"),
        (lambda module: 3, "of type int; pass a function"),
    ],
)
def test_one_line_says_what_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make, words) -> None:
    with pytest.raises(ValueError, match=words) as error:
        path_of(make(cell(monkeypatch)), tmp_path / "hook.py")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "hook.py").exists()


def test_a_function_without_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    exec("def reward(sample): return 1.0", vars(module))
    with pytest.raises(ValueError, match="its source is not on record"):
        path_of(module.reward, tmp_path / "reward.py")


def test_a_function_of_a_module_keeps_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_dapo.rewards.verifiers import dapo

    assert path_of(dapo.score, tmp_path / "x.py") == "megatron_dapo.rewards.verifiers.dapo:score"
    assert path_of("a.py:b", tmp_path / "x.py") == "a.py:b"
    (tmp_path / "beside.py").write_text("def reward(sample):\n    return 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import beside  # type: ignore[import-not-found]

    assert path_of(beside.reward, tmp_path / "x.py") == f"{tmp_path / 'beside.py'}:reward"
    assert not (tmp_path / "x.py").exists() and math.pi
