from __future__ import annotations

import subprocess
import sys

import pytest

from megatron_dapo.rewards.result import VerifierResult
from megatron_dapo.rewards.verifiers.verifier import PRESETS, load_verifier, result_of
from megatron_dapo.types import Score


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    name = f"user_reward_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text("def length(response, answer):\n    return float(len(response))\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    sys.modules.pop(name, None)


def test_presets_have_versions():
    versions = {load_verifier(name).version for name in PRESETS}
    assert len(versions) == len(PRESETS)
    assert "math-verify-" in load_verifier("lenient").version


def test_user_function(user_module):
    verifier = load_verifier(f"{user_module}:length")
    assert verifier.score("abc", "x") == VerifierResult("correct", reward=3.0)
    assert verifier.version.startswith(f"{user_module}:length@")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dapoo", "code, dapo, dapo_boxed, format, judge, lenient, remote, reward_model"),
        ("no_such_package.rewards:f", "no_such_package"),
        ("json:no_such", "no function 'no_such'"),
    ],
)
def test_unknown_verifiers_say_what_there_is(name, message):
    with pytest.raises(ValueError, match=message):
        load_verifier(name)


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (True, VerifierResult("correct")),
        (False, VerifierResult("wrong")),
        (1, VerifierResult("correct", reward=1.0)),
        (-1.0, VerifierResult("wrong", reward=-1.0)),
        (0.5, VerifierResult("correct", reward=0.5)),
        ({"accuracy": 1}, VerifierResult("correct")),
        ({"accuracy": 0, "reward": 0.25, "extracted": 7}, VerifierResult("wrong", "7", 0.25)),
        (
            {"accuracy": 0, "outcome": "unparsable", "detail": {"a": [1]}},
            VerifierResult("unparsable", detail={"a": [1]}),
        ),
        (Score(1.0, 2.0, "correct", "42"), VerifierResult("correct", "42", 2.0)),
    ],
)
def test_return_values_of_a_user_function(result, expected):
    assert result_of(result) == expected


@pytest.mark.parametrize(
    "result",
    [
        None,
        "1",
        [1.0],
        float("nan"),
        {"reward": 1.0},
        {"accuracy": 0.5},
        {"accuracy": 1, "reward": float("inf")},
        {"accuracy": 1, "outcome": "wrong"},
        {"accuracy": 1, "outcome": "splendid"},
        {"accuracy": 1, "detail": {"a": object()}},
        {"accuracy": 1, "detail": "text"},
        {"accuracy": 1, "detail": {"a": "x" * 100_000}},
        {"accuracy": 1, "rewrd": 1.0},
    ],
)
def test_return_values_that_are_refused(result):
    with pytest.raises(ValueError):
        result_of(result)


def test_a_worker_loads_neither_torch_nor_sympy_for_dapo():
    program = (
        "import sys, megatron_dapo.rewards.pool.worker\n"
        "from megatron_dapo.rewards.verifiers.verifier import load_verifier\n"
        "load_verifier('dapo')\n"
        "heavy = {'torch', 'numpy', 'sympy', 'transformers', 'asyncio'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
