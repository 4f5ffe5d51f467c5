"""Retention of checkpoints: last, every and best, separately and together, over whole runs."""

from __future__ import annotations

import itertools
import math

import pytest

from megatron_dapo.checkpoints.retention import KeepPolicy, best_step, most_checkpoints, steps_to_delete


def life(
    policy: KeepPolicy, interval: int, total_steps: int, evaluations: dict[str, dict[str, float]]
) -> tuple[list[int], int]:
    """Return what a run leaves and the most checkpoints that were there at a time."""
    kept: list[int] = []
    peak = 0
    for step in range(1, total_steps + 1):
        if step % interval and step != total_steps:
            continue
        kept.append(step)
        peak = max(peak, len(kept))
        seen = {name: value for name, value in evaluations.items() if int(name) <= step}
        doomed = steps_to_delete(policy, step, dict.fromkeys(kept, True), seen)
        assert step not in doomed and doomed == sorted(doomed, reverse=True)
        kept = [each for each in kept if each not in doomed]
    return kept, peak


def test_the_last_ones() -> None:
    assert life(KeepPolicy(2), 5, 23, {})[0] == [20, 23]


def test_every_k_steps_stay() -> None:
    assert life(KeepPolicy(2, every=10), 5, 40, {})[0] == [10, 20, 30, 35, 40]


@pytest.mark.parametrize("best_is, best", [("higher", 10), ("lower", 15)])
def test_the_best_stays_until_a_better_one(best_is: str, best: int) -> None:
    values = {5: 0.3, 10: 0.6, 15: 0.1, 20: 0.5}
    evaluations = {str(step): {"eval/avg_at_k": value} for step, value in values.items()}
    policy = KeepPolicy(1, best="eval/avg_at_k", best_is=best_is)
    assert life(policy, 5, 30, evaluations)[0] == [best, 30]
    # A better one replaces it.
    evaluations["25"] = {"eval/avg_at_k": 0.9 if best_is == "higher" else 0.0}
    assert life(policy, 5, 35, evaluations)[0] == [25, 35]


def test_what_was_not_evaluated_or_is_no_number_is_never_the_best() -> None:
    policy = KeepPolicy(1, best="eval/avg_at_k")
    evaluations = {"0": {"eval/avg_at_k": 1.0}, "5": {"eval/avg_at_k": math.nan}, "10": {"other": 3.0}}
    assert best_step(policy, [5, 10], evaluations) is None
    assert best_step(policy, [5, 10], {**evaluations, "10": {"eval/avg_at_k": 0.0}}) == 10
    # Of equal ones the newest, which has learned most.
    assert best_step(policy, [5, 10], dict.fromkeys(("5", "10"), {"eval/avg_at_k": 0.5})) == 10


def test_a_broken_one_does_not_count_and_is_kept_for_no_reason() -> None:
    policy = KeepPolicy(2, every=10, best="m")
    steps = {10: False, 20: True, 30: False, 35: True, 40: True}
    assert steps_to_delete(policy, 40, steps, {"10": {"m": 1.0}, "20": {"m": 0.0}}) == [30, 10]


def test_the_newest_stays_where_newer_steps_are_on_disk() -> None:
    # A run that resumed from step 5 because 10 was broken saves 6: it stays, and 10 does not count.
    assert steps_to_delete(KeepPolicy(1), 6, {10: False, 6: True, 5: True}, {}) == [5]
    assert 6 not in steps_to_delete(KeepPolicy(1), 6, {10: True, 6: True, 5: True}, {})


def test_the_most_at_a_time_is_never_exceeded_and_often_reached() -> None:
    evaluations = {"3": {"m": 1.0}, "6": {"m": 2.0}}
    exact = total = 0
    for last, interval, times, steps, best in itertools.product((1, 2, 3), (1, 3), (0, 1, 2, 4), (1, 7, 24), ("", "m")):
        policy = KeepPolicy(last, every=times * interval, best=best)
        peak = life(policy, interval, steps, evaluations)[1]
        most = most_checkpoints(policy, interval, steps)
        assert peak <= most
        exact, total = exact + (peak == most), total + 1
    assert exact > total / 2
