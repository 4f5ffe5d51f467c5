"""The order in which a process of a run is set up."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from megatron_dapo.config import config_from_dict
from megatron_dapo.trainer import run
from megatron_dapo.trainer.context import RunProcess


class Joined(Exception):
    """The process is about to join the default group."""


@pytest.mark.parametrize("transport", ["p2p", "disk"])
def test_nccl_has_the_servers_settings_before_the_default_group_exists(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {"NCCL_NVLS_ENABLE": "1"})
    sglang = {"placement": "disaggregated", "weight_sync_transport": transport}
    config = config_from_dict({"model": {"path": "model"}, "rollout": {"engine": "sglang"}, "sglang": sglang})
    for name in ("read_architecture", "require_runnable", "cluster_here"):
        monkeypatch.setattr(run, name, lambda *arguments: None)

    def join(timeout_s: float) -> None:
        raise Joined

    monkeypatch.setattr(run, "initialize_process_group", join)
    with pytest.raises(Joined), run.prepared_run(SimpleNamespace(config=config), RunProcess(1, 2, "host")):
        pass
    p2p = {"NCCL_CUMEM_ENABLE": "0"} if transport == "p2p" else {}
    assert os.environ == {"NCCL_NVLS_ENABLE": "1", **p2p}  # The user's values hold, for servers as well.
