"""The table of implementations against the layers that are really built from it."""

from __future__ import annotations

from dataclasses import asdict
from types import BuiltinFunctionType

import megatron.core.optimizer as megatron_optimizer
import pytest
import torch

from megatron_dapo.doctor.probes import _SMALL
from megatron_dapo.megatron import implementations as module
from megatron_dapo.megatron.implementations import implementations
from megatron_dapo.megatron.model_config import ModelSettings, transformer_config
from megatron_dapo.models.config_json import parse_architecture
from megatron_dapo.parallel.layout import ParallelLayout

EXPERTS = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def table(**changes: object) -> dict[str, str]:
    config = transformer_config(
        parse_architecture({**_SMALL, **changes}), ParallelLayout(1), ModelSettings()
    )
    return {row.op: asdict(row)["name"] for row in implementations(config)}


@pytest.mark.skipif(torch.cuda.is_available(), reason="names of the CPU")
def test_dense_layers_without_a_device() -> None:
    rows = table()
    assert rows["attention"] == "own PackedSelfAttention, own PackedAttention"
    assert rows["mlp"].startswith("megatron-core MLP, own NormColumnParallelLinear")
    assert rows["rms norm"] == "own RMSNorm, own NormColumnParallelLinear"
    assert rows["log-prob head"].startswith("own ")


def test_experts_are_named() -> None:
    assert "MoELayer" in table(**EXPERTS)["mlp"]


def test_the_optimizer_is_the_one_megatron_took(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = type("FusedAdam", (), {"__module__": "apex.optimizers.fused_adam"})
    monkeypatch.setattr(megatron_optimizer, "Adam", fused)
    assert table()["optimizer"] == "NVIDIA apex FusedAdam"


def test_compiled_functions_have_their_plain_name() -> None:
    assert isinstance(torch._C._get_cudnn_enabled, BuiltinFunctionType)
    assert module._names(torch._C._get_cudnn_enabled) == "torch _get_cudnn_enabled"


@pytest.mark.parametrize(
    "has_cuda, uses_engine, words",
    [(False, False, "no CUDA device"), (True, False, "is not installed"), (True, True, "Engine is installed")],
)
def test_the_reason(monkeypatch: pytest.MonkeyPatch, has_cuda: bool, uses_engine: bool, words: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setattr(module, "uses_transformer_engine", lambda: uses_engine)
    assert words in module._reason_of_layers()
