"""The trainer rank next to each engine rank."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_dapo.bridge.transports.forwarding import EngineNodes
from megatron_dapo.parallel.nodes import NodeTopology


def _engine_nodes(leaders: list[int], tensor_parallel: int, ranks_per_node: int) -> EngineNodes:
    plan = SimpleNamespace(engines=SimpleNamespace(tensor_parallel=tensor_parallel))
    return EngineNodes(plan, SimpleNamespace(leaders=leaders), NodeTopology(8, ranks_per_node), 0)


@pytest.mark.parametrize(
    ("leaders", "tensor_parallel", "ranks_per_node", "expected"),
    [
        ([0, 0, 4, 4], 2, 4, [0, 1, 2, 3, 4, 5, 6, 7]),
        ([0, 4], 2, 4, [0, 1, 4, 5]),  # servers on the first devices of each node, none on the others
        ([0, 0, 4, 4], 1, 4, [0, 1, 4, 5]),
        ([0], 8, 8, [0, 1, 2, 3, 4, 5, 6, 7]),
        ([0, 2], 4, 2, [0, 1, 0, 1, 2, 3, 2, 3]),
    ],
)
def test_engines_take_the_devices_of_their_node_in_order(leaders, tensor_parallel, ranks_per_node, expected) -> None:
    engine_nodes = _engine_nodes(leaders, tensor_parallel, ranks_per_node)
    assert [engine_nodes.beside(rank) for rank in range(len(expected))] == expected
