"""Calls that share memory of GPUs, with stand-ins for CUDA: which device they open it on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_dapo.bridge.protocol.cuda_memory import open_shared

SHARED = {
    "device": "gpu1",
    "handle": "00",
    "size": 8,
    "offset": 0,
    "counter": "01",
    "counter_offset": 3,
    "event": "02",
    "event_sync": True,
}


@pytest.fixture
def opened(monkeypatch) -> list[tuple]:
    """Calls that open a handle; two GPUs that are peers."""
    calls = []

    def new_shared(*arguments):
        calls.append(arguments)
        return torch.UntypedStorage(8)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"gpu{index}"))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: {own, other} == {0, 1})
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", staticmethod(new_shared))
    return calls


def test_a_trainer_rank_opens_memory_of_other_gpus_through_its_own(opened):
    assert open_shared(SHARED, torch.device("cuda", 0)).numel() == 8
    # On its own GPU, and without the event of the other one: no context is made there.
    assert opened == [(0, b"\0", 8, 0, b"\1", 3, b"\2", False)]


def test_an_engine_rank_opens_memory_on_the_gpu_it_is_on(opened):
    open_shared(SHARED)
    open_shared(SHARED, torch.device("cuda", 1))
    assert opened == [(1, b"\0", 8, 0, b"\1", 3, b"\2", True)] * 2


def test_gpus_that_are_no_peers_are_refused(opened, monkeypatch):
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: False)
    with pytest.raises(ValueError, match='GPU 0 cannot reach the memory of GPU 1 .* set sglang.shared_memory = "host"'):
        open_shared(SHARED, torch.device("cuda", 0))
    assert not opened
