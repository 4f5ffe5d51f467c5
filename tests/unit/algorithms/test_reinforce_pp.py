from __future__ import annotations

import torch

from megatron_dapo.algorithms.reinforce_pp import reinforce_pp_advantages, reinforce_pp_returns, whiten


def test_returns_by_brute_force_skip_masked_gaps():
    generator = torch.Generator().manual_seed(0)
    logprobs, ref_logprobs = (torch.randn(3, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = torch.tensor([[1, 1, 0, 1, 1, 0], [0, 1, 1, 1, 1, 1], [1, 0, 0, 0, 0, 0]])
    rewards = torch.tensor([1.0, -1.0, 0.5])
    returns = reinforce_pp_returns(rewards, logprobs, ref_logprobs, mask, 0.1)
    for i in range(3):
        for t in range(6):
            rest = [float(logprobs[i, k] - ref_logprobs[i, k]) for k in range(t, 6) if mask[i, k]]
            expected = float(rewards[i]) - 0.1 * sum(rest) if mask[i, t] else 0.0
            assert abs(float(returns[i, t]) - expected) < 1e-12


def test_whitened_tokens_have_mean_0_and_std_1_over_the_mask():
    values = torch.randn(4, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    mask = torch.rand(4, 5, generator=torch.Generator().manual_seed(3)) > 0.4
    counted = whiten(values, mask)[mask]
    assert abs(float(counted.mean())) < 1e-12 and abs(float(counted.std(correction=0)) - 1) < 1e-9


def test_no_spread_stays_finite():
    ones = torch.ones(2, 3)
    result = reinforce_pp_advantages(torch.ones(2), ones, ones, ones, 0.1)
    assert result.tolist() == [[1.0] * 3] * 2
    assert whiten(ones, torch.zeros(2, 3)).tolist() == [[0.0] * 3] * 2
