"""Supported decoder families: properties missing from config.json, and the place of Gemma 3's language model in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_dapo.hooks import FAMILY, load_hook
from megatron_dapo.untrusted import read_json


@dataclass(frozen=True)
class Family:
    """Properties of a model_type that its config.json has no field for."""

    name: str  # a class name in "architectures" is this and the head's, e.g. "Qwen2" and "ForCausalLM"
    qkv_bias: bool
    qk_norm: bool
    derives_head_dim: bool  # hidden_size / num_attention_heads if the config has no head_dim
    experts: bool = False  # layers may hold a mixture of experts instead of one MLP
    is_gemma3: bool = False  # layers as described by `architecture.Gemma3`
    class_names: Mapping[str, str] = field(default_factory=dict)  # head -> class, if it is not `name` + head

    def class_name(self, head: str) -> str:
        """Return the name of the class with this head, such as "ForCausalLM", under "architectures" of config.json."""
        return self.class_names.get(head, self.name + head)


FAMILIES: dict[str, Family] = {
    "llama": Family("Llama", qkv_bias=False, qk_norm=False, derives_head_dim=True),
    "qwen2": Family("Qwen2", qkv_bias=True, qk_norm=False, derives_head_dim=True),
    "qwen3": Family("Qwen3", qkv_bias=False, qk_norm=True, derives_head_dim=False),
    "qwen3_moe": Family("Qwen3Moe", qkv_bias=False, qk_norm=True, derives_head_dim=True, experts=True),
    "gemma3_text": Family(
        *("Gemma3Text", False, True, False),
        is_gemma3=True,
        class_names={"ForCausalLM": "Gemma3ForCausalLM"},
    ),
    # Has a vision tower, which is not trained; its tensors are exported unchanged.
    "gemma3": Family(
        *("Gemma3", False, True, False),
        is_gemma3=True,
        class_names={"ForCausalLM": "Gemma3ForConditionalGeneration"},
    ),
}

# Tensors of a Gemma 3's vision tower, as published and as transformers 5 names them, without "model.".
VISION_TENSORS = ("vision_tower.", "multi_modal_projector.")
_BUILT_IN = frozenset(FAMILIES)


def add_family(path: str, directory: Path) -> None:
    """Add the `Family` that `path` names (model.family) under the model_type of the model in `directory`.

    ValueError if it cannot be imported, is not a Family, or the model_type already has one.
    """
    family = load_hook(path, FAMILY)
    if not isinstance(family, Family):
        raise ValueError(f"{FAMILY} = {path!r}: it is a {type(family).__name__}, not a megatron_dapo.Family")
    model_type = str(read_json(directory / "config.json").get("model_type"))
    if model_type in _BUILT_IN:
        raise ValueError(f'{FAMILY} = {path!r}: model_type {model_type!r} is supported without it; set {FAMILY} = ""')
    FAMILIES[model_type] = family


# Published Gemma 3 configs leave out fields with these values, the defaults of transformers' Gemma3TextConfig. The two
# rotary bases are read with it: rope_theta 1,000,000 and rope_local_base_freq 10,000.
_GEMMA3_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
}
_OF_IMAGES = frozenset(
    """
    text_config vision_config mm_tokens_per_image boi_token_index eoi_token_index image_token_index boi_token_id
    eoi_token_id image_token_id
    """.split()
)


def text_fields(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the language model's fields of a parsed config.json. For a Gemma 3, omitted defaults are added and the
    vision tower is left out. ValueError if two places disagree."""
    if not isinstance(document, Mapping):
        raise ValueError(f"config.json is no object but {type(document).__name__}")
    family = FAMILIES.get(str(document.get("model_type")))
    if family is None or not family.is_gemma3:
        return dict(document)
    if document["model_type"] == "gemma3_text":
        return {**_GEMMA3_DEFAULTS, **document}
    text = document.get("text_config")
    if not isinstance(text, Mapping) or text.get("model_type", "gemma3_text") != "gemma3_text":
        raise ValueError("config.json: a gemma3 needs an object text_config of model_type gemma3_text; write it there")
    outside = {name: value for name, value in document.items() if name not in _OF_IMAGES and value is not None}
    for name in sorted(outside.keys() & text.keys() & {"tie_word_embeddings", "dtype", "torch_dtype"}):
        if text[name] is not None and text[name] != outside[name]:
            raise ValueError(f"config.json: {name} is {outside[name]!r}, in text_config {text[name]!r}; keep one")
    return {**_GEMMA3_DEFAULTS, **text, "architectures": None, **outside}
