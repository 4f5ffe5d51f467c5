"""Machines and the ranks on them."""

from __future__ import annotations

import pytest

from megatron_dapo.parallel.nodes import NodeTopology, node_topology


def test_ranks_are_grouped_by_node() -> None:
    nodes = node_topology(["b", "b", "a", "a", "c", "c"])
    assert nodes == NodeTopology(6, 2) and nodes.num_nodes == 3
    assert [nodes.node_of(rank) for rank in range(6)] == [0, 0, 1, 1, 2, 2]
    assert list(nodes.ranks_of(1)) == [2, 3]


@pytest.mark.parametrize("names", [["a", "b", "a", "b"], ["a", "a", "b"], ["a", "a", "b", "b", "a", "a"]])
def test_uneven_or_scattered_ranks_are_refused(names: list[str]) -> None:
    with pytest.raises(ValueError, match="block distribution"):
        node_topology(names)
