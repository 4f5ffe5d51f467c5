"""What a transformer layer is made of, under Transformer Engine's parameter names with or without it.

The names (`self_attention.linear_qkv.layer_norm_weight`, `mlp.linear_fc1.layer_norm_weight`) keep checkpoints readable
by other Megatron tools. With Transformer Engine and CUDA its own layers are used; else the ones below.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_dapo.megatron.attention import PackedAttention, PackedSelfAttention
from megatron_dapo.megatron.experts import experts_spec, route_softmax_first
from megatron_dapo.megatron.fp8_layers import (
    Fp8ExpertColumnParallelLinear,
    Fp8ExpertRowParallelLinear,
    Fp8NormColumnParallelLinear,
    Fp8RowParallelLinear,
)
from megatron_dapo.megatron.model_config import GPTConfig
from megatron_dapo.megatron.norms import NormColumnParallelLinear, RMSNorm

logger = logging.getLogger(__name__)


class LinearKinds(NamedTuple):
    """The classes of a layer's linear layers: those with a norm, cut by rows, those cut by columns, and an expert's."""

    column: type[NormColumnParallelLinear]
    row: type[RowParallelLinear]
    expert_column: type[ColumnParallelLinear]
    expert_row: type[RowParallelLinear]


IN_MODEL_TYPE = LinearKinds(NormColumnParallelLinear, RowParallelLinear, ColumnParallelLinear, RowParallelLinear)
IN_FP8 = LinearKinds(
    Fp8NormColumnParallelLinear, Fp8RowParallelLinear, Fp8ExpertColumnParallelLinear, Fp8ExpertRowParallelLinear
)


def uses_transformer_engine() -> bool:
    """Whether layers come from Transformer Engine: it is installed and there is a CUDA device."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def block_spec(config: GPTConfig, layers: Sequence[int]) -> TransformerBlockSubmodules | ModuleSpec:
    """The given layers of the model, of Transformer Engine's modules where it can be used, else of the own ones."""
    if uses_transformer_engine():
        return _transformer_engine_block_spec(config, layers)
    logger.info("layers: own specification (Transformer Engine with CUDA is not available)")
    specs = [own_layer_spec(config, has_experts(config, layer), linear_kinds(config, layer)) for layer in layers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm)


def has_experts(config: GPTConfig, layer: int) -> bool:
    """Whether a layer of the model holds a mixture of experts."""
    return config.num_moe_experts is not None and bool(config.moe_layer_freq[layer])


def linear_kinds(config: GPTConfig, layer: int) -> LinearKinds:
    """Of one own layer, by the precision that is asked for."""
    return IN_FP8 if config.precision.has_fp8(layer, config.num_layers) else IN_MODEL_TYPE


def _transformer_engine_block_spec(config: GPTConfig, layers: Sequence[int]) -> TransformerBlockSubmodules | ModuleSpec:
    from megatron.core.extensions.transformer_engine import TENorm
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    logger.info("layers: Transformer Engine")
    dense = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    if config.num_moe_experts is None:
        return dense
    # One linear layer an expert, not one grouped layer for all: its parameters have the names of SequentialMLP, which
    # under FP8 puts zeros behind an expert's tokens up to a multiple of 16, and Transformer Engine takes none at all.
    sparse = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts, moe_grouped_gemm=False, qk_layernorm=config.qk_layernorm
    )
    sparse = route_softmax_first(sparse)
    specs = [sparse if has_experts(config, layer) else dense for layer in layers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=TENorm)


def own_layer_spec(config: GPTConfig, experts: bool, linear: LinearKinds = IN_MODEL_TYPE) -> ModuleSpec:
    """One layer: norm + QKV, packed attention, output projection, and norm + gated MLP, or a norm and experts."""
    qk_norm = RMSNorm if config.qk_layernorm else IdentityOp
    attention = SelfAttentionSubmodules(
        linear_qkv=linear.column,
        core_attention=PackedAttention,
        linear_proj=linear.row,
        q_layernorm=qk_norm,
        k_layernorm=qk_norm,
    )
    dense = ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=linear.column, linear_fc2=linear.row))
    submodules = TransformerLayerSubmodules(
        self_attention=ModuleSpec(
            module=PackedSelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention
        ),
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=RMSNorm if experts else IdentityOp,
        mlp=experts_spec(linear.expert_column, linear.expert_row) if experts else dense,
        mlp_bda=get_bias_dropout_add,
    )
    return ModuleSpec(module=TransformerLayer, submodules=submodules)
