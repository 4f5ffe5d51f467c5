"""Properties of a decoder that not every model has, each read from config.json by `megatron_dapo.models.families`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RopeKind = Literal["linear", "llama3"]
# clamped_gelu: x sigmoid(1.702 x) of a gate up to CLAMP, times 1 + up, which is in [-CLAMP, CLAMP] (gpt-oss).
Activation = Literal["silu", "gelu_tanh", "clamped_gelu"]
CLAMP = 7.0


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


@dataclass(frozen=True)
class Yarn:
    """Scaling of rotary frequencies by wavelength and of attention (arXiv:2309.00071), as in DeepSeek-V2 and later."""

    factor: float
    original_max_position_embeddings: int
    # Rotations over the original context: above `beta_fast` frequencies are kept, below `beta_slow` they are divided by `factor`.
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    # Weights of log(factor) in the scale of cos and sin, and in its divisor, whose square scales the products.
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    truncate: bool = True  # the first and the last scaled pair of dims are whole numbers


@dataclass(frozen=True)
class LatentAttention:
    """Sizes of multi-head latent attention: ranks of the compressed vectors, and dims of a head's query, key and value."""

    query_rank: int | None  # None: queries are not compressed
    key_value_rank: int
    content_dim: int  # the part of a query or key without position
    rotary_dim: int  # the part with position; all heads share the key's
    value_dim: int
    yarn: Yarn | None = None

    @property
    def query_dim(self) -> int:
        return self.content_dim + self.rotary_dim


@dataclass(frozen=True)
class GroupedRouting:
    """Routing of DeepSeek-V3 (arXiv:2412.19437, section 2.1.2): sigmoid scores, to which a stored bias is added to choose, only
    from the best `num_kept_groups` groups of experts; the chosen scores are multiplied by `scale`."""

    num_groups: int
    num_kept_groups: int
    scale: float


@dataclass(frozen=True)
class MixtureOfExperts:
    """Mixture of experts in place of the MLP: a token goes to the `num_experts_per_token` experts of highest softmax
    probability, and their outputs are weighted by it; or see `routing` and `softmax_of_chosen`."""

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int  # one expert's
    normalize: bool  # divide the probabilities of the chosen experts by their sum
    layers: frozenset[int]  # layers with experts; the others have a dense MLP
    gated_shared_size: int = 0  # width of an expert for every token, times a sigmoid of a projection; 0: none
    routing: GroupedRouting | None = None
    shared_intermediate_size: int = 0  # the shared MLP's, which every token passes
    softmax_of_chosen: bool = False  # the highest logits choose experts, and the weights are the softmax of these logits


@dataclass(frozen=True)
class LocalAttention:
    """Layers whose tokens see the last `window` tokens; the other layers see all."""

    layers: frozenset[int]
    window: int  # tokens, a token itself included
    rope_theta: float | None  # their rotary base, without scaling; None: rotated like the others


@dataclass(frozen=True)
class GatedDelta:
    """Layers with a gated delta net in place of attention (arXiv:2412.06464)."""

    layers: frozenset[int]
    key_heads: int
    value_heads: int  # a multiple of `key_heads`
    key_dim: int  # a head's
    value_dim: int
    kernel_size: int  # tokens that the convolution reads, a token itself included
    fused: bool  # form of the projections in a checkpoint (`parts.gated_delta`)
