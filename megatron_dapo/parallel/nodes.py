"""Ranks and nodes: ranks of one node may share memory, and the first of them starts the node's servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class NodeTopology:
    """The nodes of a run, numbered in order of their first rank; all hold equally many consecutive ranks."""

    num_ranks: int
    ranks_per_node: int

    @property
    def num_nodes(self) -> int:
        return self.num_ranks // self.ranks_per_node

    def node_of(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def ranks_of(self, node: int) -> range:
        return range(node * self.ranks_per_node, (node + 1) * self.ranks_per_node)


def node_topology(names: Sequence[str]) -> NodeTopology:
    """Return the nodes from the host name of every rank. Raise ValueError if nodes differ in number of ranks or a
    node's ranks are not consecutive."""
    order = list(dict.fromkeys(names))
    per_node = len(names) // len(order)
    expected = [name for name in order for _ in range(per_node)]
    if expected != list(names):
        counts = {name: names.count(name) for name in order}
        raise ValueError(
            f"ranks must lie on the nodes one node after the other, equally many on each, but there are {counts}; "
            "start the same number of processes on every node, with block distribution"
        )
    return NodeTopology(len(names), per_node)
