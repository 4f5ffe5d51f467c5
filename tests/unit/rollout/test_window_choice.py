"""Choice of groups if there are more windows than a step trains."""

from __future__ import annotations

import random

from megatron_dapo.rollout.windows import GroupProgress, choose_groups, contrast_first

HALF = GroupProgress(num_windows=4, num_finished=4, accuracy_sum=2.0, num_unfinished=0)
HALF_OPEN = GroupProgress(num_windows=4, num_finished=2, accuracy_sum=1.0, num_unfinished=14)
ALL_RIGHT = GroupProgress(num_windows=4, num_finished=4, accuracy_sum=4.0, num_unfinished=0)
ALL_WRONG_OPEN = GroupProgress(num_windows=4, num_finished=1, accuracy_sum=0.0, num_unfinished=3)
FRESH = GroupProgress(num_windows=4, num_finished=0, accuracy_sum=0.0, num_unfinished=4)
CORNER = GroupProgress(num_windows=1, num_finished=0, accuracy_sum=0.0, num_unfinished=1)


def test_contrast_goes_first_then_the_most_unfinished_then_the_order_of_start() -> None:
    groups = [ALL_RIGHT, ALL_WRONG_OPEN, FRESH, HALF, HALF_OPEN, FRESH, ALL_RIGHT]
    assert contrast_first(groups) == [3, 4, 2, 5, 1, 0, 6]
    assert contrast_first([]) == []


def test_only_finished_responses_that_differ_are_contrast() -> None:
    assert [g.has_contrast for g in (HALF, HALF_OPEN, ALL_RIGHT, ALL_WRONG_OPEN, FRESH)] == [True, True] + [False] * 3


def test_groups_are_taken_whole_and_one_that_does_not_fit_is_passed_over() -> None:
    groups = [ALL_RIGHT, CORNER, HALF]
    assert choose_groups(groups, 9) == {0, 1, 2}
    assert choose_groups(groups, 8) == {2, 1}
    assert choose_groups(groups, 4) == {2}
    assert choose_groups(groups, 3) == {1}
    assert choose_groups(groups, 0) == set()


def test_no_group_left_out_outranks_all_chosen_ones() -> None:
    """Groups left out did not fit after those of higher priority, at any capacity."""
    chance = random.Random(0)
    for _ in range(200):
        groups = [
            GroupProgress(
                chance.randint(1, 8), finished := chance.randint(0, 8), chance.randint(0, finished), 8 - finished
            )
            for _ in range(10)
        ]
        room = chance.randint(0, 50)
        chosen = choose_groups(groups, room)
        assert sum(groups[index].num_windows for index in chosen) <= room
        order = contrast_first(groups)
        assert sorted(order) == list(range(10))
        for place, index in enumerate(order):
            ahead = sum(groups[other].num_windows for other in order[:place] if other in chosen)
            assert (index in chosen) == (ahead + groups[index].num_windows <= room)
