"""Qwen3-Next and Qwen3.5 (3.6): most layers have a gated delta net, every fourth gated attention with few rotated dims.

Norms, except those inside gated delta nets, store the difference of their weight from 1. With experts, every token also goes
to a shared one. Vision towers and layers for multi-token prediction are not trained, and exported unchanged.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_dapo.models.blocks import GatedDelta
from megatron_dapo.models.config_fields import (
    fields_beside_vision,
    positive,
    read_partial_rope,
    with_partial_rotary,
)
from megatron_dapo.models.families.qwen import mixture_features
from megatron_dapo.models.family import FULL_ATTENTION, GATED_DELTA, Family, Fields, Serving

_OF_IMAGES = frozenset(
    "text_config image_token_id video_token_id vision_start_token_id vision_end_token_id language_model_only".split()
)
# Positions of text are equal in all sections, so that how they interleave changes nothing.
_ROPE_OF_IMAGES = ("mrope_section", "mrope_interleaved")


def _with_defaults(document: Fields) -> dict[str, Any]:
    return with_partial_rotary(document, 0.25)


def _of_mixture(document: Fields) -> dict[str, Any]:
    """Add what Qwen3.5's mixtures have no fields for: experts in every layer, and weights that add up to 1."""
    fields = _with_defaults(document)
    dense = {"intermediate_size": fields.get("moe_intermediate_size"), "decoder_sparse_step": 1, "norm_topk_prob": True}
    return {**fields, **{name: value for name, value in dense.items() if fields.get(name) is None}}


def _features(config: Fields) -> dict[str, Any]:
    return {
        **read_partial_rope(config, ignored=_ROPE_OF_IMAGES),
        "delta": _delta(config),
        "gated_attention": True,
        "zero_centered_norms": True,
        "vision_parameters": _vision_parameters(config.get("vision_config")),
    }


def _delta(config: Fields) -> GatedDelta | None:
    num_layers, kinds = positive(config, "num_hidden_layers"), config.get("layer_types")
    interval = config.get("full_attention_interval")
    period = positive({"full_attention_interval": 4 if interval is None else interval}, "full_attention_interval")
    regular = [FULL_ATTENTION if (layer + 1) % period == 0 else GATED_DELTA for layer in range(num_layers)]
    if kinds is None:
        kinds = regular
    if len(kinds) != num_layers:
        raise ValueError(f"config.json: layer_types has {len(kinds)} entries for num_hidden_layers {num_layers}")
    if interval is not None and kinds != regular:
        # transformers reads one, SGLang the other.
        raise ValueError(
            f"config.json: layer_types and full_attention_interval {interval} disagree; make {FULL_ATTENTION!r} every "
            f"{interval}th of layer_types, or remove full_attention_interval"
        )
    layers = frozenset(layer for layer, kind in enumerate(kinds) if kind == GATED_DELTA)
    if len(layers) == num_layers:
        raise ValueError(f"config.json: layer_types has no {FULL_ATTENTION!r} in {num_layers} layers; at least one needs it")
    key_heads, value_heads = positive(config, "linear_num_key_heads"), positive(config, "linear_num_value_heads")
    if value_heads % key_heads:
        raise ValueError(
            f"config.json: linear_num_value_heads {value_heads} is no multiple of linear_num_key_heads {key_heads}"
        )
    key_dim, value_dim = positive(config, "linear_key_head_dim"), positive(config, "linear_value_head_dim")
    kernel_size, fused = positive(config, "linear_conv_kernel_dim"), config["model_type"] == "qwen3_next"
    sizes = (key_heads, value_heads, key_dim, value_dim, kernel_size)
    return GatedDelta(layers, *sizes, fused) if layers else None


def _mixture_features(config: Fields) -> dict[str, Any]:
    mixture, shared = mixture_features(config), positive(config, "shared_expert_intermediate_size")
    experts = mixture["experts"]
    return {**_features(config), "experts": experts and replace(experts, gated_shared_size=shared)}


def _vision_parameters(vision: Any) -> int:
    """Return the elements of the vision tower and its merger; 0 if the config has no sizes of a tower."""
    names = "hidden_size intermediate_size depth num_position_embeddings out_hidden_size"
    if not isinstance(vision, dict) or not all(type(vision.get(name)) is int for name in names.split()):
        return 0
    hidden, inner, depth, positions, out = (vision[name] for name in names.split())
    sizes = {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3}
    patch, merge, frames, channels = (vision.get(name, default) for name, default in sizes.items())
    block = 4 * hidden * hidden + 4 * hidden + 2 * hidden * inner + inner + hidden + 4 * hidden
    merged = hidden * merge**2
    patches = channels * frames * patch**2 * hidden + hidden
    return patches + positions * hidden + depth * block + 2 * hidden + merged * (merged + 1) + merged * out + out


_DELTA_FIELDS = """
    full_attention_interval linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim
    linear_conv_kernel_dim vision_config
    """.split()
_MIXTURE_FIELDS = """
    num_experts num_local_experts num_experts_per_tok moe_intermediate_size shared_expert_intermediate_size norm_topk_prob
    decoder_sparse_step mlp_only_layers
    """.split()
_NEUTRAL = """
    mtp_num_hidden_layers mtp_use_dedicated_embeddings mamba_ssm_dtype router_aux_loss_coef output_router_logits
    """.split()
_REQUIRED: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu",), "attn_output_gate": (True, None)}


def _family(name: str, mixture: bool = False, required: dict[str, tuple[Any, ...]] | None = None, **fields: Any) -> Family:
    return Family(
        *(name, False, True, False),
        experts=mixture,
        used=frozenset(_DELTA_FIELDS + (_MIXTURE_FIELDS if mixture else [])),
        neutral=frozenset(_NEUTRAL + ([] if mixture else ["mlp_only_layers"])),
        required={**_REQUIRED, **(required or {})},
        layer_kinds=frozenset({FULL_ATTENTION, GATED_DELTA}),
        features=_mixture_features if mixture else _features,
        carried=("visual.", "mtp."),
        **fields,
    )


_DENSE, _SPARSE = "Qwen3_5", "Qwen3_5Moe"
_WEIGHTS = {"norm_topk_prob": (True,), "decoder_sparse_step": (1,)}
FAMILIES = {
    "qwen3_next": _family("Qwen3Next", mixture=True, language_model=_with_defaults, serving=Serving(ties_output=False)),
    "qwen3_5_text": _family(_DENSE, language_model=_with_defaults),
    "qwen3_5": _family(
        _DENSE,
        class_names={"ForCausalLM": _DENSE + "ForConditionalGeneration"},
        language_model=lambda document: _with_defaults(fields_beside_vision(document, "qwen3_5_text", _OF_IMAGES)),
    ),
    "qwen3_5_moe_text": _family(
        _SPARSE, mixture=True, required=_WEIGHTS, language_model=_of_mixture, serving=Serving(ties_output=False)
    ),
    "qwen3_5_moe": _family(
        _SPARSE,
        mixture=True,
        required=_WEIGHTS,
        class_names={"ForCausalLM": _SPARSE + "ForConditionalGeneration"},
        language_model=lambda document: _of_mixture(fields_beside_vision(document, "qwen3_5_moe_text", _OF_IMAGES)),
        serving=Serving(ties_output=False),
    ),
}
