"""A small random model whose matrices fit every format, and prompts for it; a skip where ModelOpt is not installed."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from megatron_dapo.quantisation.probe import Sample


@pytest.fixture
def modelopt() -> None:
    if importlib.util.find_spec("modelopt") is None:
        pytest.skip("nvidia-modelopt is not installed: make .venv-modelopt, then PYTHONPATH=.venv-modelopt")


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=320,
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        dtype="float32",
        architectures=["Qwen2ForCausalLM"],
    )
    built = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():  # far from uniform: wrong weights must show
        for parameter in built.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter)) if parameter.dim() == 1 else parameter.mul_(2.0)
    return built


@pytest.fixture
def samples() -> list[Sample]:
    generator = torch.Generator().manual_seed(1)
    return [Sample(torch.randint(0, 320, (40 + index,), generator=generator).tolist(), 8) for index in range(4)]
