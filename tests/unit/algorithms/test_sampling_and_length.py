from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_dapo.algorithms.dynamic_sampling import GroupFilter, wasted_fraction
from megatron_dapo.algorithms.length_reward import soft_overlong_penalty
from megatron_dapo.algorithms.sampling_budget import beta_cdf, fit_total
from megatron_dapo.rewards.pool.repetition import TailLoop, ngram_repetition, repetition_numbers, tail_loop, zlib_ratio


def test_penalty_of_a_batch_with_factor():
    lengths = torch.tensor([5, 8, 9, 10, 11])
    assert soft_overlong_penalty(lengths, 10, 2, factor=0.5).tolist() == [0.0, 0.0, -0.25, -0.5, -0.5]


def test_penalty_settings_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="cache_length 11 must be in .1, max_length = 10."):
        soft_overlong_penalty(torch.tensor([1]), 10, 11)
    with pytest.raises(ValueError, match="cache_length 0"):
        soft_overlong_penalty(torch.tensor([1]), 10, 0)
    with pytest.raises(ValueError, match="factor -1"):
        soft_overlong_penalty(torch.tensor([1]), 10, 2, factor=-1)


def test_filter_bounds_are_exclusive():
    band = GroupFilter(0.25, 0.75)
    decisions = [band.decide(group) for group in ([1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0])]
    assert decisions == ["all_wrong", "kept", "all_right"]
    with pytest.raises(ValueError, match="0 <= min < max <= 1"):
        GroupFilter(0.5, 0.5)


def test_everything_is_wasted_if_no_group_can_disagree():
    assert wasted_fraction(0.0, 16) == wasted_fraction(1.0, 16) == wasted_fraction(0.5, 1) == 1.0
    assert wasted_fraction(0.5, 2) == 0.5
    with pytest.raises(ValueError, match="1.5 is not a probability"):
        wasted_fraction(1.5, 4)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], TailLoop(0, 0)),
        ([4, 4], TailLoop(0, 0)),
        ([1, 2, 3, 3, 3], TailLoop(1, 3)),
        # The longer loop wins over the short stutter it ends in.
        ([9] + [1, 2, 2, 2] * 4, TailLoop(4, 4)),
        (list(range(100)) + [7, 8, 9, 10] * 500, TailLoop(4, 500)),
    ],
)
def test_tail_loop(tokens, expected):
    assert tail_loop(tokens) == expected


def test_tail_loop_agrees_with_a_search_over_every_period():
    generator = torch.Generator().manual_seed(1)
    for _ in range(300):
        length = int(torch.randint(1, 20, (1,), generator=generator))
        tokens = torch.randint(0, 2, (length,), generator=generator).tolist()
        best = TailLoop(0, 0)
        for period in range(1, len(tokens) // 3 + 1):
            repeats = 1
            while tokens[-period * (repeats + 1) : len(tokens) - period * repeats] == tokens[-period:] and period * (
                repeats + 1
            ) <= len(tokens):
                repeats += 1
            if repeats >= 3 and repeats * period > best.repeats * best.period:
                best = TailLoop(period, repeats)
        assert tail_loop(tokens) == best, tokens


@given(st.lists(st.integers(0, 3) | st.integers(0, 2**31 - 1), max_size=80), st.integers(1, 24))
def test_ngram_repetition_is_its_definition(token_ids, n):
    total = max(0, len(token_ids) - n + 1)
    ngrams = {tuple(token_ids[start : start + n]) for start in range(total)}
    assert ngram_repetition(token_ids, n) == (1.0 - len(ngrams) / total if total else 0.0)


def test_equal_hashes_are_compared_exactly(monkeypatch):
    monkeypatch.setattr("megatron_dapo.rewards.pool.repetition._HASH_FACTOR", np.uint64(0))  # only the last token counts
    token_ids = [1, 2, 3, 9, 2, 3, 1, 2, 3]
    assert ngram_repetition(token_ids, 3) == 1.0 - 6 / 7


def test_repetition_tells_a_loop_from_prose():
    generator = torch.Generator().manual_seed(0)
    prose = torch.randint(0, 30000, (2000,), generator=generator).tolist()
    loop = prose[:20] * 100
    assert ngram_repetition(prose) == 0.0 and ngram_repetition(loop) > 0.98
    assert zlib_ratio(loop) < 0.05 < 0.4 < zlib_ratio(prose)
    assert repetition_numbers(loop) == (ngram_repetition(loop), 20, 100, zlib_ratio(loop))
    assert zlib_ratio([]) == 1.0


@pytest.mark.parametrize(("a", "b"), [(3, 5), (10.5, 2.25), (1, 1), (30, 60), (1.2, 40)])
def test_beta_distribution_is_the_integral_of_its_density(a, b):
    scale = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b))
    for x in (0.01, 0.2, 0.5, 0.93):
        # Over t = x ** (1 / 5), in which the density is smooth at 0.
        points = (np.arange(200_000) + 0.5) / 200_000 * x**0.2
        density = scale * points ** (5 * a - 5) * (1 - points**5) ** (b - 1) * 5 * points**4
        integral = float(density.sum() * x**0.2 / 200_000)
        assert beta_cdf(x, a, b) == pytest.approx(integral, abs=1e-7)
    assert (beta_cdf(0, a, b), beta_cdf(1, a, b)) == (0, 1)


@given(
    st.lists(st.integers(4, 64), min_size=1, max_size=40),
    st.floats(0, 1),
)
def test_a_budget_has_its_total_and_gives_who_wants_more_no_less(wanted, fraction):
    total = round((4 + fraction * 60) * len(wanted))
    sizes = fit_total(wanted, total)
    assert sum(sizes) == total and all(4 <= size <= 64 for size in sizes)
    by_want = [size for _, size in sorted(zip(wanted, sizes, strict=True))]
    assert all(later >= earlier - 1 for earlier, later in zip(by_want, by_want[1:], strict=False))


def dealt(wanted, total, smallest, largest):
    """The docstring of `fit_total` round by round, in fractions."""
    sizes = {index: smallest for index in range(len(wanted))}
    left = total - smallest * len(wanted)
    while left:
        below = [index for index in sizes if sizes[index] < largest]
        weights = {index: Fraction(max(0, wanted[index] - smallest)) for index in below}
        if not sum(weights.values()):
            weights = dict.fromkeys(below, Fraction(1))
        shares = {index: left * weight / sum(weights.values()) for index, weight in weights.items()}
        given = {index: min(math.floor(share), largest - sizes[index]) for index, share in shares.items()}
        if max(shares.values()) < 1:
            given = {index: 1 for index in sorted(below, key=lambda index: (-shares[index], index))[:left]}
        for index, number in given.items():
            sizes[index] += number
            left -= number
    return list(sizes.values())


@given(st.lists(st.integers(2, 20), min_size=1, max_size=12), st.floats(0, 1))
def test_a_budget_is_dealt_as_its_docstring_says(wanted, fraction):
    total = round((4 + fraction * 12) * len(wanted))
    assert fit_total(wanted, total, 4, 16) == dealt(wanted, total, 4, 16)


@pytest.mark.parametrize(
    ("wanted", "total", "sizes"),
    [
        ([4, 4, 4], 14, [5, 5, 4]),  # none wants more: equal shares, the first prompts get what is over
        ([6, 5, 4], 13, [5, 4, 4]),  # one is left: shares 2/3 and 1/3
        ([6, 5, 4], 14, [6, 4, 4]),  # shares of 4/3 and 2/3, then 2/3 and 1/3: not largest remainders, which give [5, 5, 4]
        ([10, 10, 4], 19, [8, 7, 4]),  # shares of 3.5 each, then one half each
        ([64, 4, 4], 40, [16, 12, 12]),  # the first ends at `largest`, the others share the rest equally
    ],
)
def test_budgets_dealt_by_hand(wanted, total, sizes):
    assert fit_total(wanted, total, 4, 16) == sizes


def test_a_total_out_of_bounds_is_refused():
    with pytest.raises(ValueError, match="3 responses do not fit 1 groups of 4 to 64"):
        fit_total([8], 3)
