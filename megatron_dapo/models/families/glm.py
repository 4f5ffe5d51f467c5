"""GLM-4.5 to 4.7 (arXiv:2508.06471): grouped sigmoid routing, a shared expert, first layers dense; and GLM-4.7-Flash, which has
latent attention.

Layers after the last one, which predict further tokens, are neither trained nor served; exports have them unchanged.
"""

from __future__ import annotations

from typing import Any

from megatron_dapo.models.config_fields import object_of, positive, read_partial_rope, required, with_partial_rotary
from megatron_dapo.models.families.deepseek import (
    LATENT,
    MIXTURE,
    NEUTRAL,
    grouped_mixture,
    latent_features,
    with_head_dim,
)
from megatron_dapo.models.family import Family, Fields

_REQUIRED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "scoring_func": ("sigmoid", None),
    "topk_method": ("noaux_tc", None),
    "tie_word_embeddings": (False,),
}


def _features(config: Fields) -> dict[str, Any]:
    switches = {field: required(config, field) for field in ("attention_bias", "use_qk_norm")}
    for field, value in switches.items():
        if not isinstance(value, bool):
            raise ValueError(f"config.json: {field} = {value!r} must be true or false")
    bias, norm = switches.values()
    return {**read_partial_rope(config), "qkv_bias": bias, "qk_norm": norm, "experts": grouped_mixture(config)}


def _language_model_of_flash(document: Fields) -> dict[str, Any]:
    """Drop what restates other fields. transformers reads mlp_layer_types, SGLang first_k_dense_replace."""
    fields = with_partial_rotary(with_head_dim(document), 1.0)
    rope, kinds = object_of(fields, "rope_parameters"), fields.pop("mlp_layer_types", None)
    if (factor := rope.pop("partial_rotary_factor")) != 1:
        raise ValueError(f"config.json: partial_rotary_factor = {factor} is not supported, only 1.0")
    first, num_layers = required(fields, "first_k_dense_replace"), positive(fields, "num_hidden_layers")
    if kinds not in (None, ["dense" if layer < first else "sparse" for layer in range(num_layers)]):
        raise ValueError(
            f"config.json: mlp_layer_types and first_k_dense_replace {first} disagree; make the first {first} of "
            f'{num_layers} "dense" and the others "sparse"'
        )
    return {**fields, "rope_parameters": rope}


FAMILIES = {
    "glm4_moe": Family(
        *("Glm4Moe", False, False, True),
        experts=True,
        used=MIXTURE | {"use_qk_norm"},
        neutral=NEUTRAL,
        required={**_REQUIRED, "attention_bias": (True, False)},
        language_model=lambda document: with_partial_rotary(document, 0.5),
        features=_features,
        predicts_further=True,
    ),
    "glm4_moe_lite": Family(
        *("Glm4MoeLite", False, False, False),
        experts=True,
        used=MIXTURE | LATENT,
        neutral=NEUTRAL,
        required={**_REQUIRED, "rope_interleave": (True, None)},
        language_model=_language_model_of_flash,
        features=latent_features,
        predicts_further=True,
    ),
}
