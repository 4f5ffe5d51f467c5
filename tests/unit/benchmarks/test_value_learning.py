"""The language of the learning check: its dynamic program against brute force, and learning toward it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

SIZES = {"NUM_LETTERS": 2, "END": 2, "NUM_STAGES": 2, "MAX_TOKENS": 5, "NUM_PROMPTS": 3}


@pytest.fixture(scope="module")
def benchmark(repository: Path) -> Iterator[SimpleNamespace]:
    """Return all names of the benchmark's modules in one namespace, with a small language."""
    sys.path.insert(0, str(repository / "benchmarks"))
    names = ("locks.language", "locks.networks", "locks.values", "locks.ablation", "value_learning")
    modules = [importlib.import_module(name) for name in names]
    before = {name: getattr(modules[0], name) for name in SIZES}
    vars(modules[0]).update(SIZES)
    yield SimpleNamespace(**{name: value for module in modules for name, value in vars(module).items()})
    vars(modules[0]).update(before)
    sys.path.remove(str(repository / "benchmarks"))


@pytest.fixture(scope="module")
def policy(benchmark) -> torch.Tensor:
    logits = torch.randn(3, 3, 3, generator=torch.Generator().manual_seed(0))
    return logits.softmax(-1)


def brute_force(benchmark, locks, policy: torch.Tensor, prompt: int, stage: int, time: int) -> tuple[float, int]:
    """(value, continuations) by following every one of them."""
    if time == benchmark.MAX_TOKENS:
        return benchmark.WRONG, 1
    value, count = 0.0, 0
    for token in range(benchmark.END + 1):
        if token == benchmark.END:
            found, paths = (benchmark.CORRECT if stage == benchmark.NUM_STAGES else benchmark.WRONG), 1
        else:
            opened = int(stage < benchmark.NUM_STAGES and token == int(locks.keys[prompt, stage]))
            found, paths = brute_force(benchmark, locks, policy, prompt, stage + opened, time + 1)
        value += float(policy[prompt, stage, token]) * found
        count += paths
    return value, count


def test_values_are_those_of_every_continuation(benchmark, policy: torch.Tensor) -> None:
    locks = benchmark.Locks(0)
    values, action_values = locks.solve(policy)
    assert values.shape == (3, 3, 5) and action_values.shape == (3, 3, 5, 3)
    for prompt in range(3):
        for stage, time in ((0, 0), (1, 1), (2, 3), (1, 4)):
            expected, _ = brute_force(benchmark, locks, policy, prompt, stage, time)
            assert float(values[prompt, stage, time]) == pytest.approx(expected, abs=1e-6)
    torch.testing.assert_close((policy.double()[:, :, None] * action_values).sum(-1), values)
