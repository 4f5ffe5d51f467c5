"""megatron-core's TransformerConfig from a model's architecture, a parallel layout and a few settings."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.activations import quick_gelu
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_dapo.config.megatron_options import field_table, options_for
from megatron_dapo.config.model_schema import PrecisionConfig
from megatron_dapo.megatron.attention import check_flash_attention
from megatron_dapo.megatron.precision import has_fp8, is_fp8, linear_backend, precision_fields
from megatron_dapo.megatron.rotary import attention_scale, yarn_factor
from megatron_dapo.models.architecture import ModelArchitecture
from megatron_dapo.models.blocks import CLAMP, GroupedRouting, MixtureOfExperts
from megatron_dapo.ops.bf16_products import prepare_bf16
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.precision import RECIPES, misfits

DTYPES: Mapping[str, torch.dtype] = MappingProxyType({"float32": torch.float32, "bfloat16": torch.bfloat16})

# Activations that the backward pass recomputes instead of keeping, as megatron-core's fields.
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

    dtype: str = "float32"  # type of weights and activations, a name of DTYPES
    recompute: str = "none"  # activations to recompute, a name of RECOMPUTE
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    attention: str = "auto"  # an `AttentionImplementation`
    megatron: Mapping[str, Any] = field(default_factory=dict)  # megatron-core's fields, as in [megatron]


@dataclass
class GPTConfig(TransformerConfig):
    """megatron-core's configuration with the requested precision, which our layers read: megatron-core's fields for it
    are only set with CUDA."""

    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    attention_implementation: str = "auto"  # see `ModelConfig`
    sandwich_norms: bool = False  # also norms after attention and after the MLP, before the residual is added

    @property
    def dtype_name(self) -> str:
        """Name of the model's type in `DTYPES`."""
        return next(name for name, dtype in DTYPES.items() if dtype == self.params_dtype)

    @property
    def num_fp8_layers(self) -> int:
        """Number of layers of the whole model that compute in FP8."""
        return sum(has_fp8(self.precision, layer, self.num_layers) for layer in range(self.num_layers))


@dataclass
class LatentGPTConfig(GPTConfig, MLATransformerConfig):
    """The configuration of a model with multi-head latent attention. Its norms of the compressed vectors are megatron-core's
    `qk_layernorm`."""

    multi_latent_attention: bool = True
    qk_layernorm: bool = True

    def __post_init__(self) -> None:
        # megatron-core's attention layer computes these two itself, ours reads them.
        self.kv_channels = self.v_head_dim
        factor = yarn_factor(self.rotary_scaling_factor, self.mscale_all_dim) if self.rope_type == "yarn" else 1.0
        self.softmax_scale = factor**2 * (self.qk_head_dim + self.qk_pos_emb_head_dim) ** -0.5
        super().__post_init__()


def describe_precision(config: GPTConfig) -> str:
    """Describe the precision in one line for the log."""
    chosen = linear_backend(config.precision, config.dtype_name)
    layers = f", {config.num_fp8_layers} of {config.num_layers} layers" if is_fp8(config.precision) else ""
    return f"{chosen.recipe}{layers}, linear products by {chosen.name} ({chosen.reason})"


def transformer_config(architecture: ModelArchitecture, layout: ParallelLayout, settings: ModelSettings) -> GPTConfig:
    """Build the configuration of the model on this layout, which must fit the architecture (`megatron_layout` checks).

    Raise ValueError if the precision cannot be computed here or with these shapes, or if the installed megatron-core
    lacks a field of `settings.megatron`.
    """
    dtype = DTYPES[settings.dtype]
    cuda = torch.cuda.is_available()
    prepare_bf16(dtype, "cuda" if cuda else "cpu")
    linear_backend(settings.precision, settings.dtype)
    _check_shapes(architecture, layout, settings.precision)
    if settings.attention == "flash":
        check_flash_attention(dtype, architecture.head_dim, layout.context)
    _check_tensor_ranks(architecture, layout)
    kind = GPTConfig if architecture.latent is None else LatentGPTConfig
    values = {
        **(precision_fields(settings.precision) if cuda else {}),
        **_architecture_fields(architecture),
        **_bias_fields(architecture, layout, settings),
        **_expert_fields(architecture, layout),
        **_window_fields(architecture),
        **_delta_fields(architecture, layout),
        **_latent_fields(architecture, settings),
        **_layout_fields(layout),
        **RECOMPUTE[settings.recompute],
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        # A checkpoint overwrites the weights: initializing them first would cost a full copy of the model.
        "perform_initialization": False,
        "use_cpu_initialization": not cuda,
        # The loss function divides by global counts, so gradients are summed over ranks, never averaged.
        "calculate_per_token_loss": True,
        # Packed micro-batches differ in length, even between expert ranks, and the allgather dispatcher needs equal
        # lengths. megatron-core checks the dispatcher's type even for a dense model. `schedule` turns off the exchange
        # of lengths for steps with equal micro-batches.
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
        **_communication_fields(layout),
        "deterministic_mode": torch.are_deterministic_algorithms_enabled(),
        **_fusion_fields(architecture, settings.precision),
        **_requested_fields(TransformerConfig, "model", settings.megatron),
    }
    return kind(precision=settings.precision, attention_implementation=settings.attention, **values)


def _fusion_fields(architecture: ModelArchitecture, precision: PrecisionConfig) -> dict[str, bool]:
    """Return the available fused kernels: all need CUDA, some an extension. None changes the mathematics."""
    cuda, has_transformer_engine = torch.cuda.is_available(), uses_transformer_engine()
    return {
        "bias_dropout_fusion": cuda and not architecture.linear_biases,
        "bias_activation_fusion": cuda and architecture.activation == "silu",
        # Our packed attention reads no mask; persistent layer norms are LayerNorms.
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        # Without it, the angles are applied sequence by sequence in Python. It knows a single rotary base, and for latent
        # attention only YaRN.
        "apply_rope_fusion": has_transformer_engine
        and architecture.local is None
        and (architecture.latent is None or architecture.latent.yarn is not None),
        # The matrix product adds weight gradients to the fp32 sum.
        "gradient_accumulation_fusion": has_transformer_engine or (cuda and has_fused_weight_gradient()),
        # One call computes all experts of a rank: 128 calls would keep the device waiting for Python. Not yet run with
        # weights kept as FP8.
        "moe_grouped_gemm": has_transformer_engine and architecture.experts is not None and not precision.fp8_param,
    }


def uses_transformer_engine() -> bool:
    """Return True if Transformer Engine is installed and there is a CUDA device."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def has_fused_weight_gradient() -> bool:
    """Return True if apex's kernels that add a weight's gradient to its fp32 sum can be imported."""
    return importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None


def _requested_fields(kind: type[Any], part: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe's `options` that are fields of `kind`, converted to its types. Raise ValueError for one that
    the installed megatron-core lacks."""
    requested, known = options_for(part, options), {one.name for one in fields(kind)}
    if missing := sorted(set(requested) - known):
        version = importlib.metadata.version("megatron-core")
        there = ", ".join(field_table()[missing[0]]["versions"])
        raise ValueError(
            f"megatron.{missing[0]}: {kind.__name__} of the installed megatron-core {version} has no such field; versions "
            f"that have it: {there}"
        )
    # The only settable field that is an enumeration.
    converted = {"attention_backend": AttnBackend} if "attention_backend" in requested else {}
    return {**requested, **{name: choices[requested[name]] for name, choices in converted.items()}}


def data_parallel_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of DistributedDataParallelConfig that a recipe may set: the recipe's, or this machine's
    defaults."""
    # On a GPU, a bucket's gradients are summed while the backward pass computes the next ones.
    defaults = {"overlap_grad_reduce": torch.cuda.is_available()}
    return defaults | _requested_fields(DistributedDataParallelConfig, "ddp", options)


def optimizer_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of megatron-core's OptimizerConfig that a recipe sets."""
    return _requested_fields(OptimizerConfig, "optimizer", options)


def _check_shapes(architecture: ModelArchitecture, layout: ParallelLayout, precision: PrecisionConfig) -> None:
    """Raise ValueError if a rank's weights or tokens are not the multiples that FP8 products need."""
    if not is_fp8(precision):
        return
    recipe, sizes = RECIPES[precision.recipe], architecture.linear_sizes()
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
        "activation_func": _ACTIVATIONS[architecture.activation],
        "sandwich_norms": architecture.sandwich_norms,
        "layernorm_zero_centered_gamma": architecture.zero_centered_norms,
        "softmax_scale": attention_scale(architecture),
        "softmax_type": "learnable" if architecture.sinks else "vanilla",
        "attention_output_gate": architecture.gated_attention,
        # Dropout would make the log-probs of the old policy and of training disagree.
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def _bias_fields(
    architecture: ModelArchitecture, layout: ParallelLayout, settings: ModelSettings
) -> dict[str, Any]:
    """Return the fields of sinks, biases and the clamped activation. Raise ValueError for settings under which they cannot be
    computed."""
    if not architecture.linear_biases:
        return {"add_bias_linear": False}
    if layout.expert_tensor_size > 1:
        raise ValueError(
            f"experts with biases ({architecture.model_type}) cannot be cut over {layout.expert_tensor_size} expert tensor "
            "ranks, each of which would add them: set parallel.etp_size = 1"
        )
    if is_fp8(settings.precision) or settings.attention == "flash":
        setting = "model.attention_implementation" if settings.attention == "flash" else "precision.recipe"
        raise ValueError(
            f'{setting}: a {architecture.model_type} is computed in the model\'s type with "auto" attention; remove it'
        )
    clamped = {"activation_func_clamp_value": CLAMP, "glu_linear_offset": 1.0}
    return {"add_bias_linear": True, **(clamped if architecture.activation == "clamped_gelu" else {})}


def _expert_fields(architecture: ModelArchitecture, layout: ParallelLayout) -> dict[str, Any]:
    experts = architecture.experts
    if experts is None:
        return {}
    return {
        "num_moe_experts": experts.num_experts,
        "moe_router_topk": experts.num_experts_per_token,
        "moe_ffn_hidden_size": experts.intermediate_size,
        "moe_layer_freq": [int(layer in experts.layers) for layer in range(architecture.num_layers)],
        "expert_tensor_parallel_size": layout.expert_tensor_size,
        "moe_router_load_balancing_type": "none",
        "moe_shared_expert_intermediate_size": experts.gated_shared_size or experts.shared_intermediate_size or None,
        "moe_shared_expert_gate": experts.gated_shared_size > 0,
        "moe_aux_loss_coeff": 0.0,
        **_routing_fields(experts),
    }


def _routing_fields(experts: MixtureOfExperts) -> dict[str, Any]:
    routing: GroupedRouting | None = experts.routing
    if routing is None:
        return {"moe_router_pre_softmax": not experts.softmax_of_chosen}
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_num_groups": routing.num_groups,
        "moe_router_group_topk": routing.num_kept_groups,
        "moe_router_topk_scaling_factor": routing.scale,
    }


def _latent_fields(architecture: ModelArchitecture, settings: ModelSettings) -> dict[str, Any]:
    """Return the sizes of latent attention. Raise ValueError for settings under which it cannot be computed."""
    latent = architecture.latent
    if latent is None:
        return {}
    if settings.attention == "flash":
        raise ValueError('model.attention_implementation: latent attention is computed with "auto" attention; remove it')
    fields = {
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.key_value_rank,
        "qk_head_dim": latent.content_dim,
        "qk_pos_emb_head_dim": latent.rotary_dim,
        "v_head_dim": latent.value_dim,
        "rotary_base": architecture.rope_theta,
        "rope_type": "rope",
    }
    if latent.yarn is None:
        return fields
    scaling = dataclasses.asdict(latent.yarn)
    scaling.pop("truncate")  # All models with latent attention truncate.
    return {**fields, "rope_type": "yarn", "rotary_scaling_factor": scaling.pop("factor"), **scaling}


def _check_tensor_ranks(architecture: ModelArchitecture, layout: ParallelLayout) -> None:
    """Raise ValueError if tensor ranks would have the same tokens in layers that each computes for its own."""
    if layout.tensor == 1 or layout.sequence_parallel or (architecture.experts is None and architecture.latent is None):
        return
    parts = "latent attention" if architecture.experts is None else "experts"
    raise ValueError(
        f"{parts} under tensor parallelism ({layout.tensor}) need sequence parallelism, so that each tensor rank has its own "
        "tokens; set sequence_parallel = true, or tensor = 1"
    )


def gelu_tanh(gate: torch.Tensor) -> torch.Tensor:
    """Return GELU in its tanh form (arXiv:1606.08415, section 2)."""
    return F.gelu(gate, approximate="tanh")


_ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {"silu": F.silu, "gelu_tanh": gelu_tanh, "clamped_gelu": quick_gelu}
)


def _window_fields(architecture: ModelArchitecture) -> dict[str, Any]:
    local = architecture.local
    if local is None:
        return {}
    return {
        # megatron-core counts the tokens to the left of a token, excluding itself.
        "window_size": (local.window - 1, 0),
        "window_attn_skip_freq": [int(layer in local.layers) for layer in range(architecture.num_layers)],
    }


def _delta_fields(architecture: ModelArchitecture, layout: ParallelLayout) -> dict[str, Any]:
    delta = architecture.delta
    if delta is None:
        return {}
    check_heads(delta.key_heads, delta.value_heads, layout.tensor, layout.context)
    return {
        "linear_attention_freq": [int(layer in delta.layers) for layer in range(architecture.num_layers)],
        "linear_conv_kernel_dim": delta.kernel_size,
        "linear_key_head_dim": delta.key_dim,
        "linear_value_head_dim": delta.value_dim,
        "linear_num_key_heads": delta.key_heads,
        "linear_num_value_heads": delta.value_heads,
    }


def check_heads(key_heads: int, value_heads: int, tensor: int, context: int) -> None:
    """Raise ValueError unless tensor and context ranks can share the heads of a gated delta net."""
    for field_name, heads in (("linear_num_key_heads", key_heads), ("linear_num_value_heads", value_heads)):
        if heads % (tensor * context):
            raise ValueError(
                f"a gated delta net's heads are cut over tensor parallel {tensor} x context parallel {context} = "
                f"{tensor * context} ranks, which do not divide {field_name} {heads}; choose a divisor"
            )


def _communication_fields(layout: ParallelLayout) -> dict[str, Any]:
    # The interleaved schedule must not send forward and backward in one call: with pipeline = 2 both go to the same rank, and
    # megatron-core's exchange of lengths (p2p_communication.py:_communicate_shapes) would swap them.
    interleaved = layout.virtual_pipeline > 1
    return {
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": torch.cuda.is_available() and not interleaved,
        # megatron-core waits for the device after every hand-over because of a bug in old torch versions.
        "batch_p2p_sync": False,
    }


def _layout_fields(layout: ParallelLayout) -> dict[str, Any]:
    # With two stages the first determines both: given both, megatron-core divides by the stages between them.
    last = layout.last_stage_layers if layout.pipeline > 2 or not layout.first_stage_layers else 0
    return {
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
        "num_layers_in_first_pipeline_stage": layout.first_stage_layers or None,
        "num_layers_in_last_pipeline_stage": last or None,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "sequence_parallel": layout.sequence_parallel,
        # Interleaved schedules free an output while gloo still sends it: its work object holds the tensor, not the storage.
        "deallocate_pipeline_outputs": layout.virtual_pipeline == 1,
    }
