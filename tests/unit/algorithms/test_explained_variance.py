from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dapo.algorithms.explained_variance import PARTS, explained_variance, explained_variance_sums
from tests.examples import examples


def drawn(lengths: list[int], seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    returns = torch.randn(sum(lengths), generator=generator, dtype=torch.float64)
    values = 0.7 * returns + 0.5 * torch.randn(sum(lengths), generator=generator, dtype=torch.float64) + 2.0
    mask = (torch.rand(sum(lengths), generator=generator) > 0.2).float()
    return values, returns, mask, torch.tensor(lengths)


def by_loop(values, returns, mask, lengths) -> dict[str, float]:
    chosen: dict[str, list[int]] = {part: [] for part in PARTS}
    start = 0
    for length in lengths.tolist():
        places = [t for t in range(start, start + length) if mask[t]]
        tenth = -(-len(places) // 10)
        middle = (len(places) - tenth) // 2
        chosen["all"] += places
        chosen["first_decile"] += places[:tenth]
        chosen["middle_decile"] += places[middle : middle + tenth]
        chosen["last_decile"] += places[len(places) - tenth :]
        start += length
    result = {}
    for part, places in chosen.items():
        target, error = returns[places], (returns - values)[places]
        if len(places) > 1:
            result[part] = float(1 - error.var(correction=0) / target.var(correction=0))
    return result


@given(st.lists(st.integers(0, 60), min_size=2, max_size=6), st.integers(0, 50))
@settings(max_examples=examples(60), deadline=None)
def test_equals_the_definition_in_each_part(lengths, seed):
    arguments = drawn(lengths, seed)
    assert explained_variance(explained_variance_sums(*arguments)) == pytest.approx(by_loop(*arguments), rel=1e-6)


def test_sums_of_parts_add_up_to_the_whole():
    values, returns, mask, lengths = drawn([30, 7, 55, 1], 3)
    whole = explained_variance(explained_variance_sums(values, returns, mask, lengths))
    first = explained_variance_sums(values[:37], returns[:37], mask[:37], lengths[:2])
    second = explained_variance_sums(values[37:], returns[37:], mask[37:], lengths[2:])
    empty = explained_variance_sums(*(torch.zeros(0) for _ in range(3)), torch.zeros(0, dtype=torch.int64))
    assert explained_variance(empty.combine(first).combine(second)) == pytest.approx(whole)
    assert set(whole) == set(PARTS)


def test_a_perfect_a_constant_and_a_contrary_critic():
    returns = torch.tensor([1.0, -1.0, 1.0, -1.0])
    for values, expected in ((returns, 1.0), (torch.full((4,), 0.3), 0.0), (-returns, -3.0)):
        found = explained_variance(explained_variance_sums(values, returns, torch.ones(4), torch.tensor([2, 2])))
        assert found["all"] == pytest.approx(expected)


def test_a_part_without_spread_has_no_figure():
    """Returns that are all equal would divide by 0; 0.1 is not exact in binary, so equality is tested, not variance."""
    mask, lengths = torch.ones(30), torch.tensor([10, 20])
    assert explained_variance(explained_variance_sums(torch.rand(30), torch.full((30,), 0.1), mask, lengths)) == {}
    assert explained_variance(explained_variance_sums(torch.rand(30), torch.rand(30), 0 * mask, lengths)) == {}


def test_a_critic_that_learns_only_the_end_shows_in_the_deciles():
    lengths = torch.tensor([100, 100])
    returns = torch.tensor([1.0, -1.0]).repeat_interleave(lengths)
    knows = torch.arange(200) % 100 >= 80
    found = explained_variance(explained_variance_sums(returns * knows, returns, torch.ones(200), lengths))
    assert (found["first_decile"], found["middle_decile"], found["last_decile"]) == (0.0, 0.0, 1.0)
