"""Gemma 3 (arXiv:2503.19786): the language model, with or without a vision tower, which is not trained.

Attention and MLP each have a norm before and one after, before the residual is added. The weight of a norm is stored as its
difference from 1. Embeddings are multiplied by sqrt(hidden_size), the gate of the MLP is GELU in its tanh form.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_dapo.models.blocks import LocalAttention
from megatron_dapo.models.config_fields import (
    fields_beside_vision,
    object_of,
    positive,
    positive_number,
    read_rope,
    required,
)
from megatron_dapo.models.family import FULL_ATTENTION, LOCAL_ATTENTION, Family, Fields, Serving

# Published configs leave out fields with these values, the defaults of transformers' Gemma3TextConfig. The two rotary
# bases are read with it: rope_theta 1,000,000 and rope_local_base_freq 10,000.
_DEFAULTS: Mapping[str, Any] = {
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
    text_config mm_tokens_per_image boi_token_index eoi_token_index image_token_index boi_token_id eoi_token_id
    image_token_id
    """.split()
)
# Tensors of the vision tower, as published and as transformers 5 names them, without "model.".
VISION_TENSORS = ("vision_tower.", "multi_modal_projector.")


def _with_defaults(document: Fields) -> dict[str, Any]:
    return {**_DEFAULTS, **document}


def _beside_vision(document: Fields) -> dict[str, Any]:
    return {**_DEFAULTS, **fields_beside_vision(document, "gemma3_text", _OF_IMAGES)}


def _features(config: Fields) -> dict[str, Any]:
    num_layers = positive(config, "num_hidden_layers")
    kinds = config.get("layer_types")
    if kinds is None:
        pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
        period = positive({"sliding_window_pattern": pattern}, "sliding_window_pattern")
        kinds = [FULL_ATTENTION if (layer + 1) % period == 0 else LOCAL_ATTENTION for layer in range(num_layers)]
    if len(kinds) != num_layers or not set(kinds) <= {LOCAL_ATTENTION, FULL_ATTENTION}:
        raise ValueError(
            f"config.json: layer_types has {len(kinds)} entries of {sorted(map(str, set(kinds)))}; num_hidden_layers "
            f"{num_layers} of {LOCAL_ATTENTION} or {FULL_ATTENTION} are supported"
        )
    rope_of_global, local_theta = _ropes(config)
    theta, scaling = read_rope({**config, "rope_parameters": rope_of_global})
    local = frozenset(layer for layer, kind in enumerate(kinds) if kind == LOCAL_ATTENTION)
    return {
        "rope_theta": theta,
        "rope_scaling": scaling,
        "local": LocalAttention(local, positive(config, "sliding_window"), local_theta) if local else None,
        "attention_scale": positive_number("query_pre_attn_scalar", required(config, "query_pre_attn_scalar")) ** -0.5,
        "activation": "gelu_tanh",
        "sandwich_norms": True,
        "zero_centered_norms": True,
        "scales_embedding": True,
        "vision_parameters": _vision_parameters(config.get("vision_config"), positive(config, "hidden_size")),
    }


def _ropes(config: Fields) -> tuple[dict[str, Any], float]:
    """Return the rotary fields of global layers, and theta of local ones."""
    ropes = object_of(config, "rope_parameters")
    if not ropes.keys() <= {LOCAL_ATTENTION, FULL_ATTENTION}:
        raise ValueError(
            f"config.json: rope_parameters has {sorted(ropes)}; a Gemma 3 has one each for {LOCAL_ATTENTION}, "
            f"{FULL_ATTENTION}"
        )
    of_global, of_local = object_of(ropes, FULL_ATTENTION), object_of(ropes, LOCAL_ATTENTION)
    if (
        config.get("rope_theta") is None
        and "rope_theta" not in of_global
        and "rope_theta" not in object_of(config, "rope_scaling")
    ):
        of_global["rope_theta"] = 1_000_000.0
    if config.get("rope_local_base_freq") is None:
        of_local.setdefault("rope_theta", 10_000.0)
    theta, scaling = read_rope({"rope_parameters": of_local, "rope_theta": config.get("rope_local_base_freq")})
    if scaling is not None:
        raise ValueError(f"config.json: rope_parameters scale {LOCAL_ATTENTION} layers by {scaling}; supported is none")
    return of_global, theta


def _vision_parameters(vision: Any, hidden_size: int) -> int:
    """Return the elements of a SigLIP tower (arXiv:2303.15343) without its pooling head, and of the projection to
    `hidden_size`; 0 if the config has no sizes of a tower."""
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "patch_size", "image_size")
    if not isinstance(vision, dict) or not all(
        type(vision.get(key)) is int and 0 < vision[key] < 2**31 for key in keys
    ):
        return 0
    hidden, inner, layers, patch, image = (vision[key] for key in keys)
    layer = 4 * (hidden * hidden + hidden) + 2 * hidden * inner + inner + hidden + 4 * hidden
    patches = (3 * patch * patch + 1) * hidden + (image // patch) ** 2 * hidden
    return patches + layers * layer + 2 * hidden + hidden * hidden_size + hidden


def _gemma3(name: str, class_name: str, **fields: Any) -> Family:
    return Family(
        *(name, False, True, False),
        class_names={"ForCausalLM": class_name},
        used=frozenset(
            """
            hidden_activation query_pre_attn_scalar rope_local_base_freq sliding_window_pattern _sliding_window_pattern
            vision_config
            """.split()
        ),
        neutral=frozenset({"cache_implementation"}),
        required={"hidden_activation": ("gelu_pytorch_tanh",), "hidden_act": ("gelu_pytorch_tanh", None)},
        layer_kinds=frozenset({FULL_ATTENTION, LOCAL_ATTENTION}),
        features=_features,
        **fields,
    )


FAMILIES = {
    "gemma3_text": _gemma3(
        *("Gemma3Text", "Gemma3ForCausalLM"), language_model=_with_defaults, serving=Serving(whole_embedding=True)
    ),
    "gemma3": _gemma3(
        *("Gemma3", "Gemma3ForConditionalGeneration"),
        language_model=_beside_vision,
        carried=VISION_TENSORS,
        decoder_prefix="model.language_model.",
        serving=Serving("language_model.", whole_embedding=True),
    ),
}
