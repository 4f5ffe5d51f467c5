"""A Qwen2 whose every token says which weights sampled it, and whether it read keys and values of other weights.

Hidden dimension 0 is constant, and the head turns it into the token `clean_token(version)`. The values of every attention
layer come from their biases only: value dimension version % CODES is 1, the others are 0. Attention weighs all positions
alike, so the output has in dimension c the share of positions whose values were computed by weights with code c. The head
of a version raises `mixed_token(version)` by the shares of all other codes, so that one position among thousands decides.
Its own code leaves exactly 0 there: both tokens have probability 1 in float32.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

CODES = 64  # versions that differ by fewer can be told apart
VOCAB_SIZE = 300
FIRST_PROMPT_TOKEN, LAST_PROMPT_TOKEN = 3, 99
_HIDDEN, _LAYERS, _HEADS, _KV_HEADS = 128, 2, 2, 1
_CLEAN, _MIXED = 100, 200  # first ids of the two kinds of tokens
_CONSTANT, _SHARE = 30.0, 1e5  # values in the head's rows

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": _HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _KV_HEADS,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def clean_token(version: int) -> int:
    """Return the token of weights `version` over keys and values that all are its own."""
    return _CLEAN + version % CODES


def mixed_token(version: int) -> int:
    """Return the token of weights `version` over keys and values some of which are of other weights."""
    return _MIXED + version % CODES


def tensors_of(version: int) -> dict[str, torch.Tensor]:
    """Return all tensors of weights `version` by their Hugging Face names."""
    code, head_dim = version % CODES, _HIDDEN // _HEADS
    generator = torch.Generator().manual_seed(version)
    embedding = torch.zeros(VOCAB_SIZE, _HIDDEN)
    embedding[:, 0] = 1.0
    embedding[:, 1:32] = 0.05 * torch.randn(VOCAB_SIZE, 31, generator=generator)
    head = torch.zeros(VOCAB_SIZE, _HIDDEN)
    head[clean_token(version), 0] = _CONSTANT
    head[mixed_token(version), head_dim:] = _SHARE
    head[mixed_token(version), head_dim + code] = 0.0
    tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": head, "model.norm.weight": torch.ones(_HIDDEN)}
    for layer in range(_LAYERS):
        tensors |= {f"model.layers.{layer}.{name}": value for name, value in _layer(code, head_dim, generator).items()}
    return tensors


def _layer(code: int, head_dim: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    kv_size, inner = _KV_HEADS * head_dim, CONFIG["intermediate_size"]
    assert isinstance(inner, int) and head_dim == CODES, "one value dimension a code"
    value_bias, output = torch.zeros(kv_size), torch.zeros(_HIDDEN, _HIDDEN)
    value_bias[code] = 1.0
    output[head_dim:, :head_dim] = torch.eye(head_dim)
    zeros = {
        "self_attn.q_proj.weight": (_HIDDEN, _HIDDEN),
        "self_attn.q_proj.bias": (_HIDDEN,),
        "self_attn.k_proj.weight": (kv_size, _HIDDEN),
        "self_attn.k_proj.bias": (kv_size,),
        "self_attn.v_proj.weight": (kv_size, _HIDDEN),
        "mlp.down_proj.weight": (_HIDDEN, inner),
    }
    return {
        **{name: torch.zeros(shape) for name, shape in zeros.items()},
        "self_attn.v_proj.bias": value_bias,
        "self_attn.o_proj.weight": output,
        "mlp.gate_proj.weight": torch.randn(inner, _HIDDEN, generator=generator),
        "mlp.up_proj.weight": torch.randn(inner, _HIDDEN, generator=generator),
        "input_layernorm.weight": torch.ones(_HIDDEN),
        "post_attention_layernorm.weight": torch.ones(_HIDDEN),
    }


def write_model(directory: Path) -> Path:
    """Write the model with the weights of version 0 as a Hugging Face directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors_of(0), directory / "model.safetensors", metadata={"format": "pt"})
    return directory
