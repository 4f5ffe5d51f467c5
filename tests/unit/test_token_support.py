"""The flat form of supports: any rows come back, and parts join like the rows they stand for."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dapo.token_support import FILLER, followed_by, join_supports, num_supports, support_table, supports_between
from tests.examples import examples

ROWS = st.lists(st.lists(st.integers(0, 2**31 - 2), max_size=6), max_size=12)


def flat_of(rows: list[list[int]]) -> np.ndarray:
    return join_supports(np.array([len(row) for row in rows], np.int64), np.array([word for row in rows for word in row], np.int64))


def rows_of(flat: np.ndarray) -> list[list[int]]:
    return [[word for word in row if word != FILLER] for row in support_table(torch.from_numpy(flat)).tolist()]


@given(ROWS, ROWS)
@settings(max_examples=examples(300), deadline=None)
def test_rows_come_back_and_parts_join(first: list[list[int]], second: list[list[int]]) -> None:
    assert flat_of(first).dtype == np.int32 and rows_of(flat_of(first)) == first
    assert num_supports(flat_of(first)) == len(first)
    joined = followed_by(flat_of(first), len(first), flat_of(second), len(second))
    assert rows_of(joined) == first + second
    cut = len(second) // 2
    assert rows_of(supports_between(joined, len(first), len(first) + cut)) == second[:cut]
    assert rows_of(supports_between(joined, 0, len(first))) == first
    assert rows_of(followed_by(None, 3, flat_of(second), len(second))) == [[]] * 3 + second
    assert rows_of(followed_by(flat_of(first), len(first), None, 2)) == first + [[]] * 2


def test_the_whole_vocabulary_takes_no_array() -> None:
    assert followed_by(None, 3, None, 4) is None and supports_between(None, 1, 2) is None
