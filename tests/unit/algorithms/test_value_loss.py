from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dapo.algorithms.aggregation import global_denominators, sample_token_weights
from megatron_dapo.algorithms.value_loss import ValueLossInputs, value_loss
from megatron_dapo.config.algorithm_schema import CriticConfig
from megatron_dapo.config.loader import config_from_dict
from megatron_dapo.config.rules import ConfigError
from megatron_dapo.config.validator import require_valid

SQUARED, CLIPPED = CriticConfig(loss="squared"), CriticConfig(loss="clipped")
TPPO_CLIPPED = CriticConfig(loss="clipped", clip_value_low=0.5, clip_value_high=0.6)
NUMBERS = st.floats(-3, 3, allow_nan=False)


def inputs_of(values, old_values, returns, mask=None) -> ValueLossInputs:
    values = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(len(values)) if mask is None else torch.tensor(mask)
    others = (torch.tensor(each, dtype=torch.float64) for each in (old_values, returns))
    return ValueLossInputs(values, *others, mask)


def by_definition(value: float, old: float, target: float, low: float, high: float) -> float:
    clipped = min(max(value, old - low), old + high)
    return 0.5 * max((value - target) ** 2, (clipped - target) ** 2)


@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=20))
@settings(deadline=None)
def test_clipped_loss_and_its_gradient(rows):
    inputs = inputs_of(*zip(*rows, strict=True))
    losses, metrics = value_loss(TPPO_CLIPPED, inputs)
    expected = [by_definition(*row, 0.5, 0.6) for row in rows]
    assert losses.tolist() == pytest.approx(expected, abs=1e-12)
    (gradient,) = torch.autograd.grad(losses.sum(), inputs.values)
    for (value, old, target), slope in zip(rows, gradient.tolist(), strict=True):
        clipped = min(max(value, old - 0.5), old + 0.6)
        held = abs(clipped - target) > abs(value - target)
        assert slope == (0.0 if held else pytest.approx(value - target, abs=1e-12))
    assert float(metrics["value_loss_sum"]) == pytest.approx(sum(expected))


def test_gradient_by_finite_differences():
    generator = torch.Generator().manual_seed(0)
    values, old, target = (torch.randn(50, generator=generator, dtype=torch.float64) for _ in range(3))
    for section in (SQUARED, TPPO_CLIPPED):

        def total(values, section=section):
            return value_loss(section, ValueLossInputs(values, old, target, torch.ones(50)))[0]

        assert torch.autograd.gradcheck(total, values.clone().requires_grad_())


@pytest.mark.parametrize(
    ("value", "target", "slope"),
    [
        (0.6, 2.0, -1.4),  # exactly at the upper bound: it passes
        (0.7, 2.0, 0.0),  # beyond it, toward the target: held
        (0.7, -1.0, 1.7),  # beyond it, away from the target: pulled back
        (-0.5, -2.0, 1.5),  # exactly at the lower bound
        (-0.7, -2.0, 0.0),
        (-0.7, 1.0, -1.7),
    ],
)
def test_bounds_hold_only_what_moves_toward_its_target(value, target, slope):
    inputs = inputs_of([value], [0.0], [target])
    losses, metrics = value_loss(TPPO_CLIPPED, inputs)
    (gradient,) = torch.autograd.grad(losses.sum(), inputs.values)
    assert gradient.item() == pytest.approx(slope)
    held = [float(metrics["value_clip_low_sum"]), float(metrics["value_clip_high_sum"])]
    assert held == [float(slope == 0 and value < 0), float(slope == 0 and value > 0)]


@pytest.mark.parametrize("section", [SQUARED, CLIPPED])
def test_masked_tokens_carry_nothing_even_where_they_are_not_numbers(section):
    inputs = inputs_of([1.0, math.nan], [1.0, math.nan], [0.5, math.inf], [1.0, 0.0])
    losses, metrics = value_loss(section, inputs)
    (gradient,) = torch.autograd.grad(losses.sum(), inputs.values)
    assert losses.tolist() == [0.125, 0.0] and gradient.tolist() == [0.5, 0.0]
    sums = {key: float(value) for key, value in metrics.items()}
    assert sums == {
        "num_value_tokens": 1.0,
        "value_loss_sum": 0.125,
        "value_sum": 1.0,
        "return_sum": 0.5,
        "value_clip_low_sum": 0.0,
        "value_clip_high_sum": 0.0,
    }


@pytest.mark.parametrize("mode", ["token_mean", "sample_mean"])
def test_global_denominators_make_any_cut_the_same(mode):
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([1, 7, 0, 12])
    starts = [0, 1, 8, 8]
    values, old, target = (torch.randn(20, generator=generator, dtype=torch.float64) for _ in range(3))
    denominators = global_denominators(lengths, torch.arange(4))
    weights = sample_token_weights(mode, lengths, torch.arange(4), denominators, 12)

    def gradient(cuts: list[list[int]]) -> torch.Tensor:
        leaf = values.clone().requires_grad_()
        for samples in cuts:
            tokens = torch.cat([torch.arange(starts[i], starts[i] + int(lengths[i])) for i in samples])
            inputs = ValueLossInputs(leaf[tokens], old[tokens], target[tokens], torch.ones(len(tokens)))
            losses, _ = value_loss(CLIPPED, inputs)
            (weights[samples].repeat_interleave(lengths[samples]) * losses).sum().backward()
        return leaf.grad

    whole = gradient([[0, 1, 2, 3]])
    torch.testing.assert_close(gradient([[3], [2], [0], [1]]), whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient([[0, 3], [1, 2]]), whole, rtol=1e-12, atol=1e-12)
    assert whole.abs().sum() > 0


def test_all_masked_and_unknown_and_bad_bounds():
    inputs = inputs_of([1.0], [0.0], [0.0], [0.0])
    assert value_loss(CLIPPED, inputs)[0].tolist() == [0.0]
    minimal = {"model": {"path": "m"}, "data": {"train_paths": ["t"]}}
    with pytest.raises(ConfigError, match="expected 'squared' or 'clipped'"):
        config_from_dict({**minimal, "critic": {"loss": "huber"}})
    with pytest.raises(ConfigError, match="critic.clip_value_low > 0"):
        require_valid(config_from_dict({**minimal, "critic": {"clip_value_low": 0.0}}), 1, None)
