"""What a family of models states about itself: how its config.json is read, and which parts its layers have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from megatron_dapo.models.parts.attention import GroupedQueryAttention
from megatron_dapo.models.parts.experts import RoutedExperts
from megatron_dapo.models.parts.gated_attention import GatedAttention
from megatron_dapo.models.parts.gated_delta import GatedDeltaMixer
from megatron_dapo.models.parts.latent_attention import MultiHeadLatentAttention
from megatron_dapo.models.parts.mlp import GatedMlp
from megatron_dapo.models.parts.shared_expert import GatedSharedExpert
from megatron_dapo.models.placement import LayerPart

if TYPE_CHECKING:
    from megatron_dapo.models.architecture import ModelArchitecture

Fields = Mapping[str, Any]  # config.json's
# Values of layer_types.
FULL_ATTENTION, LOCAL_ATTENTION, GATED_DELTA = "full_attention", "sliding_attention", "linear_attention"


def decoder_parts(architecture: ModelArchitecture, layer: int) -> tuple[LayerPart, ...]:
    """Return grouped-query or latent attention or a gated delta net, and a gated MLP or experts; with sandwich norms, a norm
    before and one after each."""
    a = architecture
    mixer: LayerPart
    if a.delta is not None and layer in a.delta.layers:
        d = a.delta
        sizes = (d.key_heads, d.value_heads, d.key_dim, d.value_dim, d.kernel_size, d.fused)
        mixer = GatedDeltaMixer(a.hidden_size, *sizes)
    elif a.latent is not None:
        mixer = MultiHeadLatentAttention(a.hidden_size, a.num_attention_heads, a.latent)
    else:
        kind = GatedAttention if a.gated_attention else GroupedQueryAttention
        mixer = kind(
            *(a.hidden_size, a.num_attention_heads, a.num_key_value_heads, a.head_dim),
            *(a.qkv_bias, a.qk_norm, a.sandwich_norms),
        )
    if a.experts is not None and a.has_experts(layer):
        experts = a.experts
        routed = RoutedExperts(
            *(a.hidden_size, experts.num_experts, experts.intermediate_size, experts.num_experts_per_token),
            bias=experts.routing is not None,
            shared=experts.shared_intermediate_size,
        )
        shared = experts.gated_shared_size
        return (mixer, routed, GatedSharedExpert(a.hidden_size, shared)) if shared else (mixer, routed)
    norms = ("pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight") if a.sandwich_norms else ()
    return mixer, GatedMlp(a.hidden_size, a.intermediate_size, *norms)


def no_features(config: Fields) -> dict[str, Any]:
    """Return nothing: the fields that all decoders share describe the model."""
    return {}


@dataclass(frozen=True)
class Serving:
    """Properties of SGLang's class of a family."""

    prefix: str = ""  # all its parameters' names begin with it
    whole_embedding: bool = False  # every rank holds the whole embedding, which also computes the logits
    ties_output: bool = True  # False: the class has a separate output matrix even if config.json ties it
    dense_layers: bool = True  # False: every layer of a model with experts is built with experts
    expert_parallel: bool = True  # False: its loader gives every rank all experts
    on_cpu: bool = True  # False: its attention of plain torch layers, which is what runs on a CPU, cannot compute the model
    synced: tuple[str, ...] = ()  # further arguments of a server whose weights come by weight syncs


@dataclass(frozen=True)
class Family:
    """Properties of a model_type that its config.json has no field for, and the fields that only its config.json has.

    A family of layers like Llama's needs the first four. The others are for layers of further kinds (docs/new_family.md).
    """

    name: str  # a class name in "architectures" is this and the head's, e.g. "Qwen2" and "ForCausalLM"
    qkv_bias: bool
    qk_norm: bool
    derives_head_dim: bool  # hidden_size / num_attention_heads if the config has no head_dim
    experts: bool = False  # layers may hold a mixture of experts instead of one MLP
    class_names: Mapping[str, str] = field(default_factory=dict)  # head -> class, if it is not `name` + head
    # Fields of config.json besides those of all decoders: that `features` reads, that change neither logits nor
    # gradients, and that would change them, with the values for which they do not.
    used: frozenset[str] = frozenset()
    neutral: frozenset[str] = frozenset()
    required: Mapping[str, tuple[Any, ...]] = field(default_factory=lambda: MappingProxyType({"hidden_act": ("silu",)}))
    layer_kinds: frozenset[str] = frozenset({FULL_ATTENTION})  # supported values of layer_types
    language_model: Callable[[Fields], dict[str, Any]] = (
        dict  # config.json -> the language model's fields, with defaults
    )
    features: Callable[[Fields], dict[str, Any]] = no_features  # further fields of `ModelArchitecture`
    parts: Callable[[ModelArchitecture, int], tuple[LayerPart, ...]] = decoder_parts
    predicts_further: bool = False  # a checkpoint may have layers after the last one, which are exported unchanged
    carried: tuple[str, ...] = ()  # prefixes, after "model.", of tensors that are exported unchanged
    decoder_prefix: str = "model."  # prefix of the decoder's modules in the class that transformers' AutoModelForCausalLM makes
    serving: Serving = Serving()

    def class_name(self, head: str) -> str:
        """Return the name of the class with this head, such as "ForCausalLM", under "architectures" of config.json."""
        return self.class_names.get(head, self.name + head)
