from __future__ import annotations

import itertools
import math

import pytest
import torch

from megatron_dapo.algorithms.gae import ValueInputs, estimate_values
from megatron_dapo.algorithms.token_rewards import kl_shaped_rewards, outcome_rewards, token_divergence


def test_the_outcome_lands_on_the_last_trained_token():
    mask = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0, 1.0])
    placed = outcome_rewards(torch.tensor([0.5, 7.0, -1.0]), mask, torch.tensor([3, 2, 1]))
    assert placed.tolist() == [0.0, 0.5, 0.0, 0.0, 0.0, -1.0]


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_return_to_go_of_shaped_rewards_by_brute_force_skips_masked_gaps(beta):
    generator = torch.Generator().manual_seed(0)
    logprobs, ref_logprobs = (torch.randn(4, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = (torch.rand(4, 6, generator=generator) > 0.3).float()
    outcomes = torch.tensor([1.0, -1.0, 0.5, 0.0], dtype=torch.float64)
    lengths, flat = torch.full((4,), 6), mask.flatten()
    divergence = token_divergence("k1", logprobs.flatten(), ref_logprobs.flatten(), flat)
    rewards = kl_shaped_rewards(outcome_rewards(outcomes, flat, lengths), divergence, flat, beta)
    returns = estimate_values(ValueInputs(torch.zeros(24), rewards, flat, lengths, torch.zeros(4)), 1.0, 1.0).returns
    for i, t in itertools.product(range(4), range(6)):
        kept = [k for k in range(t, 6) if mask[i, k]]
        penalty = beta * sum(float(logprobs[i, k] - ref_logprobs[i, k]) for k in kept)
        expected = float(outcomes[i]) - penalty if mask[i, t] else 0.0
        assert float(returns[6 * i + t]) == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_estimators_by_name_without_gradient_and_blind_to_masked_tokens():
    logprobs = torch.tensor([-1.0, math.nan], requires_grad=True)
    ref_logprobs = torch.tensor([-1.5, 0.0])
    for name, expected in {"k1": 0.5, "k2": 0.125, "k3": math.exp(-0.5) - 1 + 0.5}.items():
        divergence = token_divergence(name, logprobs, ref_logprobs, torch.tensor([1.0, 0.0]))
        assert divergence.tolist() == pytest.approx([expected, 0.0]) and not divergence.requires_grad


def test_a_masked_token_gets_no_reward_and_a_negative_coefficient_is_refused():
    ones = torch.ones(2)
    assert kl_shaped_rewards(ones, ones, torch.tensor([1.0, 0.0]), 0.25).tolist() == [0.75, 0.0]
    with pytest.raises(ValueError, match="at least 0"):
        kl_shaped_rewards(ones, ones, ones, -0.1)
