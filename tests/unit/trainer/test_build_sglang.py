"""Addresses of started servers, and the device on which the shared-memory transport has its slots."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_dapo.bridge.protocol.peer_group import Address
from megatron_dapo.config.loader import load_config
from megatron_dapo.parallel.nodes import NodeTopology
from megatron_dapo.trainer.build_sglang import _settings, _shared_device


def test_the_hosts_memory_is_taken_on_any_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert _shared_device("host") == torch.device("cpu")


def test_the_devices_memory_is_that_of_this_ranks_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert _shared_device("device") == torch.device("cuda", 3)


def test_a_machine_without_gpu_has_no_device_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match='shared_memory = "device".*set it to "host"'):
        _shared_device("device")


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_servers_advertise_the_address_of_their_own_node(
    num_nodes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[model]\npath = "model"\n[data]\ntrain_paths = ["a.jsonl"]\n[rollout]\nengine = "sglang"\n')
    config = load_config(recipe, []).config
    nodes = NodeTopology(num_nodes, 1)
    site = SimpleNamespace(config=config, nodes=nodes, device="cpu", processes_here=1, key_file=tmp_path / "engine.key")
    monkeypatch.setattr(Address, "local_host", lambda address: "10.0.0.2")
    settings = _settings(site, 0)
    assert settings.host == settings.url_host == ("127.0.0.1" if num_nodes == 1 else "10.0.0.2")
    monkeypatch.setattr(Address, "local_host", lambda address: "127.0.1.1")
    if num_nodes == 2:
        with pytest.raises(
            ValueError, match="advertises servers at 127.0.1.1, which is loopback.*2 nodes.*MASTER_ADDR"
        ):
            _settings(site, 0)
