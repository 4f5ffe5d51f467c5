"""The tree of small groups: every rank is reached, by few connections a rank; a single process needs no group."""

from __future__ import annotations

import pytest

from megatron_dapo.parallel.coordination import FAN_OUT, GROUP_SIZE, Coordination, groups_of


@pytest.mark.parametrize("num_ranks", [1, 2, 8, 9, 16, 33, 128, 1000, 1024])
def test_all_ranks_hang_together_and_agree_on_their_groups(num_ranks: int) -> None:
    groups = {rank: list(groups_of(rank, num_ranks)) for rank in range(num_ranks)}
    tops = set()
    for rank, own in groups.items():
        for height, members in enumerate(own):
            assert rank in members and all(groups[other][height] == members for other in members)
            assert len(members) <= (FAN_OUT if height else GROUP_SIZE)
        # Only the first of a group speaks for it in the next, up to one group at the top.
        assert all(members[0] == rank for members in own[:-1])
        last = own[-1]
        while last[0] != rank:
            rank, last = last[0], groups[last[0]][-1]
        tops.add(rank)
    assert tops == {0}


def test_connections_grow_with_the_logarithm_of_the_nodes() -> None:
    def connections(num_ranks: int) -> int:
        return max(
            sum(other // 8 != rank // 8 for members in groups_of(rank, num_ranks) for other in members)
            for rank in range(0, num_ranks, 8)
        )

    assert [connections(num_ranks) for num_ranks in (8, 16, 128, 1024, 16384)] == [0, 1, 6, 10, 16]


def test_one_process_is_a_coordination_of_its_own() -> None:
    alone = Coordination()
    assert (alone.rank, alone.size, alone.gather((1, "a"))) == (0, 1, [[1, "a"]])
    assert alone.broadcast({"a": 1}) == {"a": 1} and alone.all_true(True)
    assert alone.merge(2, lambda values: sum(values), "sums", down=lambda value: -value) == 2
    alone.barrier("nobody")
