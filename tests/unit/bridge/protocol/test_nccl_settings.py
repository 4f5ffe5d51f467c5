"""Both sides of a communicator have the same settings, whatever the user has set."""

from __future__ import annotations

import pytest

from megatron_dapo.bridge.protocol.nccl_settings import AGREED, agreed_settings, difference, take_defaults_of_sglang
from megatron_dapo.engines.sglang.server_settings import allowed_environment


def of_sglang(environment: dict[str, str]) -> dict[str, str]:
    """What sglang/srt/entrypoints/engine.py of 0.5.17 makes of a server's environment, without symmetric memory and NVLS."""
    return {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0", **environment}


@pytest.mark.parametrize("exported", [{}, {"NCCL_CUMEM_ENABLE": "1"}, {"NCCL_NVLS_ENABLE": "1", "NCCL_PROTO": "Simple"}])
def test_servers_that_inherit_from_the_trainer_agree_with_it(exported: dict[str, str]) -> None:
    assert set(of_sglang({})) <= set(AGREED)
    trainer = dict(exported)
    take_defaults_of_sglang(trainer)
    server = of_sglang(allowed_environment(trainer))
    assert difference(agreed_settings(trainer), agreed_settings(server), "here", "there") == ""
    assert exported.items() <= trainer.items()


def test_a_difference_is_named_with_both_values() -> None:
    ours, theirs = {"NCCL_PROTO": "LL", "NCCL_ALGO": ""}, {"NCCL_PROTO": "LL", "NCCL_ALGO": "Ring"}
    assert difference(ours, theirs, "here", "there") == "NCCL_ALGO is not set here and Ring there"
    assert difference({"NCCL's version": "2.28.9"}, {}, "here", "there") == "NCCL's version is 2.28.9 here and not set there"
