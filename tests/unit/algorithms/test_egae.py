from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dapo.algorithms.egae import extended_estimates, window_bootstrap, without_tail
from megatron_dapo.algorithms.gae import ValueInputs, estimate_values
from tests.examples import examples


def random(num_tokens: int, seed: int) -> torch.Tensor:
    return torch.randn(num_tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_definition(values, rewards, is_finished: bool, gamma: float, lam: float) -> list[float]:
    behind = 0.0 if is_finished else values[-1]
    following = values[1:] + [behind]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, following, values, strict=True)]
    return [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(values))) for t in range(len(values))]


@pytest.mark.parametrize("gamma", [1.0, 0.99])
@pytest.mark.parametrize("lam", [0.0, 0.95, 1.0])
def test_every_length_from_1_finished_and_cut(gamma, lam):
    lengths = list(range(1, 41))
    finished = torch.arange(40) % 3 == 0
    values, rewards = random(sum(lengths), 0), random(sum(lengths), 1)
    actual = extended_estimates(
        values, rewards, torch.ones(sum(lengths)), torch.tensor(lengths), finished, gamma, lam
    ).advantages
    parts = zip(actual.split(lengths), values.split(lengths), rewards.split(lengths), finished.tolist(), strict=True)
    for advantages, value, reward, ended in parts:
        expected = by_definition(value.tolist(), reward.tolist(), ended, gamma, lam)
        torch.testing.assert_close(advantages, torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-10)


def test_the_last_token_of_a_cut_window_has_advantage_0_without_discount_and_reward():
    values = random(12, 0)
    arguments = (values, torch.zeros(12), torch.ones(12), torch.tensor([5, 7]), torch.tensor([False, False]))
    assert extended_estimates(*arguments, 1.0, 0.95).advantages[[4, 11]].tolist() == [0.0, 0.0]
    discounted = extended_estimates(*arguments, 0.99, 0.95).advantages[[4, 11]]
    torch.testing.assert_close(discounted, -0.01 * values[[4, 11]], rtol=1e-9, atol=1e-12)


def test_without_lambda_and_discount_it_telescopes_to_a_difference_of_values():
    values = random(30, 4)
    estimates = extended_estimates(
        values, torch.zeros(30), torch.ones(30), torch.tensor([30]), torch.tensor([False]), 1.0, 1.0
    )
    torch.testing.assert_close(estimates.advantages, values[-1] - values, rtol=1e-12, atol=1e-12)


@given(st.integers(1, 60), st.integers(1, 80), st.sampled_from([1.0, 0.99]), st.sampled_from([0.0, 0.9, 1.0]))
@settings(max_examples=examples(80), deadline=None)
def test_windows_against_the_whole_response(num_tokens, window, gamma, lam):
    """The last window as it is; before a cut, off by the last token's difference, discounted by (gamma lambda)^d."""
    values, rewards = random(num_tokens, num_tokens), random(num_tokens, window)
    whole = estimate_values(
        ValueInputs(values, rewards, torch.ones(num_tokens), torch.tensor([num_tokens]), torch.zeros(1)), gamma, lam
    ).advantages
    starts = range(0, num_tokens, window)
    lengths = torch.tensor([min(window, num_tokens - start) for start in starts])
    finished = torch.arange(len(starts)) == len(starts) - 1
    cut = extended_estimates(values, rewards, torch.ones(num_tokens), lengths, finished, gamma, lam).advantages
    for part, split, is_last in zip(
        whole.split(lengths.tolist()), cut.split(lengths.tolist()), finished.tolist(), strict=True
    ):
        distance = torch.arange(len(part) - 1, -1, -1, dtype=torch.float64)
        expected = torch.zeros_like(part) if is_last else (gamma * lam) ** distance * (part[-1] - split[-1])
        torch.testing.assert_close(part - split, expected, rtol=1e-8, atol=1e-9)


def test_the_bootstrap_is_the_value_of_the_last_trained_token():
    values = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    mask = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0])
    lengths, finished = torch.tensor([3, 1, 2]), torch.tensor([False, True, False])
    assert window_bootstrap(values, mask, lengths, finished).tolist() == pytest.approx([0.2, 0.0, 0.0])


@given(st.lists(st.integers(0, 12), min_size=1, max_size=5), st.integers(0, 14), st.integers(0, 20))
@settings(max_examples=examples(80), deadline=None)
def test_tails_of_cut_windows_leave_the_mask(lengths, num_tail, seed):
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.rand(sum(lengths), generator=generator) > 0.3).float()
    finished = torch.rand(len(lengths), generator=generator) > 0.5
    before = mask.clone()
    actual = without_tail(mask, torch.tensor(lengths), finished, num_tail).split(lengths)
    for part, original, ended in zip(actual, mask.split(lengths), finished.tolist(), strict=True):
        expected, left = original.tolist(), 0 if ended else num_tail
        for t in reversed(range(len(expected))):
            if expected[t] and left:
                expected[t], left = 0.0, left - 1
        assert part.tolist() == expected
    assert torch.equal(mask, before)


def test_no_tail_leaves_the_mask_alone_and_a_negative_one_is_refused():
    mask, lengths, finished = torch.ones(4), torch.tensor([4]), torch.tensor([False])
    assert without_tail(mask, lengths, finished, 0).tolist() == [1.0] * 4
    with pytest.raises(ValueError, match="at least 0"):
        without_tail(mask, lengths, finished, -1)
