"""Ranks of a model among all ranks of a run."""

from __future__ import annotations

import pytest

from megatron_dapo.parallel.rank_set import RankSet


def test_ranks_of_a_set_count_from_0() -> None:
    ranks = RankSet(2, 3, 4, None)
    assert (list(ranks.ranks), ranks.is_member, ranks.rank) == ([2, 3, 4], True, 2)
    outside = RankSet(2, 3, 1, None)
    assert not outside.is_member
    with pytest.raises(AssertionError, match="rank 1 of the world is none of"):
        assert outside.rank
