from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dapo.algorithms.aggregation import (
    AGGREGATIONS,
    global_denominators,
    sample_token_weights,
)
from tests.examples import examples

lengths_and_cut = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=12)


def brute_force(mode: str, losses: list[torch.Tensor], groups: list[int], max_length: int) -> torch.Tensor:
    """The formulas as they are read, sample by sample."""
    trained = [(loss, group) for loss, group in zip(losses, groups) if loss.numel()]
    if not trained:
        return torch.zeros((), dtype=torch.float64)
    total = torch.cat([loss for loss, _ in trained]).sum()
    if mode in ("token_mean", "rollout_token_mean"):  # one mini-batch is the whole rollout
        return total / sum(loss.numel() for loss, _ in trained)
    if mode == "sample_mean":
        return torch.stack([loss.mean() for loss, _ in trained]).mean()
    if mode == "dr_grpo":
        return total / (len(losses) * max_length)
    if mode == "seq_sum_mean":
        return torch.stack([loss.sum() for loss, _ in trained]).mean()
    by_group = [torch.cat([loss for loss, group in trained if group == wanted]) for wanted in {g for _, g in trained}]
    return torch.stack([loss.mean() for loss in by_group]).mean()


@settings(max_examples=examples(80), deadline=None)
@given(lengths_and_cut, st.sampled_from(sorted(AGGREGATIONS)))
def test_loss_and_gradient_do_not_depend_on_the_cut_into_micro_batches(samples, mode):
    """Each sample is (length, group, micro-batch): gradients summed over any micro-batches are those of the formula."""
    lengths, groups, parts = zip(*samples)
    generator = torch.Generator().manual_seed(len(samples))
    parameter = torch.randn(3, generator=generator, dtype=torch.float64).requires_grad_()
    features = [torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in lengths]

    def token_losses() -> list[torch.Tensor]:
        return [torch.tanh(feature @ parameter) for feature in features]

    expected = brute_force(mode, token_losses(), list(groups), 16)
    (expected_gradient,) = (
        torch.autograd.grad(expected, parameter) if expected.requires_grad else (torch.zeros_like(parameter),)
    )
    trained, group_index = torch.tensor(lengths), torch.tensor(groups)
    denominators = global_denominators(trained, group_index)
    loss, gradient = 0.0, torch.zeros_like(parameter)
    for part in set(parts):
        chosen = [index for index, where in enumerate(parts) if where == part]
        weights = sample_token_weights(mode, trained[chosen], group_index[chosen], denominators, 16)
        losses = token_losses()
        part_loss = sum((weight * losses[index].sum() for weight, index in zip(weights, chosen)), parameter.sum() * 0)
        loss += float(part_loss.detach())
        gradient += torch.autograd.grad(part_loss, parameter)[0]
    assert loss == pytest.approx(float(expected.detach()), rel=1e-10, abs=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("mode", sorted(AGGREGATIONS))
def test_a_mini_batch_without_tokens_has_zero_weights(mode):
    trained, groups = torch.tensor([0, 0]), torch.tensor([4, 5])
    weights = sample_token_weights(mode, trained, groups, global_denominators(trained, groups), 10)
    assert weights.tolist() == [0.0, 0.0]
    none = torch.zeros(0, dtype=torch.int64)
    assert sample_token_weights(mode, none, none, global_denominators(none, none), 10).numel() == 0


def test_empty_samples_do_not_dilute_the_others_except_under_the_constant_divisor():
    trained, groups = torch.tensor([4, 0, 0]), torch.tensor([0, 0, 1])
    denominators = global_denominators(trained, groups)
    for mode, weight in {"token_mean": 1 / 4, "sample_mean": 1 / 4, "per_group": 1 / 4, "seq_sum_mean": 1.0}.items():
        assert sample_token_weights(mode, trained, groups, denominators, 8).tolist() == [weight, 0.0, 0.0]
    assert sample_token_weights("dr_grpo", trained, groups, denominators, 8).tolist() == [1 / 24, 0.0, 0.0]


def test_a_group_that_straddles_mini_batches_counts_what_it_has_there():
    lengths, groups = torch.tensor([2, 6, 5]), torch.tensor([3, 3, 8])
    for part, expected in ((slice(0, 1), [1 / 2]), (slice(1, 3), [1 / 12, 1 / 10])):
        denominators = global_denominators(lengths[part], groups[part])
        weights = sample_token_weights("per_group", lengths[part], groups[part], denominators, 8)
        torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float64))


def test_dr_grpo_divisor_is_large_without_overflow():
    trained = torch.full((8192,), 20480, dtype=torch.int32)
    denominators = global_denominators(trained, torch.arange(8192))
    assert denominators.num_tokens == 8192 * 20480
    weights = sample_token_weights("dr_grpo", trained, torch.arange(8192), denominators, 20480)
    assert float(weights[0]) == 1 / (8192 * 20480)


def test_errors_name_the_fault():
    trained, groups = torch.tensor([1, 2]), torch.tensor([0, 1])
    denominators = global_denominators(trained, groups)
    with pytest.raises(ValueError, match="max_length 0"):
        sample_token_weights("dr_grpo", trained, groups, denominators, 0)
    with pytest.raises(ValueError, match="group 9 is not among the 2 groups"):
        sample_token_weights("per_group", trained, torch.tensor([0, 9]), denominators, 8)


def test_a_rollout_weight_spans_all_mini_batches():
    trained, groups = torch.tensor([4, 2]), torch.tensor([0, 1])

    def weights(mode, *rollout):
        return sample_token_weights(mode, trained, groups, global_denominators(trained, groups, *rollout), 8).tolist()

    assert weights("rollout_token_mean", 12, 2) == weights("token_mean"), "mini-batches are equal"
    assert weights("rollout_token_mean", 30, 3) == [3 / 30, 3 / 30]
    with pytest.raises(ValueError, match="at least 1"):
        global_denominators(trained, groups, 12, 0)
