"""Configurations of real and of tiny models, as their config.json holds them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_dapo.config import ArchitectureFacts, read_architecture

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


def _qwen25(hidden: int, layers: int, heads: int, groups: int, intermediate: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": 152064,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


# Of huggingface.co/Qwen/Qwen2.5-*.
QWEN_7B = _qwen25(3584, 28, 28, 4, 18944)
QWEN_14B = _qwen25(5120, 48, 40, 8, 13824)
QWEN_32B = _qwen25(5120, 64, 40, 8, 27648)


def write_model(directory: Path, document: Mapping[str, Any]) -> Path:
    """Write config.json of a model directory and return the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(dict(document)))
    return directory


def facts_of(document: Mapping[str, Any]) -> ArchitectureFacts:
    """Return the facts that the validator reads from such a config.json."""
    with tempfile.TemporaryDirectory() as directory:
        return read_architecture(write_model(Path(directory), document))
