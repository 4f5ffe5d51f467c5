"""The stop rule of value pretraining."""

from __future__ import annotations

import pytest

from megatron_dapo.algorithms.stop_rule import StopRule, rise

RULE = StopRule(num_steps=10, explained_variance_slope=0.005, loss_slope=0.05)


def test_a_line_rises_by_what_it_rises() -> None:
    assert rise([0.1 * step for step in range(11)]) == pytest.approx(1.0)
    assert rise([0.5]) == 0.0


def test_flat_series_end_it_and_not_before_the_least_number_of_steps() -> None:
    assert RULE.has_converged([[0.6, 0.2]] * 10)
    assert not RULE.has_converged([[0.6, 0.2]] * 9)


def test_it_continues_while_either_improves() -> None:
    explained_rises = [[0.01 * step, 0.2] for step in range(10)]
    loss_falls = [[0.6, 0.5 - 0.02 * step] for step in range(10)]
    assert not RULE.has_converged(explained_rises) and not RULE.has_converged(loss_falls)


def test_only_the_newest_steps_count() -> None:
    assert RULE.has_converged([[0.1 * step, 1.0 - 0.1 * step] for step in range(6)] + [[0.6, 0.4]] * 10)
