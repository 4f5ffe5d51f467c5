"""Tiny model directories made by transformers: four families, tied and untied, a vocabulary that no padding fits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

MODELS = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
}
EXPERT_SIZES = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}
SIZES = {
    "vocab_size": 301,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "head_dim": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
}


@pytest.fixture
def make_model_directory(tmp_path: Path) -> Callable[..., Path]:
    """make_model_directory(family, tied=..., dtype=..., name=..., shard=..., **sizes) -> directory with random weights."""

    def make(
        family: str, *, tied: bool = False, dtype=torch.float32, name: str = "model", shard: str = "50GB", **sizes
    ) -> Path:
        config_class, model_class = MODELS[family]
        torch.manual_seed(0)
        fields = {**SIZES, "tie_word_embeddings": tied, **(EXPERT_SIZES if family == "qwen3_moe" else {}), **sizes}
        model = model_class(config_class(**fields))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter)
        directory = tmp_path / name
        model.to(dtype).save_pretrained(directory, max_shard_size=shard)
        return directory

    return make
