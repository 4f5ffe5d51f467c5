"""Architecture of a decoder: its sizes, and the names and shapes of its tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from megatron_dapo.models.families import FAMILIES, VISION_TENSORS

RopeKind = Literal["linear", "llama3"]


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of the rotary frequencies.

    linear: every frequency is divided by `factor`. llama3: wavelengths above original / low_freq_factor are divided by
    `factor`, those below original / high_freq_factor are kept, those between are blended.
    """

    kind: RopeKind
    factor: float
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None


LANGUAGE_MODEL = "ForCausalLM"
TOKEN_VALUE = "ForTokenClassification"  # one label: score.weight and score.bias give a value for every token
SEQUENCE_VALUE = "ForSequenceClassification"  # one label: only score.weight, a reward model
HEADS = (LANGUAGE_MODEL, TOKEN_VALUE, SEQUENCE_VALUE)


@dataclass(frozen=True)
class MixtureOfExperts:
    """Mixture of experts in place of the MLP: a token goes to the `num_experts_per_token` experts of highest softmax
    probability, and their outputs are weighted by it."""

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int  # one expert's
    normalize: bool  # divide the probabilities of the chosen experts by their sum
    layers: frozenset[int]  # layers with experts; the others have a dense MLP


@dataclass(frozen=True)
class Gemma3:
    """Differences of Gemma 3 (arXiv:2503.19786) from the other families.

    Attention and MLP each have a norm before and one after, before the residual is added. The weight of a norm is stored as
    its difference from 1. Embeddings are multiplied by sqrt(hidden_size), the gate of the MLP is GELU in its tanh
    form. Local layers see the last `window` tokens and have a separate rotary base; the others see all.
    """

    attention_scale: float  # scale of the products of queries and keys
    local_layers: frozenset[int]
    window: int  # tokens that a token of a local layer sees, itself included
    local_rope_theta: float


@dataclass(frozen=True)
class ModelArchitecture:
    """A decoder of one of FAMILIES: RMSNorm, rotary positions, grouped-query attention, gated MLP or experts."""

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
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    tie_word_embeddings: bool  # the output matrix is the embedding; never with a value head
    qkv_bias: bool
    qk_norm: bool
    dtype: str | None  # the weights', according to config.json; None if not given
    experts: MixtureOfExperts | None = None  # None: a dense model
    head: str = LANGUAGE_MODEL  # one of HEADS
    gemma3: Gemma3 | None = None  # None: another family
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
    def is_gemma3(self) -> bool:
        """True if a layer has four norms and SGLang holds the whole embedding on each rank."""
        return self.gemma3 is not None

    @property
    def num_norms(self) -> int:
        """Norms of a layer, over the hidden size."""
        return 4 if self.is_gemma3 else 2

    def layer_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        """Return Hugging Face name -> shape of one layer's tensors, in the order of a forward pass."""
        hidden, head = self.hidden_size, self.head_dim
        query, key_value = self.num_attention_heads * head, self.num_key_value_heads * head
        prefix = f"model.layers.{layer}."
        attention = prefix + "self_attn."
        shapes: dict[str, tuple[int, ...]] = {prefix + "input_layernorm.weight": (hidden,)}
        for name, rows in (("q_proj", query), ("k_proj", key_value), ("v_proj", key_value)):
            shapes[attention + name + ".weight"] = (rows, hidden)
            if self.qkv_bias:
                shapes[attention + name + ".bias"] = (rows,)
        if self.qk_norm:
            shapes[attention + "q_norm.weight"] = shapes[attention + "k_norm.weight"] = (head,)
        shapes[attention + "o_proj.weight"] = (hidden, query)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        if self.gemma3 is not None:
            shapes[prefix + "pre_feedforward_layernorm.weight"] = (hidden,)
            shapes |= self._mlp_shapes(prefix + "mlp.", self.intermediate_size)
            return shapes | {prefix + "post_feedforward_layernorm.weight": (hidden,)}
        if not self.has_experts(layer):
            return shapes | self._mlp_shapes(prefix + "mlp.", self.intermediate_size)
        assert self.experts is not None
        shapes[prefix + ROUTER] = (self.experts.num_experts, hidden)
        for expert in range(self.experts.num_experts):
            shapes |= self._mlp_shapes(f"{prefix}mlp.experts.{expert}.", self.experts.intermediate_size)
        return shapes

    def _mlp_shapes(self, prefix: str, intermediate_size: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of one gated MLP, of a dense layer or of an expert."""
        into = (intermediate_size, self.hidden_size)
        return {
            prefix + "gate_proj.weight": into,
            prefix + "up_proj.weight": into,
            prefix + "down_proj.weight": into[::-1],
        }

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
        """Return True for a tensor that is not trained and goes into exports as it is: those of a vision tower."""
        return self.model_type == "gemma3" and name.removeprefix("model.").startswith(VISION_TENSORS)

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
        width, local = self.num_attention_heads * self.head_dim, self.gemma3.local_layers if self.gemma3 else ()
        weights = self.vocab_size * self.hidden_size if self.head == LANGUAGE_MODEL else 0
        experts = self.experts
        for layer in range(self.num_layers):
            for name, shape in self.layer_shapes(layer).items():
                share = experts.num_experts_per_token / experts.num_experts if experts and ".experts." in name else 1.0
                weights += int(share * math.prod(shape))
        if self.gemma3 is not None:
            weights += 2 * self.gemma3.window * width * len(local)
        return weights // (max(1, self.num_layers - len(local)) * width)


EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"
VALUE_WEIGHT = "score.weight"
VALUE_BIAS = "score.bias"
ROUTER = "mlp.gate.weight"  # exists in layers with experts
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
