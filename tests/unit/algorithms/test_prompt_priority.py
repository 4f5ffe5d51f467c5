"""The upper confidence bound of a prompt; its golden values are in test_golden.py."""

from __future__ import annotations

import math

import pytest

from megatron_dapo.algorithms.prompt_priority import ucb_priority


def test_mixed_outcomes_and_little_knowledge_go_first() -> None:
    mixed, solved, failed = ([1.0, -1.0] * 8, [1.0] * 16, [-1.0] * 16)
    assert ucb_priority(mixed, 16, 50) > ucb_priority(solved, 16, 50) == ucb_priority(failed, 16, 50)
    assert ucb_priority(solved, 16, 50) > ucb_priority(solved * 4, 64, 50)
    assert ucb_priority(solved, 16, 500) > ucb_priority(solved, 16, 50)
    assert ucb_priority([], 0, 1) == math.inf


def test_old_scores_are_forgotten_but_counted() -> None:
    scores = [1.0] * 100 + [-1.0] * 50 + [1.0] * 50
    assert ucb_priority(scores, 200, 9) == pytest.approx(1.0 + 0.25 * math.sqrt(math.log(9) / 200))
    assert ucb_priority(scores[100:], 200, 9) == ucb_priority(scores, 200, 9)
    assert ucb_priority(scores, 200, 9, memory=50) == pytest.approx(0.25 * math.sqrt(math.log(9) / 200))
    assert ucb_priority(scores, 200, 9, exploration=0.0) == 1.0
    assert ucb_priority([0.5], 1, 1) == 0.5, "nothing is explored in the first step"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0.0], 1, 0), "step = 0"),
        (([0.0, 1.0], 1, 3), "2 scores were given, but num_scores = 1"),
        (([0.0, 2.0], 2, 3), r"span 0.0..2.0, they must be within \[-1, 1\]"),
    ],
)
def test_senseless_arguments_are_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ucb_priority(*arguments)
