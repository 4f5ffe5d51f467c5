"""Bytes of a weight sync between nodes: the arithmetic against the plan of every slice, over layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_dapo.bridge.sources import expected_layouts
from megatron_dapo.checkpoints.layouts.megatron import megatron_layout
from megatron_dapo.checkpoints.layouts.sglang import sglang_layout
from megatron_dapo.cli.plan_sync import bytes_between_nodes
from megatron_dapo.models.config_json import parse_architecture
from megatron_dapo.plan.cluster import Cluster
from megatron_dapo.plan.device import GPUS
from megatron_dapo.plan.weight_sync import SyncTraffic, sync_seconds, sync_traffic
from megatron_dapo.trainer.topology import parallel_layout
from tests.unit.config.architectures import DENSE, EXPERTS, GEMMA3
from tests.unit.plan.models import colocated, run_of

TIED = {**DENSE, "tie_word_embeddings": True}
SEQUENCE = {"sequence_parallel": True}


def config_of(parallel: dict[str, Any], **sglang: Any) -> Any:
    return run_of(parallel=parallel, **colocated(**{"weight_sync_transport": "shared_memory", **sglang}))


# Model, layout, processes, GPUs of a node, ranks of a server.
LAYOUTS: list[tuple[dict[str, Any], dict[str, Any], int, int, int]] = [
    (DENSE, {"tp_size": 2}, 8, 4, 2),  # whole replicas on a node
    (DENSE, {"tp_size": 2, "pp_size": 2, **SEQUENCE}, 16, 4, 4),  # a node is one stage
    (DENSE, {"pp_size": 4}, 16, 4, 2),
    (DENSE, {"pp_size": 4}, 8, 4, 1),  # two stages a node
    (DENSE, {"pp_size": 4, "first_stage_layers": 1, "last_stage_layers": 1}, 16, 4, 4),
    (DENSE, {"pp_size": 2, "cp_size": 2}, 16, 8, 8),
    (DENSE, {"pp_size": 2}, 12, 4, 4),  # the node in the middle has parts of both stages
    (DENSE, {"tp_size": 4, **SEQUENCE}, 8, 2, 2),  # half of the tensor ranks on a node
    (TIED, {"pp_size": 4}, 16, 4, 2),  # the embedding on the first and the last stage
    (GEMMA3, {"tp_size": 2, "pp_size": 2}, 8, 4, 2),
    (EXPERTS, {"ep_size": 4}, 8, 4, 4),
    (EXPERTS, {"ep_size": 8}, 16, 4, 4),  # half of the experts on a node
    (EXPERTS, {"tp_size": 2, "ep_size": 4, "etp_size": 1, **SEQUENCE}, 16, 4, 2),
    (EXPERTS, {"tp_size": 2, "pp_size": 2, "ep_size": 8, "etp_size": 1, **SEQUENCE}, 32, 4, 4),
]


@pytest.mark.parametrize("memory", ["host", "device"])
@pytest.mark.parametrize(("document", "parallel", "processes", "per_node", "ranks"), LAYOUTS)
def test_arithmetic_names_the_bytes_that_the_bridge_plans(
    document: dict[str, Any], parallel: dict[str, Any], processes: int, per_node: int, ranks: int, memory: str
) -> None:
    layers = 4 if document is not GEMMA3 else document["num_hidden_layers"]
    document = {**document, "num_hidden_layers": layers}
    servers = per_node // ranks
    config = config_of(parallel, tp_size=ranks, servers_per_node=servers, shared_memory=memory)
    found = sync_traffic(config, parse_architecture(document), processes, Cluster(processes // per_node, per_node))
    architecture, engines = parse_architecture(document), processes // ranks
    source = megatron_layout(architecture, parallel_layout(config, processes), torch.bfloat16)
    layout = sglang_layout(architecture, ranks, torch.bfloat16, engines, device="cuda")
    source, engine = expected_layouts("none", layout, source)
    together = servers if memory == "host" else 1
    total, into = bytes_between_nodes(source, engine, ranks, together, per_node)
    # A node that has part of the tensor ranks holds norms whole, and of a padded vocabulary no even share of its rows.
    rel = 0.02 if per_node % parallel.get("tp_size", 1) else 0.0
    assert found.between_nodes == pytest.approx(total, rel=rel)
    assert found.into_node == pytest.approx(into, rel=rel)
    assert found.num_bytes == engines * ranks * found.shard
    # Stages on other nodes are what moves: whole replicas on every node move nothing.
    assert (found.between_nodes == 0) == (total == 0)


def test_fp8_servers_get_half_of_the_linear_layers_bytes() -> None:
    parallel = {"tp_size": 8, "pp_size": 2, **SEQUENCE}
    plain, quantized = (
        sync_traffic(config_of(parallel, tp_size=4, servers_per_node=2, **more), parse_architecture(DENSE), 16, Cluster(2))
        for more in ({}, {"quantization": "fp8"})
    )
    assert 0.4 * plain.between_nodes < quantized.between_nodes < plain.between_nodes


def test_seconds_follow_the_bytes_and_the_network() -> None:
    """Twice the network's rate halves its seconds, and nothing else; the shares of a node's servers add nothing."""
    config = config_of({"pp_size": 2}, tp_size=4, servers_per_node=2)
    traffic = sync_traffic(config, parse_architecture(DENSE), 16, Cluster(2))
    slow, fast = (
        sync_seconds(config, traffic, Cluster(2, network_gbit=gbit), GPUS["H100"]) for gbit in (25.0, 50.0)
    )
    assert slow["network"] == pytest.approx(2 * fast["network"])
    assert {name: slow[name] for name in ("checksums", "node_memory")} == {
        name: fast[name] for name in ("checksums", "node_memory")
    }
    one = sync_traffic(config_of({"pp_size": 2}, tp_size=4, servers_per_node=1), parse_architecture(DENSE), 16, Cluster(2))
    assert one.into_node == traffic.into_node and 2 * one.num_bytes == traffic.num_bytes


def test_p2p_sends_all_bytes_over_the_network_and_none_on_one_node() -> None:
    config = config_of({}, placement="disaggregated", weight_sync_transport="p2p", tp_size=4)
    far = sync_traffic(config, parse_architecture(DENSE), 8, Cluster(2))
    assert far.between_nodes == far.num_bytes == 2 * far.into_node
    near = sync_traffic(config, parse_architecture(DENSE), 4, Cluster(1))
    assert near.between_nodes == 0
    assert "network" in sync_seconds(config, far, Cluster(2), GPUS["H100"])
    assert "network" not in sync_seconds(config, near, Cluster(1), GPUS["H100"])
    # With few senders theirs is the link that takes longest.
    few = SyncTraffic(far.shard, far.num_bytes, far.between_nodes, far.into_node, senders=1)
    assert sync_seconds(config, few, Cluster(2), GPUS["H100"])["network"] == pytest.approx(
        8 * sync_seconds(config, far, Cluster(2), GPUS["H100"])["network"]
    )
