"""The tests of two samples that tell whether drafts change what a server samples."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest


@pytest.fixture(scope="module")
def speculation(repository: Path):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(repository / "benchmarks" / "gpu"))
        yield importlib.import_module("speculation")
    sys.modules.pop("speculation", None)


def test_kolmogorov_is_that_of_the_tables(speculation: ModuleType) -> None:
    # At large sizes a distance of 1.358 / sqrt(n m / (n + m)) has the probability 0.05, one of 1.628 has 0.01.
    size = 20_000
    for factor, expected in ((1.358, 0.05), (1.628, 0.01)):
        shift = round(factor / (size / 2) ** 0.5 * size)
        assert speculation.kolmogorov_p(range(size), range(shift, size + shift)) == pytest.approx(expected, rel=0.05)
    assert speculation.kolmogorov_p([1, 2, 3], [1, 2, 3]) == 1.0


def samples(draw: np.random.Generator, shares: list[float], number: int) -> list[SimpleNamespace]:
    lengths = draw.geometric(0.2, number)
    return [SimpleNamespace(token_ids=draw.choice(len(shares), length, p=shares), num_tokens=length) for length in lengths]


def test_one_distribution_passes_and_a_sharper_one_is_found(speculation: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    draw, shares = np.random.default_rng(0), np.array([0.5, 0.3, 0.15, 0.05])
    sharp = shares**1.3 / (shares**1.3).sum()
    with monkeypatch.context() as patch:
        patch.setattr(speculation, "PERMUTATIONS", 99)
        found = [speculation.p_of_tokens(samples(draw, shares, 200), samples(draw, shares, 200)) for _ in range(40)]
    # p is uniform under one distribution, whatever tokens of a response have to do with each other.
    assert sum(p <= 0.05 for p in found) <= 7 and 0.3 < np.mean(found) < 0.7
    assert speculation.p_of_tokens(samples(draw, shares, 1024), samples(draw, sharp, 1024)) == 1 / 1000
    greedy = [SimpleNamespace(token_ids=np.zeros(9, int), num_tokens=9)] * 1024
    assert speculation.p_of_tokens(samples(draw, shares, 1024), greedy) == 1 / 1000
    assert speculation.p_of_lengths(samples(draw, shares, 1024), greedy) < 1e-9


def test_responses_that_repeat_themselves_do_not_look_different(speculation: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tokens of a response are equal: a test that took them for independent would find a difference."""
    draw = np.random.default_rng(0)
    monkeypatch.setattr(speculation, "PERMUTATIONS", 99)

    def repeated(number: int) -> list[SimpleNamespace]:
        return [SimpleNamespace(token_ids=np.full(50, draw.integers(2)), num_tokens=50) for _ in range(number)]

    found = [speculation.p_of_tokens(repeated(50), repeated(50)) for _ in range(40)]
    assert sum(p <= 0.05 for p in found) <= 7


def test_each_prompt_is_tested_by_itself(speculation: ModuleType) -> None:
    size = speculation.Size(2, 2, 4)
    pairs: list[tuple[list[int], list[int]]] = []
    assert speculation.least_p([1, 2, 3, 4], [5, 6, 7, 8], size, lambda a, b: pairs.append((a, b)) or 0.1) == 0.2
    assert pairs == [([1, 2], [5, 6]), ([3, 4], [7, 8])]
