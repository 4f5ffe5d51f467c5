"""What a transformer layer is made of, under Transformer Engine's parameter names with or without it.

The names (`self_attention.linear_qkv.layer_norm_weight`, `mlp.linear_fc1.layer_norm_weight`) keep checkpoints readable
by other Megatron tools. With Transformer Engine and CUDA its own layers are used; else the ones below.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_dapo.megatron.attention import PackedAttention, PackedSelfAttention
from megatron_dapo.megatron.experts import experts_spec, route_softmax_first

logger = logging.getLogger(__name__)


class RMSNorm(torch.nn.Module):
    """Root mean square norm (arXiv:1910.07467, eq. 4); the weight is marked for sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **unused: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = _norm_weight(config, hidden_size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., hidden_size] -> the same shape."""
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


class NormColumnParallelLinear(ColumnParallelLinear):
    """A column-parallel linear layer with the RMSNorm of its input inside, as Transformer Engine has it."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **settings: Any) -> None:
        super().__init__(input_size, output_size, config=config, **settings)
        self.layer_norm_weight = _norm_weight(config, input_size)

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[tokens, 1, input_size] -> [tokens, 1, this rank's outputs] and the bias left to the caller, if any."""
        # Before the gather of sequence parallelism: each rank norms its own tokens.
        normed = F.rms_norm(hidden, self.layer_norm_weight.shape, self.layer_norm_weight, self.config.layernorm_epsilon)
        return super().forward(normed, *args, **kwargs)


def _norm_weight(config: TransformerConfig, size: int) -> torch.nn.Parameter:
    weight = torch.nn.Parameter(torch.ones(size, dtype=config.params_dtype, device=torch.cuda.current_device()))
    weight.sequence_parallel = config.sequence_parallel
    return weight


def uses_transformer_engine() -> bool:
    """Whether layers come from Transformer Engine: it is installed and there is a CUDA device."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def block_spec(config: TransformerConfig, layers: Sequence[int]) -> TransformerBlockSubmodules | ModuleSpec:
    """The given layers of the model, of Transformer Engine's modules where it can be used, else of the own ones."""
    if uses_transformer_engine():
        return _transformer_engine_block_spec(config, layers)
    logger.info("layers: own specification (Transformer Engine with CUDA is not available)")
    specs = [own_layer_spec(config, has_experts(config, layer)) for layer in layers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm)


def has_experts(config: TransformerConfig, layer: int) -> bool:
    """Whether a layer of the model holds a mixture of experts."""
    return config.num_moe_experts is not None and bool(config.moe_layer_freq[layer])


def _transformer_engine_block_spec(
    config: TransformerConfig, layers: Sequence[int]
) -> TransformerBlockSubmodules | ModuleSpec:
    from megatron.core.extensions.transformer_engine import TENorm
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    logger.info("layers: Transformer Engine")
    dense = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    if config.num_moe_experts is None:
        return dense
    # One linear layer an expert, not one grouped layer for all: its parameters have the names of SequentialMLP.
    sparse = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts, moe_grouped_gemm=False, qk_layernorm=config.qk_layernorm
    )
    sparse = route_softmax_first(sparse)
    specs = [sparse if has_experts(config, layer) else dense for layer in layers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=TENorm)


def own_layer_spec(config: TransformerConfig, experts: bool) -> ModuleSpec:
    """One layer: norm + QKV, packed attention, output projection, and norm + gated MLP, or a norm and experts."""
    qk_norm = RMSNorm if config.qk_layernorm else IdentityOp
    attention = SelfAttentionSubmodules(
        linear_qkv=NormColumnParallelLinear,
        core_attention=PackedAttention,
        linear_proj=RowParallelLinear,
        q_layernorm=qk_norm,
        k_layernorm=qk_norm,
    )
    dense = ModuleSpec(
        module=MLP, submodules=MLPSubmodules(linear_fc1=NormColumnParallelLinear, linear_fc2=RowParallelLinear)
    )
    submodules = TransformerLayerSubmodules(
        self_attention=ModuleSpec(
            module=PackedSelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention
        ),
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=RMSNorm if experts else IdentityOp,
        mlp=experts_spec() if experts else dense,
        mlp_bda=get_bias_dropout_add,
    )
    return ModuleSpec(module=TransformerLayer, submodules=submodules)
