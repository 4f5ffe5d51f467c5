"""The language of the learning check: its dynamic program against brute force, and learning toward it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_dapo.algorithms.gae import estimate_values

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


def test_samples_agree_with_the_exact_accuracy_and_visits(benchmark, policy: torch.Tensor) -> None:
    locks = benchmark.Locks(1)
    responses = benchmark.sample_many(locks, policy, 20_000, torch.Generator().manual_seed(0))
    assert float((responses.outcomes > 0).double().mean()) == pytest.approx(locks.accuracy(policy), abs=0.015)
    counts = torch.zeros(3, 3, 5, dtype=torch.float64)
    places = (responses.state_prompt, responses.state_stage, responses.state_time)
    counts.index_put_(places, torch.ones(len(responses.tokens), dtype=torch.float64), accumulate=True)
    torch.testing.assert_close(counts / 20_000, locks.visits(policy), atol=0.015, rtol=0)
    assert int(responses.lengths.sum()) == len(responses.tokens)


def test_the_best_policy_is_always_right_and_exact_values_give_exact_advantages(benchmark, policy) -> None:
    locks = benchmark.Locks(2)
    best = torch.zeros(3, 3, 3)
    best[:, benchmark.NUM_STAGES, benchmark.END] = 1.0
    best[:, : benchmark.NUM_STAGES].scatter_(2, locks.keys[:, : benchmark.NUM_STAGES, None], 1.0)
    assert locks.accuracy(best) == pytest.approx(1.0)
    values, action_values = locks.solve(policy)
    responses = benchmark.sample_many(locks, policy, 200, torch.Generator().manual_seed(3))
    found = estimate_values(responses.inputs(responses.of(values)), 1.0, 0.0).advantages
    true = responses.of(action_values).gather(1, responses.tokens[:, None])[:, 0] - responses.of(values)
    torch.testing.assert_close(found, true)
