"""Published models and recipes that are planned, and small configurations of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_dapo.config import Config, config_from_dict
from tests.unit.config.architectures import QWEN_7B, QWEN_14B, QWEN_32B, published

RECIPES = Path(__file__).resolve().parents[3] / "examples" / "recipes"


MODELS: Mapping[str, Mapping[str, Any]] = {
    "7B": QWEN_7B,
    "14B": QWEN_14B,
    "32B": QWEN_32B,
    "30B-A3B": published("Qwen3-30B-A3B-Base"),
    "235B-A22B": published("Qwen3-235B-A22B"),
}


def size_of(recipe: Path) -> str:
    """Return the name in MODELS of the model that a shipped recipe or layout is for, 32B where its name has none."""
    name = recipe.read_text(encoding="utf-8").partition("[run]")[2][:60]
    return next((size for size in MODELS if size.lower().replace("-", "_") in name), "32B")


# Of huggingface.co/Qwen/Qwen2.5-1.5B, whose steps and servers were measured.
QWEN_1_5B: Mapping[str, Any] = {
    **QWEN_7B,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}


def run_of(**sections: dict[str, Any]) -> Config:
    """A run of a bfloat16 model, with sections in addition."""
    model = {"path": "/m", "dtype": "bfloat16", **sections.pop("model", {})}
    data = {"train_paths": ["/t"], **sections.pop("data", {})}
    return config_from_dict({"model": model, "data": data, **sections})


def colocated(mem_fraction_static: float = 0.5, **settings: Any) -> dict[str, dict[str, Any]]:
    """The sections of servers on the trainer's GPUs."""
    sglang = {"placement": "colocated", "mem_fraction_static": mem_fraction_static, **settings}
    return {"rollout": {"engine": "sglang"}, "sglang": sglang}


# Of huggingface.co/deepseek-ai/DeepSeek-V3 and huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct, without fields that change no plan.
DEEPSEEK_V3: Mapping[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
QWEN3_NEXT_80B: Mapping[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "intermediate_size": 5120,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000000,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
