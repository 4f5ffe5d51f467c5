"""The groups of a layout that the pre-flight measures, and the slow one among them."""

from __future__ import annotations

from megatron_dapo.cli.preflight import groups_of, judge_groups
from megatron_dapo.parallel.layout import ParallelLayout


def test_groups_of_a_layout_are_those_of_its_coordinates() -> None:
    layout = ParallelLayout(16, tensor=2, pipeline=2, context=2)
    tensor, data = groups_of(layout)
    for groups, size in ((tensor, 2), (data, 4)):
        assert sorted(rank for group in groups for rank in group) == list(range(16))
        assert {len(group) for group in groups} == {size}
    assert all(len({layout.coordinates(rank).tensor for rank in group}) == 2 for group in tensor)
    assert all(len({layout.coordinates(rank).pipeline for rank in group}) == 1 for group in data)
    assert tensor[0] == [0, 1], "neighbors, on one node"


def test_a_data_parallel_group_with_a_slow_card_is_named() -> None:
    """Every group spans all nodes; each of them uses other cards."""
    figures = {tuple(range(first, 64, 8)): 40e9 for first in range(8)}
    assert judge_groups(figures, 0.6) == [] and judge_groups({}, 0.6) == []
    [line] = judge_groups({**figures, tuple(range(3, 64, 8)): 12e9}, 0.6)
    assert line == (
        "data-parallel group of ranks 3, 11, 19, 27, ...: all-reduce 12 GB/s (30 % of the median): SLOW"
    )
