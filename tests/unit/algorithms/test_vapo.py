from __future__ import annotations

import math

import pytest
import torch

from megatron_dapo.algorithms.vapo import positive_example_loss, positive_token_weights, positive_tokens

LENGTHS = torch.tensor([3, 0, 5, 2])
POSITIVE = torch.tensor([True, True, False, True])


def gradient(cuts: list[list[int]]) -> tuple[float, torch.Tensor]:
    """Loss and gradient of all log-probs, accumulated over micro-batches of whole samples."""
    logprobs = (-torch.rand(10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).requires_grad_()
    rows = logprobs.split(LENGTHS.tolist())
    count, total = int(positive_tokens(LENGTHS, POSITIVE).sum()), 0.0
    for samples in cuts:
        lengths, positive = LENGTHS[samples], POSITIVE[samples]
        tokens = torch.cat([rows[i] for i in samples])
        losses, _ = positive_example_loss(tokens, torch.ones(len(tokens)), positive.repeat_interleave(lengths))
        weights = positive_token_weights(lengths, positive, count, 0.1).repeat_interleave(lengths)
        loss = (weights * losses).sum()
        loss.backward(retain_graph=True)
        total += float(loss.detach())
    return total, logprobs.grad


def test_every_positive_token_pulls_alike_and_no_other():
    _, slopes = gradient([[0, 1, 2, 3]])
    expected = torch.tensor([1.0] * 3 + [0.0] * 5 + [1.0] * 2, dtype=torch.float64) * -0.1 / 5
    torch.testing.assert_close(slopes, expected, rtol=1e-12, atol=1e-15)


def test_the_cut_into_micro_batches_does_not_matter():
    loss, slopes = gradient([[0, 1, 2, 3]])
    for cuts in ([[0], [1], [2], [3]], [[2, 3], [0, 1]]):
        other_loss, other_slopes = gradient(cuts)
        assert other_loss == pytest.approx(loss)
        torch.testing.assert_close(other_slopes, slopes, rtol=1e-12, atol=1e-15)


def test_no_correct_response_costs_nothing():
    weights = positive_token_weights(LENGTHS, torch.zeros(4, dtype=torch.bool), 0, 0.1)
    assert weights.tolist() == [0.0] * 4 and weights.dtype == torch.float64


def test_masked_tokens_of_correct_responses_stay_out():
    logprobs = torch.tensor([-0.5, math.nan, -2.0], requires_grad=True)
    losses, sums = positive_example_loss(logprobs, torch.tensor([1.0, 0.0, 1.0]), torch.tensor([True, True, False]))
    losses.sum().backward()
    assert losses.tolist() == [0.5, 0.0, 0.0] and logprobs.grad.tolist() == [-1.0, 0.0, 0.0]
    assert {key: float(value) for key, value in sums.items()} == {"num_positive_tokens": 1.0, "positive_nll_sum": 0.5}


def test_counts_of_a_part_for_the_whole_and_bad_coefficients_are_refused():
    with pytest.raises(AssertionError, match="5 positive tokens here, 4 in the whole"):
        positive_token_weights(LENGTHS, POSITIVE, 4, 0.1)
    for bad in (-0.1, math.nan, math.inf):
        with pytest.raises(ValueError, match="at least 0"):
            positive_token_weights(LENGTHS, POSITIVE, 5, bad)
