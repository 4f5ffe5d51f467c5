"""A small random model whose matrices fit every format, and prompts for it; a skip if ModelOpt is not installed."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from megatron_dapo.quantization.probe import Sample


@pytest.fixture
def modelopt() -> None:
    if importlib.util.find_spec("modelopt") is None:
        pytest.skip("nvidia-modelopt is not installed: make .venv-modelopt, then PYTHONPATH=.venv-modelopt")


SIZES = {
    "vocab_size": 320,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "dtype": "float32",
}


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    config = Qwen2Config(**SIZES, intermediate_size=384, architectures=["Qwen2ForCausalLM"])
    return _far_from_uniform(Qwen2ForCausalLM(config).eval())


@pytest.fixture
def expert_model() -> Any:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **SIZES,
        moe_intermediate_size=128,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        head_dim=64,
        architectures=["Qwen3MoeForCausalLM"],
    )
    return _far_from_uniform(Qwen3MoeForCausalLM(config).eval())


@torch.no_grad()
def _far_from_uniform(model: Any) -> Any:
    """Wrong weights must show."""
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter)) if parameter.dim() == 1 else parameter.mul_(2.0)
    return model


@pytest.fixture
def samples() -> list[Sample]:
    generator = torch.Generator().manual_seed(1)
    return [Sample(torch.randint(0, 320, (40 + index,), generator=generator).tolist(), 8) for index in range(4)]
