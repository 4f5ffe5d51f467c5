from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dapo.algorithms import linear_scan
from megatron_dapo.algorithms.gae import ValueInputs, estimate_values
from tests.examples import examples

FACTORS = st.sampled_from([0.0, 0.3, 0.95, 0.99, 1.0])
LENGTHS = st.lists(st.integers(0, 30), min_size=1, max_size=6)


def batch(lengths: list[int], seed: int, masked_share: float = 0.3, dtype=torch.float64) -> ValueInputs:
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(lengths)

    def drawn(count: int) -> torch.Tensor:
        return torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)

    mask = (torch.rand(num_tokens, generator=generator) >= masked_share).float()
    return ValueInputs(drawn(num_tokens), drawn(num_tokens), mask, torch.tensor(lengths), drawn(len(lengths)))


def by_definition(inputs: ValueInputs, gamma: float, lambdas: list[float]) -> tuple[list[float], list[float]]:
    """The double sum over deltas of each sequence's trained tokens."""
    advantages, returns = [0.0] * inputs.values.numel(), [0.0] * inputs.values.numel()
    start = 0
    for i, length in enumerate(inputs.lengths.tolist()):
        places = [t for t in range(start, start + length) if inputs.loss_mask[t]]
        values = [float(inputs.values[t]) for t in places] + [float(inputs.bootstrap[i])]
        deltas = [float(inputs.rewards[t]) + gamma * values[j + 1] - values[j] for j, t in enumerate(places)]
        for j, t in enumerate(places):
            advantages[t] = sum((gamma * lambdas[i]) ** (k - j) * deltas[k] for k in range(j, len(deltas)))
            returns[t] = advantages[t] + values[j]
        start += length
    return advantages, returns


def assert_close(actual: torch.Tensor, expected) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-10)


@given(LENGTHS, st.integers(0, 99), FACTORS, FACTORS, st.sampled_from([0.0, 0.4, 1.0]))
@settings(max_examples=examples(150), deadline=None)
def test_equals_the_definition(lengths, seed, gamma, lam, masked_share):
    inputs = batch(lengths, seed, masked_share)
    estimates = estimate_values(inputs, gamma, lam)
    advantages, returns = by_definition(inputs, gamma, [lam] * len(lengths))
    assert_close(estimates.advantages, advantages)
    assert_close(estimates.returns, returns)


@given(LENGTHS, st.integers(0, 99), FACTORS)
@settings(max_examples=examples(60), deadline=None)
def test_a_lambda_for_each_sequence(lengths, seed, gamma):
    inputs = batch(lengths, seed)
    lambdas = torch.rand(len(lengths), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    estimates = estimate_values(inputs, gamma, lambdas)
    advantages, returns = by_definition(inputs, gamma, lambdas.tolist())
    assert_close(estimates.advantages, advantages)
    assert_close(estimates.returns, returns)


@given(LENGTHS, st.integers(0, 99), FACTORS)
@settings(max_examples=examples(60), deadline=None)
def test_masked_tokens_might_as_well_not_be_there(lengths, seed, lam):
    inputs = batch(lengths, seed, 0.5)
    trained = inputs.loss_mask > 0
    counts = torch.tensor([int(part.sum()) for part in trained.split(lengths)])
    kept = ValueInputs(
        inputs.values[trained], inputs.rewards[trained], torch.ones(int(counts.sum())), counts, inputs.bootstrap
    )
    whole, alone = estimate_values(inputs, 0.9, lam), estimate_values(kept, 0.9, lam)
    assert torch.equal(whole.advantages[trained], alone.advantages)
    assert not whole.advantages[~trained].any() and not whole.returns[~trained].any()


def test_values_at_masked_tokens_do_not_matter():
    inputs = batch([5, 8], 3, 0.5)
    masked = inputs.loss_mask == 0
    assert masked.any()
    spoilt = inputs.values.masked_fill(masked, torch.nan)
    dirty = ValueInputs(
        spoilt, inputs.rewards.masked_fill(masked, torch.inf), inputs.loss_mask, inputs.lengths, inputs.bootstrap
    )
    for key in ("advantages", "returns"):
        clean = getattr(estimate_values(inputs, 0.9, 0.95), key)
        assert torch.equal(getattr(estimate_values(dirty, 0.9, 0.95), key), clean)


def test_the_order_of_sequences_does_not_matter():
    first, second = batch([7], 0), batch([300], 1)
    joined = ValueInputs(*(torch.cat(pair) for pair in zip(vars(first).values(), vars(second).values(), strict=True)))
    together = estimate_values(joined, 0.99, 0.95).advantages
    apart = [estimate_values(each, 0.99, 0.95).advantages for each in (first, second)]
    torch.testing.assert_close(together, torch.cat(apart), rtol=1e-12, atol=1e-12)


def test_a_padded_batch_is_a_flattened_one():
    rows, width = [4, 9, 1], 9
    packed = batch(rows, 5, 0.0)

    def padded(tokens: torch.Tensor) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(tokens.split(rows), batch_first=True)

    flat = [padded(each).flatten() for each in (packed.values, packed.rewards, packed.loss_mask)]
    result = estimate_values(ValueInputs(*flat, torch.full((3,), width), packed.bootstrap), 0.99, 0.95)
    expected = padded(estimate_values(packed, 0.99, 0.95).advantages)
    torch.testing.assert_close(result.advantages.view(3, width), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_monte_carlo_returns_are_exact_whatever_the_values(dtype):
    lengths = [1, 20_000, 37]
    values = 1e6 * torch.randn(sum(lengths), generator=torch.Generator().manual_seed(0)).to(dtype)
    outcomes = torch.tensor([0.1, -1.0, 0.3], dtype=dtype)
    rewards = torch.zeros_like(values)
    rewards[torch.tensor(lengths).cumsum(0) - 1] = outcomes
    inputs = ValueInputs(values, rewards, torch.ones(sum(lengths)), torch.tensor(lengths), torch.zeros(3))
    assert torch.equal(estimate_values(inputs, 1.0, 1.0).returns, outcomes.repeat_interleave(inputs.lengths))
    without_values = ValueInputs(0 * values, rewards, inputs.loss_mask, inputs.lengths, inputs.bootstrap)
    assert torch.equal(estimate_values(inputs, 0.99, 1.0).returns, estimate_values(without_values, 0.99, 1.0).returns)


def test_a_batch_of_many_tiles_equals_its_sequences_one_by_one():
    """Sequences that end at, before and after the end of a tile, and one that spans several."""
    tile = linear_scan.LANE_LENGTH * linear_scan.MAX_LANES
    lengths = [tile - 1, 1, 5, tile - 5, 2 * tile + 17, 1, 1, 40]
    inputs = batch(lengths, 0, 0.0)
    lambdas = torch.linspace(0.3, 0.9999, len(lengths), dtype=torch.float64)
    actual = estimate_values(inputs, 0.999, lambdas).advantages.split(lengths)
    parts = zip(inputs.values.split(lengths), inputs.rewards.split(lengths), strict=True)
    for i, (value, reward) in enumerate(parts):
        following = torch.cat([value[1:], inputs.bootstrap[i : i + 1]])
        deltas = (reward + 0.999 * following - value).tolist()
        expected, carried = [], 0.0
        for delta in reversed(deltas):
            carried = delta + 0.999 * float(lambdas[i]) * carried
            expected.append(carried)
        torch.testing.assert_close(actual[i], torch.tensor(expected[::-1], dtype=torch.float64), rtol=1e-9, atol=1e-9)


def test_float32_over_a_long_response_stays_close_to_float64():
    inputs = batch([20_000, 15_000], 0, 0.0)
    single = ValueInputs(
        inputs.values.float(), inputs.rewards.float() * 0, inputs.loss_mask, inputs.lengths, inputs.bootstrap
    )
    double = ValueInputs(
        single.values.double(), single.rewards.double(), inputs.loss_mask, inputs.lengths, inputs.bootstrap.float()
    )
    lambdas = torch.tensor([0.9999, 0.95])
    difference = estimate_values(single, 1.0, lambdas).advantages - estimate_values(double, 1.0, lambdas).advantages
    assert float(difference.abs().max()) < 2e-5


def test_half_precision_values_are_computed_in_single():
    estimates = estimate_values(batch([5], 0, dtype=torch.bfloat16), 1.0, 0.95)
    assert estimates.advantages.dtype == torch.float32


def test_one_token_and_none():
    one = ValueInputs(torch.tensor([0.25]), torch.tensor([1.0]), torch.ones(1), torch.tensor([1]), torch.tensor([0.5]))
    estimates = estimate_values(one, 0.5, 0.95)
    assert (estimates.advantages.tolist(), estimates.returns.tolist()) == ([1.0], [1.25])
    empty = ValueInputs(*(torch.zeros(0) for _ in range(3)), torch.zeros(0, dtype=torch.int64), torch.zeros(0))
    assert estimate_values(empty, 1.0, 0.95).advantages.shape == (0,)


def test_no_gradient_flows_through():
    values = torch.ones(3, requires_grad=True)
    inputs = ValueInputs(values, torch.ones(3), torch.ones(3), torch.tensor([3]), torch.zeros(1))
    assert not estimate_values(inputs, 1.0, 0.95).advantages.requires_grad


@pytest.mark.parametrize(("gamma", "lam"), [(1.1, 0.9), (-0.1, 0.9), (1.0, 1.5), (float("nan"), 0.9)])
def test_factors_out_of_range_are_refused(gamma, lam):
    with pytest.raises(ValueError, match=r"must lie in \[0, 1\]"):
        estimate_values(batch([3], 0), gamma, lam)


def test_a_lambda_out_of_range_among_many_is_refused():
    with pytest.raises(ValueError, match=r"lambda is -19"):
        estimate_values(batch([3, 4], 0), 1.0, torch.tensor([0.5, -19.0]))


def test_lambdas_of_another_number_of_sequences_are_refused():
    with pytest.raises(AssertionError, match=r"\(3,\) lambdas, 2 lengths"):
        estimate_values(batch([3, 4], 0), 1.0, torch.ones(3))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused_and_counted(bad):
    inputs = batch([5, 5], 0, 0.0)
    inputs.values[[1, 7]] = bad
    with pytest.raises(ValueError, match="2 of 10 entries of value are not finite"):
        estimate_values(inputs, 1.0, 0.95)
