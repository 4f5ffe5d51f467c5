"""Specification of a transformer layer, under Transformer Engine's parameter names with or without it.

The names (`self_attention.linear_qkv.layer_norm_weight`, `mlp.linear_fc1.layer_norm_weight`) keep checkpoints readable
by other Megatron tools. With Transformer Engine and CUDA, its layers are used; otherwise ours (`layers`).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_dapo.megatron.attention import LocalGlobalSelfAttention, PackedAttention, PackedSelfAttention
from megatron_dapo.megatron.experts import (
    BiasedExpertRowParallelLinear,
    GroupedSigmoidRouter,
    MarkedBiases,
    PairedColumnParallelLinear,
    PairedRows,
    SoftmaxFirstRouter,
    SoftmaxLastRouter,
    experts_spec,
)
from megatron_dapo.megatron.gated_delta import GatedDeltaNet, GatedDeltaSubmodules
from megatron_dapo.megatron.latent_attention import DuplicatedLinear, Fp8DuplicatedLinear, PackedLatentAttention
from megatron_dapo.megatron.layers import (
    Fp8ColumnParallelLinear,
    Fp8ExpertColumnParallelLinear,
    Fp8ExpertRowParallelLinear,
    Fp8NormColumnParallelLinear,
    Fp8PostNormRowParallelLinear,
    Fp8RowParallelLinear,
    NormColumnParallelLinear,
    PostNorm,
    PostNormRowParallelLinear,
    RMSNorm,
)
from megatron_dapo.megatron.model_config import GPTConfig, uses_transformer_engine
from megatron_dapo.megatron.precision import has_fp8

logger = logging.getLogger(__name__)


class LinearKinds(NamedTuple):
    """Classes for a layer's linear layers: row-split with a norm and without, column-split, an expert's two, column-split with
    a norm of the output, and whole on every tensor rank."""

    column: type[NormColumnParallelLinear]
    plain_column: type[ColumnParallelLinear]
    row: type[RowParallelLinear]
    expert_column: type[ColumnParallelLinear]
    expert_row: type[RowParallelLinear]
    row_and_norm: type[RowParallelLinear]
    whole: type[DuplicatedLinear]


IN_MODEL_TYPE = LinearKinds(
    NormColumnParallelLinear,
    ColumnParallelLinear,
    RowParallelLinear,
    ColumnParallelLinear,
    RowParallelLinear,
    PostNormRowParallelLinear,
    DuplicatedLinear,
)
IN_FP8 = LinearKinds(
    Fp8NormColumnParallelLinear,
    Fp8ColumnParallelLinear,
    Fp8RowParallelLinear,
    Fp8ExpertColumnParallelLinear,
    Fp8ExpertRowParallelLinear,
    Fp8PostNormRowParallelLinear,
    Fp8DuplicatedLinear,
)


def block_spec(config: GPTConfig, layers: Sequence[int]) -> TransformerBlockSubmodules | ModuleSpec:
    """Specify the given layers of the model, with Transformer Engine's modules if it can be used, otherwise with
    ours."""
    if uses_transformer_engine():
        return _transformer_engine_block_spec(config, layers)
    logger.debug("layers: own specification (Transformer Engine with CUDA is not available)")
    specs = [
        own_layer_spec(config, has_experts(config, layer), linear_kinds(config, layer), is_delta(config, layer))
        for layer in layers
    ]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm)


def has_experts(config: GPTConfig, layer: int) -> bool:
    """Return True if a layer of the model is a mixture of experts."""
    return config.num_moe_experts is not None and bool(config.moe_layer_freq[layer])


def is_delta(config: GPTConfig, layer: int) -> bool:
    """Return True if a layer of the model has a gated delta net in place of attention."""
    return isinstance(config.linear_attention_freq, list) and bool(config.linear_attention_freq[layer])


def linear_kinds(config: GPTConfig, layer: int) -> LinearKinds:
    """Return the classes for one of our layers, by the requested precision."""
    if config.add_bias_linear:
        return IN_MODEL_TYPE._replace(expert_column=PairedColumnParallelLinear, expert_row=BiasedExpertRowParallelLinear)
    return IN_FP8 if has_fp8(config.precision, layer, config.num_layers) else IN_MODEL_TYPE


def _transformer_engine_block_spec(config: GPTConfig, layers: Sequence[int]) -> TransformerBlockSubmodules | ModuleSpec:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    logger.debug("layers: Transformer Engine")
    attention = {"qk_layernorm": config.qk_layernorm, "multi_latent_attention": config.multi_latent_attention}
    dense = _choose_attention(config, get_gpt_layer_with_transformer_engine_spec(**attention))
    _refuse_windows_under_context(config)
    if config.sandwich_norms:
        return _norm_outputs(dense)
    if config.num_moe_experts is None:
        return dense if config.linear_attention_freq is None else _replace_attention(config, layers, [dense] * len(layers))
    # Under FP8 both forms zero-pad an expert's tokens to a multiple of 16, and both accept an expert without tokens.
    sparse = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm, **attention
    )
    sparse = _choose_attention(config, route(config, sparse))
    if config.add_bias_linear:
        _add_biases(sparse)
    specs = [sparse if has_experts(config, layer) else dense for layer in layers]
    return _replace_attention(config, layers, specs)


def _replace_attention(
    config: GPTConfig, layers: Sequence[int], specs: Sequence[ModuleSpec]
) -> TransformerBlockSubmodules:
    """Put gated delta nets with Transformer Engine's linear layers into those of the layers that have one."""
    from megatron.core.extensions.transformer_engine import TELayerNormColumnParallelLinear, TENorm, TERowParallelLinear

    linears = GatedDeltaSubmodules(TELayerNormColumnParallelLinear, TERowParallelLinear)
    chosen = []
    for layer, spec in zip(layers, specs, strict=True):
        if is_delta(config, layer):
            net = ModuleSpec(module=GatedDeltaNet, submodules=linears)
            spec = replace(spec, submodules=replace(spec.submodules, self_attention=net))
        chosen.append(spec)
    return TransformerBlockSubmodules(layer_specs=chosen, layer_norm=TENorm)


def _choose_attention(config: GPTConfig, layer: ModuleSpec) -> ModuleSpec:
    """Replace Transformer Engine's attention by torch's flash attention, on request."""
    if config.attention_implementation == "flash":
        layer.submodules.self_attention.submodules.core_attention = PackedAttention
    return layer


def _add_biases(layer: ModuleSpec) -> None:
    """Let a layer of Transformer Engine's modules with sinks select its rotary angles, and its experts take rows of gate and up
    that alternate."""
    layer.submodules.self_attention.module = LocalGlobalSelfAttention
    experts = submodules_of(submodules_of(layer.submodules.mlp).experts)

    experts.linear_fc1 = type("PairedColumns", (PairedRows, experts.linear_fc1), {})
    experts.linear_fc2 = type("MarkedRows", (MarkedBiases, experts.linear_fc2), {})


def _refuse_windows_under_context(config: GPTConfig) -> None:
    """Raise ValueError under context parallelism with windows, which Transformer Engine's ring does not support."""
    if config.window_size is not None and config.context_parallel_size > 1:
        raise ValueError(
            f"local layers with a window of {config.window_size[0] + 1} tokens cannot be computed by Transformer Engine under "
            f"context parallelism ({config.context_parallel_size}); set parallel.cp_size = 1"
        )


def _norm_outputs(layer: ModuleSpec) -> ModuleSpec:
    """Give a layer of Transformer Engine's modules the norms after attention and MLP, and rotary angles by layer."""
    from megatron.core.extensions.transformer_engine import TENorm, TERowParallelLinear

    class TEPostNormRowParallelLinear(PostNorm, TERowParallelLinear):
        """Transformer Engine's row-parallel linear layer and its norm of the output."""

        norm_class = TENorm

    attention = layer.submodules.self_attention
    attention.module = LocalGlobalSelfAttention
    attention.submodules.linear_proj = TEPostNormRowParallelLinear
    submodules_of(layer.submodules.mlp).linear_fc2 = TEPostNormRowParallelLinear
    return layer


def own_layer_spec(
    config: GPTConfig, experts: bool, linear: LinearKinds = IN_MODEL_TYPE, delta: bool = False
) -> ModuleSpec:
    """Specify one layer: norm + QKV, packed attention, output projection, and norm + gated MLP, or a norm and experts; or a
    gated delta net for the first three."""
    row = linear.row_and_norm if config.sandwich_norms else linear.row
    if experts:
        routed = MLPSubmodules(linear_fc1=linear.expert_column, linear_fc2=linear.expert_row)
        shared = MLPSubmodules(linear_fc1=linear.plain_column, linear_fc2=linear.row)
        mlp = experts_spec(routed, shared, router_class(config), config.moe_grouped_gemm)
    else:
        mlp = ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=linear.column, linear_fc2=row))
    if delta:
        mixer = ModuleSpec(module=GatedDeltaNet, submodules=GatedDeltaSubmodules(linear.column, row))
    else:
        mixer = _own_latent_attention(linear) if config.multi_latent_attention else _own_attention(config, linear)
    submodules = TransformerLayerSubmodules(
        # The fused projections of the other mixers have the norm inside.
        input_layernorm=RMSNorm if config.multi_latent_attention else IdentityOp,
        self_attention=mixer,
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=RMSNorm if experts else IdentityOp,
        mlp=mlp,
        mlp_bda=get_bias_dropout_add,
    )
    return ModuleSpec(module=TransformerLayer, submodules=submodules)


def _own_attention(config: GPTConfig, linear: LinearKinds) -> ModuleSpec:
    qk_norm = RMSNorm if config.qk_layernorm else IdentityOp
    submodules = SelfAttentionSubmodules(
        linear_qkv=linear.column,
        core_attention=PackedAttention,
        linear_proj=linear.row_and_norm if config.sandwich_norms else linear.row,
        q_layernorm=qk_norm,
        k_layernorm=qk_norm,
    )
    return ModuleSpec(
        module=PackedSelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=submodules
    )


def _own_latent_attention(linear: LinearKinds) -> ModuleSpec:
    """Specify multi-head latent attention. The norms of the compressed vectors are inside their expansions."""
    submodules = MLASelfAttentionSubmodules(
        linear_q_proj=linear.plain_column,
        linear_q_down_proj=linear.whole,
        linear_q_up_proj=linear.column,
        linear_kv_down_proj=linear.whole,
        linear_kv_up_proj=linear.column,
        core_attention=PackedAttention,
        linear_proj=linear.row,
        q_layernorm=IdentityOp,
        kv_layernorm=IdentityOp,
    )
    return ModuleSpec(
        module=PackedLatentAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=submodules
    )


def router_class(config: GPTConfig) -> type[SoftmaxFirstRouter]:
    """Return the router of the model's layers with experts."""
    if config.moe_router_score_function == "sigmoid":
        return GroupedSigmoidRouter
    return SoftmaxFirstRouter if config.moe_router_pre_softmax else SoftmaxLastRouter


def route(config: GPTConfig, layer: ModuleSpec) -> ModuleSpec:
    """Put our router into a layer with experts that megatron-core has specified."""
    submodules = layer.submodules
    assert isinstance(submodules, TransformerLayerSubmodules), f"not a transformer layer: {submodules}"
    submodules_of(submodules.mlp).router = router_class(config)
    return layer


# megatron-core describes a module by a `ModuleSpec`, and after 0.16 some (MLP, experts) by a `functools.partial` of
# their builder, with the same submodules as a keyword. The two functions below read either form.


def class_of(description: Any) -> Any:
    """Return the class to be built from a ModuleSpec, a partial of a class or of its builder method, or the class
    itself."""
    if isinstance(description, ModuleSpec):
        return description.module
    if isinstance(description, functools.partial):
        return getattr(description.func, "__self__", description.func)
    return description


def submodules_of(description: Any) -> Any:
    """Return the module's submodules, to read or change; None if it is not described further."""
    if isinstance(description, functools.partial):
        return description.keywords.get("submodules")
    return getattr(description, "submodules", None)
