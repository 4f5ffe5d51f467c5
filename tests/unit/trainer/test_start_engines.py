"""Addresses of started servers, and the device on which the shared-memory transport has its slots."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_dapo.bridge.protocol.peer_group import Address
from megatron_dapo.config.loader import load_config
from megatron_dapo.engines.sglang.server import SglangServer
from megatron_dapo.engines.sglang.servers import Part
from megatron_dapo.parallel.nodes import NodeTopology
from megatron_dapo.parallel.rank_set import RankSet
from megatron_dapo.trainer.connect_engines import slot_device
from megatron_dapo.trainer.start_engines import ServerPlace, server_settings
from tests.unit.config.architectures import DENSE, write_model

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def test_host_memory_is_available_on_any_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert slot_device("host") == torch.device("cpu")


def test_the_devices_memory_is_that_of_this_ranks_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert slot_device("device") == torch.device("cuda", 3)


def test_a_node_without_gpu_has_no_device_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match='shared_memory = "device".*set it to "host"'):
        slot_device("device")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServerPlace:
    """Of a run on one node with a seed of 5."""
    write_model(tmp_path / "model", DENSE)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[model]\npath = "model"\n[data]\ntrain_paths = ["a.jsonl"]\n[rollout]\nengine = "sglang"\n')
    config = load_config(recipe, ["run.seed=5"]).config
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return ServerPlace(config, RankSet(0, 1, 0, None), NodeTopology(1, 1), "10.0.0.1", tmp_path / "engine.key", 1)


def test_each_server_has_its_own_seed(place: ServerPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers with one seed draw the same numbers: a group's responses on two of them would be correlated."""
    monkeypatch.setattr(SglangServer, "start", lambda settings, index: settings)
    assert [place.spawn(Part(index, 0)).random_seed for index in range(3)] == [5, 6, 7]
    again = place.spawn(Part(1, 0, num_restarts=2, cache_tokens=900))
    assert (again.random_seed, again.num_restarts, again.replaced_cache_tokens) == (6, 2, 900)


def test_a_part_has_its_share_of_the_gpus_after_the_trainers(place: ServerPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two servers of TP4 over two nodes: on each node two GPUs of both, after the trainer's two."""
    monkeypatch.setattr(SglangServer, "start", lambda settings, index: settings)
    monkeypatch.setattr(Address, "local_host", lambda address: "10.0.0.2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    sizes = {"tp_size": 4, "nodes_per_server": 2, "servers_per_node": 2, "placement": "disaggregated"}
    config = place.config.model_copy(update={"sglang": place.config.sglang.model_copy(update=sizes)})
    place = replace(place, config=config, nodes=NodeTopology(4, 2), processes_here=2)
    parts = [place.spawn(Part(slot, slot, node_rank=1, meeting="10.0.0.1:20001:20002")) for slot in range(2)]
    assert [part.gpus for part in parts] == [(2, 3), (4, 5)]
    assert [(part.num_nodes, part.node_rank, part.tensor_parallel) for part in parts] == [(2, 1, 4)] * 2
    assert server_settings(config, place.key_file, Path(), 0).gpus == (0, 1, 2, 3), "a command's server is on one node"


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_servers_advertise_the_address_of_their_own_node(
    num_nodes: int, place: ServerPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = replace(place, nodes=NodeTopology(num_nodes, 1))
    monkeypatch.setattr(Address, "local_host", lambda address: "10.0.0.2")
    settings = place.settings(0)
    assert settings.host == settings.url_host == ("127.0.0.1" if num_nodes == 1 else "10.0.0.2")
    monkeypatch.setattr(Address, "local_host", lambda address: "127.0.1.1")
    if num_nodes == 2:
        with pytest.raises(
            ValueError, match="advertises servers at 127.0.1.1, which is loopback.*2 nodes.*MASTER_ADDR"
        ):
            place.settings(0)


@pytest.mark.parametrize("layout", sorted((EXAMPLES / "layouts").glob("*.toml")), ids=lambda path: path.stem)
def test_layouts_name_the_kernels_of_their_servers(layout: Path, tmp_path: Path) -> None:
    overrides = [f"model.path={tmp_path}", "data.train_paths=['a.jsonl']", "data.eval_paths=['a.jsonl']"]
    config = load_config(layout, overrides).config
    settings = server_settings(config, tmp_path / "key", tmp_path, 0)
    assert (settings.attention_backend, settings.sampling_backend) == ("fa3", "flashinfer")
    assert not settings.prefill_cuda_graph
    assert config.sglang.kernels == "servers: attention fa3, sampling flashinfer, prefill graphs off"
