from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_dapo.algorithms.length_adaptive_lambda import (
    LAMBDA_RULES,
    FixedLambda,
    LengthAdaptiveLambda,
    WindowLambda,
    prospective_lengths,
)
from megatron_dapo.config.loader import config_from_dict
from megatron_dapo.config.rules import ConfigError

DONE = torch.tensor([True])


@given(st.integers(0, 100_000), st.floats(0.01, 2.0), st.floats(0.0, 0.99))
def test_at_least_the_floor_and_below_1_and_growing(length, alpha, floor):
    rule = LengthAdaptiveLambda(alpha, floor)
    here, next_one = float(rule(torch.tensor([length]), DONE)), float(rule(torch.tensor([length + 1]), DONE))
    assert floor <= here <= next_one < 1.0
    if here > floor:
        assert 1.0 / (1.0 - here) == pytest.approx(alpha * length, rel=1e-9)


def test_a_response_without_tokens_gets_the_floor():
    assert LengthAdaptiveLambda(0.05, 0.3)(torch.tensor([0]), DONE).tolist() == [0.3]


@pytest.mark.parametrize("window", [1, 7, 8192])
def test_half_a_window_is_added_if_the_response_continues(window):
    lengths, finished = torch.tensor([500, 500]), torch.tensor([True, False])
    assert prospective_lengths(lengths, finished, window).tolist() == [500, 500 + window // 2]
    expected = [1 - 1 / (0.05 * 500), 1 - 1 / (0.05 * (500 + window // 2))]
    assert WindowLambda(0.05, 0.0, window)(lengths, finished).tolist() == pytest.approx(expected)


def test_rules_by_name():
    lengths = torch.tensor([100, 10])
    both = torch.tensor([True, True])
    assert LAMBDA_RULES["fixed"](1.0)(lengths, both).tolist() == [1.0, 1.0]
    assert LAMBDA_RULES["length_adaptive"]()(lengths, both).tolist() == pytest.approx([0.8, 0.0])
    assert LAMBDA_RULES["window"]()(lengths, both).tolist() == pytest.approx([0.95, 0.95])
    with pytest.raises(ConfigError, match="expected 'fixed', 'length_adaptive' or 'window'"):
        config_from_dict(
            {
                "model": {"path": "m"},
                "data": {"train_paths": ["t"]},
                "advantage_estimation": {"lambda_rule": "adaptive"},
            }
        )


@pytest.mark.parametrize(
    "make",
    [
        lambda: FixedLambda(1.01),
        lambda: LengthAdaptiveLambda(0.0),
        lambda: LengthAdaptiveLambda(0.05, 1.0),
        lambda: WindowLambda(0.05, -0.1),
        lambda: WindowLambda(0.05, 0.95, 0),
    ],
)
def test_settings_out_of_range_are_refused(make):
    with pytest.raises(ValueError):
        make()
