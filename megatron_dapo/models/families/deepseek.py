"""DeepSeek-V3 and R1 (arXiv:2412.19437): latent attention, grouped sigmoid routing, a shared expert, first layers dense.

Layers after the last one, which predict further tokens, are neither trained nor served; exports have them unchanged.
"""

from __future__ import annotations

from typing import Any

from megatron_dapo.models.blocks import GroupedRouting, LatentAttention, MixtureOfExperts, Yarn
from megatron_dapo.models.config_fields import positive, positive_number, read_rope, required, yarn_scaling
from megatron_dapo.models.family import Family, Fields

# Fields of latent attention and of grouped experts, and those that say how a model was pre-trained and distributed, and how many
# layers predict further tokens.
LATENT = frozenset("q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim qk_head_dim v_head_dim".split())
MIXTURE = frozenset(
    """
    n_routed_experts num_local_experts n_shared_experts num_experts_per_tok moe_intermediate_size first_k_dense_replace n_group
    topk_group norm_topk_prob routed_scaling_factor
    """.split()
)
NEUTRAL = frozenset({"num_nextn_predict_layers", "ep_size", "aux_loss_alpha", "seq_aux", "auto_map"})


def with_head_dim(document: Fields) -> dict[str, Any]:
    """Return the fields with head_dim, which transformers writes for the rotary part, as the size of a whole query."""
    content, rotary = (document.get(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim"))
    whole = content + rotary if type(content) is int and type(rotary) is int else None
    for name, size in (("head_dim", rotary), ("qk_head_dim", whole)):
        if document.get(name) not in (None, size):
            raise ValueError(
                f"config.json: {name} is {document[name]!r}, but qk_nope_head_dim and qk_rope_head_dim are {content} and "
                f"{rotary}; remove it"
            )
    return {**document, "head_dim": whole}


def latent_features(config: Fields) -> dict[str, Any]:
    """Return latent attention and grouped experts."""
    heads, groups = positive(config, "num_attention_heads"), config.get("num_key_value_heads")
    if groups not in (None, heads):
        raise ValueError(
            f"config.json: num_key_value_heads is {groups}; latent attention has {heads}, one for each query"
        )
    theta, yarn = read_rope(config, _read_yarn)
    latent = LatentAttention(
        query_rank=None if config.get("q_lora_rank") is None else positive(config, "q_lora_rank"),
        key_value_rank=positive(config, "kv_lora_rank"),
        content_dim=positive(config, "qk_nope_head_dim"),
        rotary_dim=positive(config, "qk_rope_head_dim"),
        value_dim=positive(config, "v_head_dim"),
        yarn=yarn,
    )
    if latent.rotary_dim % 2:
        raise ValueError(f"config.json: qk_rope_head_dim = {latent.rotary_dim} must be even")
    return {"latent": latent, "rope_theta": theta, "rope_scaling": None, "experts": grouped_mixture(config)}


def _read_yarn(fields: dict[str, Any]) -> Yarn | None:
    if bool(fields.get("mscale")) != bool(fields.get("mscale_all_dim")):
        raise ValueError(
            "config.json: rope_scaling has one of mscale and mscale_all_dim, which implementations read differently; give both"
        )
    return yarn_scaling(fields, ("beta_fast", "beta_slow", "mscale", "mscale_all_dim"))


def grouped_mixture(config: Fields) -> MixtureOfExperts | None:
    """Return the mixture of experts; None if every layer is dense."""
    counts = {config[field] for field in ("n_routed_experts", "num_local_experts") if config.get(field) is not None}
    if len(counts) > 1:
        raise ValueError(f"config.json: n_routed_experts and num_local_experts are {sorted(counts)}; keep one")
    num_experts = positive({"n_routed_experts": counts.pop() if counts else None}, "n_routed_experts")
    per_token, inner = positive(config, "num_experts_per_tok"), positive(config, "moe_intermediate_size")
    num_groups, kept = positive(config, "n_group"), positive(config, "topk_group")
    size = num_experts // num_groups
    if num_experts % num_groups or kept > num_groups or size < 2 or per_token > kept * size:
        raise ValueError(
            f"config.json: n_group {num_groups}, of which topk_group {kept} are kept, cannot give {per_token} of {num_experts} "
            "experts: groups must be equal, have two experts or more, and the kept ones num_experts_per_tok"
        )
    normalize = required(config, "norm_topk_prob")
    if not isinstance(normalize, bool):
        raise ValueError(f"config.json: norm_topk_prob = {normalize!r} must be true or false")
    first, num_layers = required(config, "first_k_dense_replace"), positive(config, "num_hidden_layers")
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise ValueError(f"config.json: first_k_dense_replace = {first!r} must be a number of layers")
    scale = positive_number("routed_scaling_factor", required(config, "routed_scaling_factor"))
    layers, shared = frozenset(range(first, num_layers)), positive(config, "n_shared_experts") * inner
    routing = GroupedRouting(num_groups, kept, scale)
    if not layers:
        return None
    return MixtureOfExperts(
        *(num_experts, per_token, inner, normalize, layers), routing=routing, shared_intermediate_size=shared
    )


FAMILIES = {
    "deepseek_v3": Family(
        *("DeepseekV3", False, False, False),
        experts=True,
        used=MIXTURE | LATENT,
        neutral=NEUTRAL,
        required={
            "hidden_act": ("silu",),
            "scoring_func": ("sigmoid", None),
            "topk_method": ("noaux_tc", None),
            "moe_layer_freq": (1, None),
            "rope_interleave": (True, None),
            "tie_word_embeddings": (False,),
            # transformers has this constant in the norms of compressed vectors, SGLang takes the field.
            "rms_norm_eps": (1e-6,),
        },
        language_model=with_head_dim,
        features=latent_features,
        predicts_further=True,
    ),
}
