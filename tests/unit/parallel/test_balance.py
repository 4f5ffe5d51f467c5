"""Partitions: complete, within their limits and nearly even."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dapo.parallel.balance import balanced_partition, fewest_parts, spread

sizes_strategy = st.lists(st.integers(1, 100), min_size=1, max_size=60)


def best_largest_sum(sizes: list[int], num_parts: int) -> int:
    """Try every assignment."""
    best = sum(sizes)
    for choice in product(range(num_parts), repeat=len(sizes)):
        best = min(
            best,
            max(sum(size for size, part in zip(sizes, choice, strict=True) if part == p) for p in range(num_parts)),
        )
    return best


@given(sizes_strategy, st.integers(1, 12))
def test_balanced_partition_is_complete_without_empty_parts(sizes, num_parts) -> None:
    parts = balanced_partition(sizes, num_parts)
    assert sorted(index for part in parts for index in part) == list(range(len(sizes)))
    assert len(parts) == num_parts and (all(parts) or len(sizes) < num_parts)
    assert parts == balanced_partition(list(sizes), num_parts)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(1, 3))
def test_balanced_partition_keeps_the_known_bound(sizes, num_parts) -> None:
    largest = max(sum(sizes[index] for index in part) for part in balanced_partition(sizes, num_parts))
    assert largest <= (4 / 3 - 1 / (3 * num_parts)) * best_largest_sum(sizes, num_parts) + 1e-9


@given(sizes_strategy, st.integers(1, 12), st.integers(0, 3))
def test_balanced_partition_respects_the_item_limit(sizes, num_parts, slack) -> None:
    limit = -(-len(sizes) // num_parts) + slack
    parts = balanced_partition(sizes, num_parts, limit)
    assert max(map(len, parts)) <= limit and sum(map(len, parts)) == len(sizes)


def test_too_few_places_are_an_error() -> None:
    with pytest.raises(ValueError, match="7 items do not fit into 3 parts of at most 2; allow at least 3"):
        balanced_partition([1] * 7, 3, 2)


@given(sizes_strategy, st.integers(100, 300), st.integers(1, 8))
def test_fewest_parts_keeps_capacity_and_item_limit(sizes, capacity, limit) -> None:
    parts = fewest_parts(sizes, capacity, limit)
    assert sorted(index for part in parts for index in part) == list(range(len(sizes)))
    assert all(0 < len(part) <= limit and sum(sizes[index] for index in part) <= capacity for part in parts)
    assert len(fewest_parts(sizes, capacity)) <= 11 / 9 * (2 * sum(sizes) // capacity + 1) + 1


@given(sizes_strategy, st.data())
def test_spread_never_makes_a_part_larger(sizes, data) -> None:
    parts = fewest_parts(sizes, 150)
    num_parts = data.draw(st.integers(len(parts), len(sizes)))
    wider = spread(parts, sizes, num_parts)
    assert sorted(index for part in wider for index in part) == list(range(len(sizes)))
    assert len(wider) == num_parts and all(wider)
    assert max(sum(sizes[i] for i in part) for part in wider) <= max(sum(sizes[i] for i in part) for part in parts)
