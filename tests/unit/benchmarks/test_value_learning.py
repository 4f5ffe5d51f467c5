"""The language of the learning check: its dynamic program against brute force, and learning toward it."""

from __future__ import annotations

import importlib
import math
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
    names = ("locks.language", "locks.networks", "locks.values", "locks.ablation", "locks.windows", "value_learning")
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


@pytest.mark.parametrize("num_ahead", [0, 1])
def test_windows_are_aged_and_sampled_by_the_policy_that_they_name(benchmark, num_ahead: int) -> None:
    recipe = benchmark.replace(benchmark.FULL, **benchmark.TINY_RECIPE, group_size=4)
    locks = benchmark.Locks(0)
    learner = benchmark.WindowLearner(recipe, locks, 0, num_ahead, benchmark.CORRECTION)
    tables: list[torch.Tensor] = []
    collect = learner._collector.collect

    def checked(num_groups: int, training_version: int) -> object:
        batch = collect(num_groups, training_version)
        for group in batch.groups:
            for sample in group.samples:
                prompt, tokens = group.prompt.token_ids[0], sample.completion.token_ids
                stages = benchmark.stages_of(locks, prompt, torch.from_numpy(tokens))
                for run in sample.completion.versions:
                    for place in range(run.start, run.end):
                        odds = float(tables[run.version][prompt, stages[place], tokens[place]])
                        assert sample.completion.logprobs[place] == pytest.approx(math.log(odds), abs=1e-5)
                    if run.end > sample.window.start:
                        assert training_version - run.version == (min(1, training_version) if num_ahead else 0)
        return batch

    learner._collector.collect = checked
    for _ in range(4):
        tables.append(learner.policy.table())
        learner.step()
    assert learner._version == 4 and not torch.equal(tables[0], tables[-1]), "the policy was trained"


def test_windows_learn(benchmark) -> None:
    """One version behind as on policy, from one critic."""
    short = {"num_responses": 64, "num_mini_batches": 4, "reward_model_steps": 2, "pretraining_steps": 5}
    runs = benchmark.learn_windows(0, 12, benchmark.replace(benchmark.FULL, **short))
    assert list(runs) == ["on policy", "one ahead"] and runs["on policy"][0] == runs["one ahead"][0]
    assert all(accuracies[-1] > accuracies[0] + 0.1 for accuracies in runs.values()), runs
    row = benchmark.window_row([runs["on policy"], runs["one ahead"]])
    low, high = row["final_interval"]
    assert low <= row["final"] <= high and row["final"] == pytest.approx(sum(row["finals"]) / 2, abs=1e-4)
