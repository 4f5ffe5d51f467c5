"""Architecture of a decoder: its sizes, and the names and shapes of its tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_dapo.models.blocks import (
    Activation,
    GatedDelta,
    LatentAttention,
    LocalAttention,
    MixtureOfExperts,
    RopeScaling,
    Yarn,
)
from megatron_dapo.models.families import FAMILIES
from megatron_dapo.models.family import Serving
from megatron_dapo.models.placement import LayerPart
from megatron_dapo.precision import LinearSize

LANGUAGE_MODEL = "ForCausalLM"
TOKEN_VALUE = "ForTokenClassification"  # one label: score.weight and score.bias give a value for every token
SEQUENCE_VALUE = "ForSequenceClassification"  # one label: only score.weight, a reward model
HEADS = (LANGUAGE_MODEL, TOKEN_VALUE, SEQUENCE_VALUE)


@dataclass(frozen=True)
class ModelArchitecture:
    """A decoder of one of FAMILIES: RMSNorm, rotary positions, and layers made of `parts`."""

    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int  # a dense MLP's
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | Yarn | None
    max_position_embeddings: int
    tie_word_embeddings: bool  # the output matrix is the embedding; never with a value head
    qkv_bias: bool
    qk_norm: bool
    dtype: str | None  # the weights', according to config.json; None if not given
    experts: MixtureOfExperts | None = None  # None: a dense model
    head: str = LANGUAGE_MODEL  # one of HEADS
    local: LocalAttention | None = None  # None: every token sees all before it, in all layers
    delta: GatedDelta | None = None  # None: all layers have attention
    gated_attention: bool = False  # attention's output is multiplied by a sigmoid of a second projection
    rotary_dim: int | None = None  # first dims of a head that the rotary embedding rotates; None: all
    latent: LatentAttention | None = None  # None: attention has separate queries, keys and values
    attention_scale: float | None = None  # scale of the products of queries and keys; None: 1 / sqrt(head_dim)
    activation: Activation = "silu"  # the gate's
    sandwich_norms: bool = False  # attention and MLP have a norm after them, too
    sinks: bool = False  # each head has a learned logit in the softmax's denominator (arXiv:2309.17453)
    linear_biases: bool = False  # attention's output, routers and experts have biases, too
    zero_centered_norms: bool = False  # a norm's weight is stored as its difference from 1
    scales_embedding: bool = False  # embeddings are multiplied by sqrt(hidden_size)
    vision_parameters: int = 0  # parameters of a vision tower that SGLang holds next to the language model

    def with_value_head(self) -> ModelArchitecture:
        """Return the critic of this model: the same layers, with a value head in place of the output matrix."""
        return replace(self, head=TOKEN_VALUE, tie_word_embeddings=False)

    @property
    def class_name(self) -> str:
        """Class name under "architectures" of config.json."""
        return FAMILIES[self.model_type].class_name(self.head)

    @property
    def query_groups_ratio(self) -> int:
        """Number of query heads that share one key-value head."""
        return self.num_attention_heads // self.num_key_value_heads

    def has_experts(self, layer: int) -> bool:
        """Return True if this layer has a mixture of experts in place of a dense MLP."""
        return self.experts is not None and layer in self.experts.layers

    @property
    def has_dense_layers(self) -> bool:
        """True unless every layer has experts."""
        return self.experts is None or len(self.experts.layers) < self.num_layers

    @property
    def num_experts(self) -> int:
        """Experts of a layer; 0: a dense model."""
        return self.experts.num_experts if self.experts else 0

    @property
    def num_experts_per_token(self) -> int:
        return self.experts.num_experts_per_token if self.experts else 0

    @property
    def moe_intermediate_size(self) -> int:
        """Width of one expert; 0: a dense model."""
        return self.experts.intermediate_size if self.experts else 0

    @property
    def serving(self) -> Serving:
        """Properties of SGLang's class of the model."""
        return FAMILIES[self.model_type].serving

    @property
    def decoder_prefix(self) -> str:
        """Prefix of the decoder's modules in the class that transformers' AutoModelForCausalLM makes of the model."""
        return FAMILIES[self.model_type].decoder_prefix

    def parts(self, layer: int) -> tuple[LayerPart, ...]:
        """Return the parts of a layer, in the order of a forward pass."""
        return self._parts[layer]

    @cached_property
    def _parts(self) -> list[tuple[LayerPart, ...]]:
        return [FAMILIES[self.model_type].parts(self, layer) for layer in range(self.num_layers)]

    @cached_property
    def kinds_of_layers(self) -> Mapping[tuple[LayerPart, ...], frozenset[int]]:
        """The parts of a layer -> the layers that consist of them."""
        kinds: dict[tuple[LayerPart, ...], list[int]] = {}
        for layer, parts in enumerate(self._parts):
            kinds.setdefault(parts, []).append(layer)
        return {parts: frozenset(layers) for parts, layers in kinds.items()}

    def linear_sizes(self) -> list[LinearSize]:
        """Return the sizes of the linear layers' weights, in the order of a forward pass, each once."""
        sizes = (size for parts in self.kinds_of_layers for part in parts for size in part.linear_sizes())
        return list(dict.fromkeys(sizes))

    def layer_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        """Return Hugging Face name -> shape of one layer's tensors, in the order of a forward pass."""
        prefix = f"model.layers.{layer}."
        return {prefix + name: shape for part in self.parts(layer) for name, shape in part.shapes().items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return Hugging Face name -> shape of every distinct tensor; a tied model has no lm_head.weight."""
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (self.vocab_size, self.hidden_size)}
        for layer in range(self.num_layers):
            shapes.update(self.layer_shapes(layer))
        shapes[FINAL_NORM] = (self.hidden_size,)
        return shapes | self.head_shapes()

    def head_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors after the last norm; empty for a tied model."""
        if self.head == LANGUAGE_MODEL:
            return {} if self.tie_word_embeddings else {LM_HEAD: (self.vocab_size, self.hidden_size)}
        weight: dict[str, tuple[int, ...]] = {VALUE_WEIGHT: (1, self.hidden_size)}
        return weight if self.head == SEQUENCE_VALUE else {**weight, VALUE_BIAS: (1,)}

    def is_carried(self, name: str) -> bool:
        """Return True for a tensor that is not trained and goes into exports as it is: those of a vision tower, or of layers
        after the last one that predict further tokens (arXiv:2412.19437, section 2.2)."""
        family, layer = FAMILIES[self.model_type], _LAYER.match(name)
        if family.predicts_further and layer is not None and int(layer[1]) >= self.num_layers:
            return True
        return name.removeprefix("model.").startswith(family.carried)

    def is_float32(self, name: str) -> bool:
        """Return True for a tensor that has fp32 in a model of any type."""
        match = _LAYER.match(name)
        return match is not None and name[match.end() :] in self._float32

    @cached_property
    def _float32(self) -> frozenset[str]:
        return frozenset(name for parts in self.kinds_of_layers for part in parts for name in part.float32)

    def aliases(self) -> dict[str, str]:
        """Return second names under which a directory may store a tensor -> the tensor."""
        return {LM_HEAD: EMBEDDING} if self.tie_word_embeddings else {}

    @property
    def num_parameters(self) -> int:
        """Number of elements of all distinct tensors."""
        return sum(math.prod(shape) for shape in self.shapes().values())

    @property
    def attention_parity(self) -> int:
        """Sequence length at which causal attention takes as many operations as all products with weights.

        Per token, a layer takes 2 operations per weight, and 2 n x (query heads x head size) on average over a sequence
        of n tokens: half of the keys, for scores and for values. A local layer sees at most w keys, so its cost does
        not grow with n: it counts as 2 w weights per element of the queries.
        """
        parts = [part for parts in self._parts for part in parts]
        width = max(part.attention_width for part in parts)
        weights = self.vocab_size * self.hidden_size if self.head == LANGUAGE_MODEL else 0
        weights += sum(part.weights_per_token for part in parts)
        num_global = sum(part.attention_width > 0 for part in parts)
        if self.local is not None:
            num_global -= len(self.local.layers)
            weights += 2 * self.local.window * width * len(self.local.layers)
        return weights // (max(1, num_global) * width)


_LAYER = re.compile(r"model\.layers\.(\d+)\.")
EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"
VALUE_WEIGHT = "score.weight"
VALUE_BIAS = "score.bias"
# Tensor names of a language model with a vision tower, as published and as in transformers 5's memory.
_BESIDE_VISION = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
)


def tensor_name(stored: str) -> str:
    """Return our name of a stored tensor, which is the same with and without a vision tower."""
    for theirs, ours in _BESIDE_VISION:
        if stored.startswith(theirs):
            return ours + stored.removeprefix(theirs)
    return stored
