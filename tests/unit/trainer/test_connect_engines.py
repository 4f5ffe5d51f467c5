"""Engines and their weight sync: what cannot work is refused before anything is planned."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_dapo.bridge.transports.base import EngineHandles
from megatron_dapo.parallel.nodes import NodeTopology
from megatron_dapo.reshard.layout import ReplicatedLayout
from megatron_dapo.trainer.connect_engines import _shared_memory
from tests.unit.config.small import make


def test_changes_do_not_pass_between_nodes_through_shared_memory():
    config = make("rollout.engine=sglang sglang.weight_sync_full_interval=8")
    run = SimpleNamespace(place=SimpleNamespace(config=config, nodes=NodeTopology(4, 2)))
    nothing = ReplicatedLayout({}, 4)
    with pytest.raises(ValueError, match=r'full_interval = 8: .* 2 nodes .*; set it to 1, or .*transport = "p2p"'):
        _shared_memory(run, EngineHandles([0, 2], {}), nothing, nothing)
