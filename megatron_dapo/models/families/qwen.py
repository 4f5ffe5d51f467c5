"""Qwen2 and 2.5 (arXiv:2412.15115), Qwen3 and Qwen3-MoE (arXiv:2505.09388)."""

from __future__ import annotations

from typing import Any

from megatron_dapo.models.blocks import MixtureOfExperts
from megatron_dapo.models.config_fields import positive, required
from megatron_dapo.models.family import Family, Fields, Serving


def mixture_features(config: Fields) -> dict[str, Any]:
    """Return the mixture of experts, if any layer has one."""
    # num_local_experts is transformers 5's name of num_experts.
    counts = {config[field] for field in ("num_experts", "num_local_experts") if config.get(field) is not None}
    if len(counts) > 1:
        raise ValueError(f"config.json: num_experts and num_local_experts are {sorted(counts)}; keep one")
    num_experts = positive({"num_experts": counts.pop() if counts else None}, "num_experts")
    per_token = positive(config, "num_experts_per_tok")
    if per_token > num_experts:
        raise ValueError(f"config.json: num_experts_per_tok {per_token} is more than num_experts {num_experts}")
    normalize = required(config, "norm_topk_prob")
    if not isinstance(normalize, bool):
        raise ValueError(f"config.json: norm_topk_prob = {normalize!r} must be true or false")
    layers = _layers_with_experts(config)
    inner = positive(config, "moe_intermediate_size")
    return {"experts": MixtureOfExperts(num_experts, per_token, inner, normalize, layers) if layers else None}


def _layers_with_experts(config: Fields) -> frozenset[int]:
    """Return every decoder_sparse_step-th layer except those of mlp_only_layers."""
    num_layers, step = positive(config, "num_hidden_layers"), positive(config, "decoder_sparse_step")
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(not isinstance(layer, int) or not 0 <= layer < num_layers for layer in dense):
        raise ValueError(f"config.json: mlp_only_layers = {dense!r} must list layers from 0 to {num_layers - 1}")
    return frozenset(layer for layer in range(num_layers) if (layer + 1) % step == 0) - frozenset(dense)


FAMILIES = {
    "qwen2": Family("Qwen2", qkv_bias=True, qk_norm=False, derives_head_dim=True),
    "qwen3": Family("Qwen3", qkv_bias=False, qk_norm=True, derives_head_dim=False),
    "qwen3_moe": Family(
        *("Qwen3Moe", False, True, True),
        experts=True,
        used=frozenset(
            """
            num_experts num_local_experts num_experts_per_tok moe_intermediate_size norm_topk_prob decoder_sparse_step
            mlp_only_layers
            """.split()
        ),
        # They switch on transformers' load-balancing loss, which changes no logits and is no part of the policy losses.
        neutral=frozenset({"router_aux_loss_coef", "output_router_logits"}),
        features=mixture_features,
        serving=Serving(ties_output=False, dense_layers=False),
    ),
}
