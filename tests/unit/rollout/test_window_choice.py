"""Choice of groups if there are more windows than a step trains."""

from __future__ import annotations

import random

from megatron_dapo.rollout.windows import WindowGroup, choose_groups, contrast_first
from megatron_dapo.types import Prompt


def group(num_finished: int, accuracy_sum: float, num_waiting: int) -> WindowGroup:
    made = WindowGroup("g", Prompt("p", (), (1,), ""), 1, size=num_waiting)
    made.num_finished, made.accuracy_sum = num_finished, accuracy_sum
    return made


HALF, HALF_OPEN = group(4, 2.0, 0), group(2, 1.0, 14)
ALL_RIGHT, ALL_WRONG_OPEN, FRESH, CORNER = group(4, 4.0, 0), group(1, 0.0, 3), group(0, 0.0, 4), group(0, 0.0, 1)


def test_contrast_goes_first_then_the_most_unfinished_then_the_order_of_start() -> None:
    groups = [ALL_RIGHT, ALL_WRONG_OPEN, FRESH, HALF, HALF_OPEN, FRESH, ALL_RIGHT]
    assert contrast_first(groups) == [3, 4, 2, 5, 1, 0, 6]
    assert contrast_first([]) == []


def test_only_finished_responses_that_differ_are_contrast() -> None:
    assert [g.has_contrast for g in (HALF, HALF_OPEN, ALL_RIGHT, ALL_WRONG_OPEN, FRESH)] == [True, True] + [False] * 3


def test_groups_are_taken_whole_and_one_that_does_not_fit_is_passed_over() -> None:
    expected = {9: {0, 1, 2}, 8: {2, 1}, 4: {2}, 3: {1}, 0: set()}
    assert {room: choose_groups([ALL_RIGHT, CORNER, HALF], [4, 1, 4], room) for room in expected} == expected


def test_no_group_left_out_outranks_all_chosen_ones() -> None:
    """Groups left out did not fit after those of higher priority, at any capacity."""
    chance = random.Random(0)
    for _ in range(200):
        sizes = [chance.randint(1, 8) for _ in range(10)]
        groups = [group(done := chance.randint(0, 8), chance.randint(0, done), 8 - done) for _ in range(10)]
        room = chance.randint(0, 50)
        chosen = choose_groups(groups, sizes, room)
        assert sum(sizes[index] for index in chosen) <= room
        order = contrast_first(groups)
        assert sorted(order) == list(range(10))
        for place, index in enumerate(order):
            ahead = sum(sizes[other] for other in order[:place] if other in chosen)
            assert (index in chosen) == (ahead + sizes[index] <= room)
