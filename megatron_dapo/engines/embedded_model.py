"""transformers' model as the embedded engine holds it: empty until the bridge fills it, under the names of Hugging Face checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights

from megatron_dapo.engines.recurrent_states import DELTA
from megatron_dapo.engines.slot_cache import register_attention
from megatron_dapo.models.parts.biased_experts import experts_of
from megatron_dapo.models.parts.experts import EXPERT_BIAS
from megatron_dapo.models.parts.gated_delta import DECAY

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

GLOBAL, LOCAL = "full_attention", "sliding_attention"  # kinds of layers, which transformers gives a mask each
# Kinds of layers, besides global attention, whose caches the engine has.
SUPPORTED_KINDS = {
    **dict.fromkeys(("gemma3_text", "gpt_oss"), {LOCAL}),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), {DELTA}),
}
# transformers' fused parameter of a layer's experts -> the projections it is made of.
_FUSED_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def check_config(config: PreTrainedConfig) -> None:
    """ValueError for attention that a cache of whole columns cannot serve."""
    kinds = set(getattr(config, "layer_types", None) or [GLOBAL])
    supported = {GLOBAL} | SUPPORTED_KINDS.get(config.model_type, set())
    if not kinds <= supported:
        raise ValueError(
            f"embedded engine: {config.model_type} uses layers of kind {sorted(kinds)}, only full_attention is supported; "
            "switch sliding windows off in config.json (use_sliding_window false) or use another engine"
        )
    required = ("num_hidden_layers", "num_key_value_heads", "vocab_size")
    missing = [name for name in required if getattr(config, name, None) is None]
    if missing:
        raise ValueError(f"embedded engine: the config of {config.model_type} has no {', '.join(missing)}")
    if getattr(config, "attn_logit_softcapping", None):
        raise ValueError(
            f"embedded engine: attn_logit_softcapping = {config.attn_logit_softcapping} ({config.model_type}) "
            "is not supported"
        )


def has_recurrent_layers(config: PreTrainedConfig) -> bool:
    """Return True if some layers keep a state of fixed size in place of keys and values."""
    return DELTA in (getattr(config, "layer_types", None) or ())


def window_of(config: PreTrainedConfig) -> int | None:
    """Return how many tokens a token of local layers sees, itself included; None for a model without such layers."""
    return int(config.sliding_window) if LOCAL in (getattr(config, "layer_types", None) or ()) else None


def stored_parts(name: str, tensor: torch.Tensor, biased_experts: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a parameter under its names in a checkpoint. transformers holds a layer's experts in one tensor; checkpoints,
    and so the weight sync, know each expert's matrices, which are views of it. Experts with biases are transposed."""
    prefix, _, kind = name.rpartition(".")
    if not prefix.endswith(".mlp.experts"):
        yield name, tensor
        return
    if biased_experts:
        yield from experts_of(name, tensor)
        return
    for expert, whole in enumerate(tensor):
        parts = whole.chunk(len(_FUSED_EXPERTS[kind]))  # views: writing them fills the fused parameter
        for projection, part in zip(_FUSED_EXPERTS[kind], parts, strict=True):
            yield f"{prefix}.{expert}.{projection}.weight", part


def weights_by_name(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint, under their names there. What is no parameter is what a router adds to scores."""
    parameters = {name: parameter.data for name, parameter in model.named_parameters()}
    buffers = {name: buffer for name, buffer in model.named_buffers() if name.endswith(EXPERT_BIAS)}
    biased_experts = any(name.endswith(".mlp.experts.down_proj_bias") for name in parameters)
    return {
        stored: part
        for name, tensor in {**parameters, **buffers}.items()
        for stored, part in stored_parts(name, tensor, biased_experts)
    }


def _normalize_alike(model: PreTrainedModel) -> None:
    """Give the norms of latent attention's compressed vectors the config's epsilon, as in the trainer and SGLang; transformers has a
    constant there."""
    for name, module in model.named_modules():
        if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
            module.variance_epsilon = model.config.rms_norm_eps


def empty_model(config: PreTrainedConfig, dtype: torch.dtype, device: str | torch.device) -> PreTrainedModel:
    """The model with all weights NaN, in inference state."""
    own_config = copy.deepcopy(config)  # building a model writes its attention implementation into the config
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(
            own_config, dtype=dtype, attn_implementation=register_attention(), experts_implementation="eager"
        )
    model.tie_weights()
    model.to(device).eval().requires_grad_(False)
    _normalize_alike(model)
    # The trainer keeps routers' biases in fp32, whatever the model's type (`LayerPart.float32`).
    bias = EXPERT_BIAS.rpartition(".")[2]
    for module in model.modules():
        if bias in module._buffers:
            module.register_buffer(bias, getattr(module, bias).float())
    for name, parameter in model.named_parameters():
        if name.endswith(DECAY):
            parameter.data = parameter.data.float()
    for tensor in weights_by_name(model).values():
        tensor.fill_(float("nan"))
    return model
