"""gpt-oss (arXiv:2508.10925): attention sinks, windows in every other layer, biases in all linear layers, a mixture of experts
with a clamped activation in each layer. Experts that a checkpoint stores in MXFP4 are dequantized when they are read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_dapo.models.blocks import CLAMP, LocalAttention, MixtureOfExperts
from megatron_dapo.models.config_fields import object_of, positive, read_rope, yarn_scaling
from megatron_dapo.models.family import FULL_ATTENTION, LOCAL_ATTENTION, Family, Fields, Serving
from megatron_dapo.models.parts.biased_experts import BiasedExperts
from megatron_dapo.models.parts.sink_attention import SinkAttention
from megatron_dapo.models.placement import LayerPart

if TYPE_CHECKING:
    from megatron_dapo.models.architecture import ModelArchitecture

_YARN = ("beta_fast", "beta_slow", "truncate")


def _unquantized(document: Fields) -> dict[str, Any]:
    """Return the fields of the model that MXFP4 stands for, and one name of each."""
    fields = dict(document)
    if (method := object_of(fields, "quantization_config").get("quant_method", "mxfp4")) != "mxfp4":
        raise ValueError(f"config.json: quant_method = {method!r} is not supported, only 'mxfp4', which is dequantized")
    fields.pop("quantization_config", None)
    for ours, theirs in (("num_experts_per_tok", "experts_per_token"), ("num_local_experts", "num_experts")):
        if (value := fields.pop(theirs, None)) is not None and fields.setdefault(ours, value) != value:
            raise ValueError(f"config.json: {ours} is {fields[ours]}, {theirs} is {value}; keep one")
    return fields


def _features(config: Fields) -> dict[str, Any]:
    num_layers, kinds = positive(config, "num_hidden_layers"), config.get("layer_types")
    if kinds is None:
        kinds = [FULL_ATTENTION if layer % 2 else LOCAL_ATTENTION for layer in range(num_layers)]
    if len(kinds) != num_layers or not set(kinds) <= {LOCAL_ATTENTION, FULL_ATTENTION}:
        raise ValueError(
            f"config.json: layer_types has {len(kinds)} entries of {sorted(map(str, set(kinds)))}; num_hidden_layers "
            f"{num_layers} of {LOCAL_ATTENTION} or {FULL_ATTENTION} are supported"
        )
    theta, yarn = read_rope(config, lambda fields: yarn_scaling(fields, _YARN))
    local = frozenset(layer for layer, kind in enumerate(kinds) if kind == LOCAL_ATTENTION)
    return {
        "rope_theta": theta,
        "rope_scaling": yarn,
        "local": LocalAttention(local, positive(config, "sliding_window"), None) if local else None,
        "experts": _experts(config, num_layers),
        "activation": "clamped_gelu",
        "sinks": True,
        "linear_biases": True,
    }


def _experts(config: Fields, num_layers: int) -> MixtureOfExperts:
    num_experts, per_token = positive(config, "num_local_experts"), positive(config, "num_experts_per_tok")
    if per_token > num_experts:
        raise ValueError(f"config.json: num_experts_per_tok {per_token} is more than num_local_experts {num_experts}")
    sizes, layers = (num_experts, per_token, positive(config, "intermediate_size")), frozenset(range(num_layers))
    return MixtureOfExperts(*sizes, normalize=True, layers=layers, softmax_of_chosen=True)


def _parts(architecture: ModelArchitecture, layer: int) -> tuple[LayerPart, ...]:
    a, experts = architecture, architecture.experts
    assert experts is not None, "gpt-oss has experts in every layer"
    heads = a.num_attention_heads, a.num_key_value_heads, a.head_dim
    sizes = experts.num_experts, experts.intermediate_size, experts.num_experts_per_token
    return SinkAttention(a.hidden_size, *heads, bias=True), BiasedExperts(a.hidden_size, *sizes)


FAMILIES = {
    "gpt_oss": Family(
        *("GptOss", True, False, False),
        experts=True,
        used=frozenset({"num_local_experts", "num_experts_per_tok"}),
        # The first is the length before YaRN, which its own field has, too.
        neutral=frozenset({"initial_context_length", "router_aux_loss_coef", "output_router_logits"}),
        required={
            "hidden_act": ("silu",),
            "attention_bias": (True,),
            "tie_word_embeddings": (False,),
            # transformers has this constant, SGLang takes the field.
            "swiglu_limit": (CLAMP,),
        },
        layer_kinds=frozenset({FULL_ATTENTION, LOCAL_ATTENTION}),
        language_model=_unquantized,
        features=_features,
        parts=_parts,
        serving=Serving(
            dense_layers=False,
            expert_parallel=False,
            on_cpu=False,
            # The runner that it chooses otherwise transposes the experts' matrices, and a checkpoint may say MXFP4.
            synced=("--moe-runner-backend", "triton", "--json-model-override-args", '{"quantization_config": null}'),
        ),
    ),
}
