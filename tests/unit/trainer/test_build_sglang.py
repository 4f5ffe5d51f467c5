"""Where the slots of the shared-memory transport lie."""

from __future__ import annotations

import pytest
import torch

from megatron_dapo.trainer.build_sglang import _shared_device


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
