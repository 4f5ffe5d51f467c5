"""Windows together with masks, lambda rules and the critic's batch: what one step of T-PPO asks of the estimators."""

from __future__ import annotations

import pytest
import torch

from megatron_dapo.algorithms.egae import extended_estimates, without_tail
from megatron_dapo.algorithms.gae import ValueInputs, estimate_values
from megatron_dapo.algorithms.length_adaptive_lambda import WindowLambda
from megatron_dapo.algorithms.token_rewards import outcome_rewards


def random(num_tokens: int, seed: int) -> torch.Tensor:
    return torch.randn(num_tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def window_by_definition(
    values: list[float], is_finished: bool, reward: float, gamma: float, lam: float
) -> list[float]:
    """The double sum over the trained tokens of one window."""
    following = [*values[1:], 0.0 if is_finished else values[-1]]
    deltas = [gamma * after - value for value, after in zip(values, following, strict=True)]
    deltas[-1] += reward
    places = range(len(values))
    return [sum((gamma * lam) ** (k - t) * deltas[k] for k in places if k >= t) for t in places]


@pytest.mark.parametrize("gamma", [1.0, 0.99])
def test_windows_with_masked_gaps_and_a_lambda_each(gamma: float) -> None:
    lengths = torch.tensor([7, 1, 12, 5, 9])
    finished = torch.tensor([False, False, True, True, False])
    mask = torch.ones(34)
    mask[[0, 3, 6, 9, 19, 20, 25, 33]] = 0  # head, inside and end of windows
    values, outcomes = random(34, 0), torch.tensor([0.0, 0.0, 1.0, -1.0, 0.0], dtype=torch.float64)
    lambdas = WindowLambda(alpha=0.5, floor=0.6, window=12)(lengths + 20, finished)
    assert lambdas[0] != lambdas[2]
    rewards = outcome_rewards(outcomes, mask, lengths)
    found = extended_estimates(values, rewards, mask, lengths, finished, gamma, lambdas).advantages
    parts = zip(
        found.split(lengths.tolist()), values.split(lengths.tolist()), mask.split(lengths.tolist()), strict=True
    )
    for index, (advantages, value, inside) in enumerate(parts):
        trained = inside > 0
        expected = window_by_definition(
            value[trained].tolist(), bool(finished[index]), float(outcomes[index]), gamma, float(lambdas[index])
        )
        torch.testing.assert_close(advantages[trained], torch.tensor(expected, dtype=torch.float64))
        assert not advantages[~trained].any()


@pytest.mark.parametrize("gamma", [1.0, 0.99])
@pytest.mark.parametrize("window", [1, 3, 8, 40])
def test_targets_of_the_critic_do_not_depend_on_the_cut(window: int, gamma: float) -> None:
    """The critic trains on the finished response from its first token; windows and their values do not enter."""
    lengths, finished = torch.tensor([window + 2, 25]), torch.tensor([False, True])
    num_tokens = int(lengths.sum())
    mask = finished.float().repeat_interleave(lengths)
    rewards = outcome_rewards(torch.tensor([0.0, 1.0], dtype=torch.float64), torch.ones(num_tokens), lengths)
    for seed in (0, 1):
        inputs = ValueInputs(random(num_tokens, seed), rewards, mask, lengths, torch.zeros(2, dtype=torch.float64))
        targets = estimate_values(inputs, gamma, 1.0).returns
        assert not targets[: window + 2].any()
        expected = gamma ** torch.arange(24, -1, -1, dtype=torch.float64)
        torch.testing.assert_close(targets[window + 2 :], expected)


def test_a_tail_that_leaves_the_loss_keeps_its_advantages() -> None:
    lengths, finished = torch.tensor([10, 10]), torch.tensor([False, True])
    values = random(20, 4)
    arguments = (values, torch.zeros(20), torch.ones(20), lengths, finished, 1.0, 0.95)
    advantages = extended_estimates(*arguments).advantages
    mask = without_tail(torch.ones(20), lengths, finished, 4)
    assert mask.tolist() == [1.0] * 6 + [0.0] * 4 + [1.0] * 10
    # Computed with a mask that lacks the tail, the advantages before it would be others.
    without = extended_estimates(values, torch.zeros(20), mask, lengths, finished, 1.0, 0.95).advantages
    assert not torch.allclose(advantages[:6], without[:6]) and torch.equal(advantages[10:], without[10:])


def test_a_window_as_long_as_the_response_is_gae() -> None:
    lengths, finished = torch.tensor([6, 11]), torch.tensor([True, True])
    rewards = outcome_rewards(torch.tensor([1.0, -1.0], dtype=torch.float64), torch.ones(17), lengths)
    inputs = ValueInputs(random(17, 5), rewards, torch.ones(17), lengths, torch.zeros(2, dtype=torch.float64))
    windows = extended_estimates(inputs.values, rewards, inputs.loss_mask, lengths, finished, 1.0, 0.9)
    assert torch.equal(windows.advantages, estimate_values(inputs, 1.0, 0.9).advantages)
