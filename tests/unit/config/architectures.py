"""Configurations of real and of tiny models, as their config.json holds them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_dapo.models.config_json import planned_directory

DENSE: Mapping[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 1000,
    "hidden_size": 256,
    "head_dim": 128,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
EXPERTS: Mapping[str, Any] = {
    **DENSE,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def published(name: str) -> dict[str, Any]:
    """Return the config.json of a model that a shipped recipe trains."""
    path = planned_directory(Path("absent", name)) / "config.json"
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


QWEN_7B, QWEN_14B, QWEN_32B = map(published, ("Qwen2.5-7B", "Qwen2.5-14B", "Qwen2.5-32B"))

# Of huggingface.co/google/gemma-3-1b-it and gemma-3-4b-it, whose text_config leaves out what has its default.
GEMMA3_1B: Mapping[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "initializer_range": 0.02,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "use_cache": True,
    "vocab_size": 262144,
}
GEMMA3_270M: Mapping[str, Any] = {
    **{name: value for name, value in GEMMA3_1B.items() if name != "sliding_window_pattern"},
    "_sliding_window_pattern": 6,
    "hidden_size": 640,
    "intermediate_size": 2048,
    "layer_types": [f"{'full' if layer % 6 == 5 else 'sliding'}_attention" for layer in range(18)],
    "num_hidden_layers": 18,
    "use_bidirectional_attention": False,
}
GEMMA3_4B: Mapping[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
        "vision_use_head": False,
    },
}
GEMMA3: Mapping[str, Any] = {
    **GEMMA3_1B,
    **{name: DENSE[name] for name in ("vocab_size", "hidden_size", "head_dim", "intermediate_size")},
    **{name: DENSE[name] for name in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")},
    "max_position_embeddings": 256,
}


def write_model(directory: Path, document: Mapping[str, Any]) -> Path:
    """Write config.json of a model directory and return the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(dict(document)))
    return directory
