"""A family as a stranger adds it, next to the package: Qwen2's biases, and a window of seven tokens in every other layer."""

from __future__ import annotations

from typing import Any

from megatron_dapo import Family
from megatron_dapo.models.blocks import LocalAttention
from megatron_dapo.models.config_fields import positive, read_rope
from megatron_dapo.models.families import FAMILIES
from megatron_dapo.models.family import FULL_ATTENTION, LOCAL_ATTENTION, Fields

MODEL_TYPE = "made_up"


def _features(config: Fields) -> dict[str, Any]:
    theta, scaling = read_rope(config)
    local = frozenset(layer for layer, kind in enumerate(config["layer_types"]) if kind == LOCAL_ATTENTION)
    window = positive(config, "sliding_window")
    return {"rope_theta": theta, "rope_scaling": scaling, "local": LocalAttention(local, window, theta)}


FAMILY = Family(
    *("MadeUp", True, False, True),
    layer_kinds=frozenset({FULL_ATTENTION, LOCAL_ATTENTION}),
    features=_features,
)


def parity(arguments: dict[str, Any]) -> list[dict[str, float]]:
    """Worker: `actor_checks.parity_of_layouts` of the made-up family."""
    from actor_checks import parity_of_layouts

    FAMILIES[MODEL_TYPE] = FAMILY
    return parity_of_layouts(arguments)
