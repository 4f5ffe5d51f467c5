"""megatron-core's TransformerConfig from a model's architecture, a parallel layout and a few settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_dapo.checkpoints.architecture import ModelArchitecture
from megatron_dapo.config.model_schema import PrecisionConfig
from megatron_dapo.megatron.attention import check_flash_attention
from megatron_dapo.megatron.precision import has_fp8, is_fp8, linear_backend, precision_fields
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.precision import RECIPES, LinearSizes, misfits, recipe_name

DTYPES: Mapping[str, torch.dtype] = MappingProxyType({"float32": torch.float32, "bfloat16": torch.bfloat16})

# Activations that the backward pass computes again instead of keeping them, as megatron-core's fields.
RECOMPUTE: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "none": {},
        "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
        "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    }
)


@dataclass(frozen=True)
class ModelSettings:
    """Number formats and recomputation of a model."""

    dtype: str = "float32"  # of weights and activations, a name of DTYPES
    recompute: str = "none"  # of activations, a name of RECOMPUTE
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    attention: str = "auto"  # an `AttentionImplementation`

    def __post_init__(self) -> None:
        for name, value, table in (("dtype", self.dtype, DTYPES), ("recompute", self.recompute, RECOMPUTE)):
            if value not in table:
                raise ValueError(f"model settings: {name} {value!r} is unknown; choose one of {', '.join(table)}")
        recipe_name(self.precision.recipe, self.dtype)


@dataclass
class GPTConfig(TransformerConfig):
    """megatron-core's configuration with the requested precision, which our own layers read: megatron-core's fields for
    it are set with CUDA alone."""

    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    attention_implementation: str = "auto"  # as in `ModelConfig`
    sandwich_norms: bool = False  # a norm also after attention and after the MLP, before the residual is added

    @property
    def dtype_name(self) -> str:
        """Name of the model's type in `DTYPES`."""
        return next(name for name, dtype in DTYPES.items() if dtype == self.params_dtype)

    @property
    def num_fp8_layers(self) -> int:
        """Number of layers of the whole model that compute in FP8."""
        return sum(has_fp8(self.precision, layer, self.num_layers) for layer in range(self.num_layers))


def describe_precision(config: GPTConfig) -> str:
    """Describe the precision in one line for the log."""
    chosen = linear_backend(config.precision, config.dtype_name)
    layers = f", {config.num_fp8_layers} of {config.num_layers} layers" if is_fp8(config.precision) else ""
    return f"{chosen.recipe}{layers}, linear products by {chosen.name} ({chosen.reason})"


def transformer_config(architecture: ModelArchitecture, layout: ParallelLayout, settings: ModelSettings) -> GPTConfig:
    """Build the configuration of the model on this layout, which must fit the architecture (`megatron_layout` checks).

    ValueError where the precision cannot be computed here, or not with these shapes.
    """
    dtype = DTYPES[settings.dtype]
    cuda = torch.cuda.is_available()
    linear_backend(settings.precision, settings.dtype)
    _check_shapes(architecture, layout, settings.precision)
    if settings.attention == "flash":
        check_flash_attention(dtype, architecture.head_dim, layout.context)
    return GPTConfig(
        precision=settings.precision,
        attention_implementation=settings.attention,
        **(precision_fields(settings.precision) if cuda else {}),
        **_architecture_fields(architecture),
        **_expert_fields(architecture, layout),
        **_gemma3_fields(architecture),
        **_layout_fields(layout),
        **RECOMPUTE[settings.recompute],
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Weights are overwritten by a checkpoint: initializing them first would cost a full copy of the model.
        perform_initialization=False,
        use_cpu_initialization=not cuda,
        # The loss function divides by global counts itself: gradients are summed over ranks, never averaged.
        calculate_per_token_loss=True,
        # Packed micro-batches differ in length, also between expert ranks: the allgather dispatcher needs equal ones.
        # megatron-core checks the dispatcher's type even for a dense model. `schedule` switches the exchange of lengths off
        # for steps whose micro-batches are equal.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        **_communication_fields(layout),
        deterministic_mode=torch.are_deterministic_algorithms_enabled(),
        # Fusions need CUDA extensions or a compiler; none changes the mathematics.
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=cuda,
        bias_activation_fusion=cuda and architecture.gemma3 is None,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
    )


def _check_shapes(architecture: ModelArchitecture, layout: ParallelLayout, precision: PrecisionConfig) -> None:
    """Raise ValueError where weights or tokens of a rank are not of the multiples that FP8 products need."""
    if not is_fp8(precision):
        return
    recipe, experts = RECIPES[precision.recipe], architecture.experts
    sizes = LinearSizes(
        architecture.hidden_size,
        architecture.num_attention_heads,
        architecture.num_key_value_heads,
        architecture.head_dim,
        architecture.intermediate_size if architecture.has_dense_layers else 0,
        experts.intermediate_size if experts is not None else 0,
    )
    found = misfits(precision.recipe, sizes, layout.tensor, layout.expert_tensor_size)
    if found:
        raise ValueError(f"precision: {precision.recipe} cannot compute: {'; '.join(map(str, found))}")
    if layout.token_multiple % recipe.token_multiple:
        raise ValueError(
            f"precision: {precision.recipe} needs {recipe.token_multiple} to divide a rank's tokens, but the layout pads "
            f"them to a multiple of {layout.token_multiple}; set token_multiple = {recipe.token_multiple}"
        )


def _architecture_fields(architecture: ModelArchitecture) -> dict[str, Any]:
    return {
        "num_layers": architecture.num_layers,
        "hidden_size": architecture.hidden_size,
        "num_attention_heads": architecture.num_attention_heads,
        "num_query_groups": architecture.num_key_value_heads,
        "kv_channels": architecture.head_dim,
        "ffn_hidden_size": architecture.intermediate_size,
        "layernorm_epsilon": architecture.rms_norm_eps,
        "add_qkv_bias": architecture.qkv_bias,
        "qk_layernorm": architecture.qk_norm,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu if architecture.gemma3 is None else gelu_tanh,
        "add_bias_linear": False,
        # Dropout would make the log-probs of the old policy and of training disagree.
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def _expert_fields(architecture: ModelArchitecture, layout: ParallelLayout) -> dict[str, Any]:
    experts = architecture.experts
    if experts is None:
        return {}
    if layout.tensor > 1 and not layout.sequence_parallel:
        raise ValueError(
            f"experts under tensor parallelism ({layout.tensor}) need sequence parallelism, so that each tensor rank "
            "routes its own tokens; set sequence_parallel = true, or tensor = 1"
        )
    return {
        "num_moe_experts": experts.num_experts,
        "moe_router_topk": experts.num_experts_per_token,
        "moe_ffn_hidden_size": experts.intermediate_size,
        "moe_layer_freq": [int(layer in experts.layers) for layer in range(architecture.num_layers)],
        "expert_tensor_parallel_size": layout.expert_tensor_size,
        "moe_router_pre_softmax": True,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": False,
    }


def gelu_tanh(gate: torch.Tensor) -> torch.Tensor:
    """Return GELU in its tanh form (arXiv:1606.08415, section 2)."""
    return F.gelu(gate, approximate="tanh")


def _gemma3_fields(architecture: ModelArchitecture) -> dict[str, Any]:
    gemma3 = architecture.gemma3
    if gemma3 is None:
        return {}
    return {
        "sandwich_norms": True,
        "layernorm_zero_centered_gamma": True,
        "softmax_scale": gemma3.attention_scale,
        # megatron-core counts the tokens on the left of a token, without itself.
        "window_size": (gemma3.window - 1, 0) if gemma3.local_layers else None,
        "window_attn_skip_freq": [int(layer in gemma3.local_layers) for layer in range(architecture.num_layers)],
    }


def _communication_fields(layout: ParallelLayout) -> dict[str, Any]:
    # The interleaved schedule must not send forward and backward in one call: with pipeline = 2 both go to the same rank, and
    # megatron-core's exchange of lengths (p2p_communication.py:_communicate_shapes) would swap them.
    interleaved = layout.virtual_pipeline > 1
    return {"overlap_p2p_comm": interleaved, "batch_p2p_comm": torch.cuda.is_available() and not interleaved}


def _layout_fields(layout: ParallelLayout) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "sequence_parallel": layout.sequence_parallel,
        # Interleaved schedules free an output while gloo still sends it: its work object holds the tensor, not the storage.
        "deallocate_pipeline_outputs": layout.virtual_pipeline == 1,
    }
