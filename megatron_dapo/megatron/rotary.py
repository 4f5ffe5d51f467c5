"""Inverse frequencies of the rotary embedding, and what their scaling does to attention.

megatron-core builds unscaled frequencies and has a single set of Llama 3 constants. Ours replace those on its rotary module, so that
every supported `rope_scaling` uses the numbers in the Hugging Face configuration.
"""

from __future__ import annotations

import math
from types import MappingProxyType

import torch

from megatron_dapo.models.architecture import ModelArchitecture
from megatron_dapo.models.blocks import RopeScaling, Yarn


def rotary_frequencies(architecture: ModelArchitecture) -> torch.Tensor:
    """Return the inverse frequencies of all layers, half as many as rotated dims of a head, in fp32; those of local layers
    follow, if there are any."""
    size, local = architecture.rotary_dim or architecture.head_dim, architecture.local
    wide = inverse_frequencies(size, architecture.rope_theta, architecture.rope_scaling)
    if local is None:
        return wide
    return torch.cat((wide, wide if local.rope_theta is None else inverse_frequencies(size, local.rope_theta, None)))


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | Yarn | None) -> torch.Tensor:
    """Return theta^(-2i / head_dim), [head_dim / 2] fp32, scaled by the rule of `scaling`."""
    base = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim)
    if isinstance(scaling, Yarn):
        return _yarn(base, theta, scaling)
    return base if scaling is None else SCALINGS[scaling.kind](base, scaling)


def _llama3(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Scale as in Llama 3.1: divide long wavelengths by the factor, keep short ones, blend in between."""
    factor, low, high, context = (
        scaling.factor,
        scaling.low_freq_factor,
        scaling.high_freq_factor,
        scaling.original_max_position_embeddings,
    )
    assert low is not None and high is not None and context is not None, f"incomplete {scaling}"
    wavelengths = 2 * math.pi / frequencies
    blend = (context / wavelengths - low) / (high - low)
    blended = (1 - blend) * frequencies / factor + blend * frequencies
    scaled = torch.where(wavelengths > context / low, frequencies / factor, blended)
    return torch.where(wavelengths < context / high, frequencies, scaled)


SCALINGS = MappingProxyType(
    # Linear interpolation of positions, arXiv:2306.15595.
    {"linear": lambda frequencies, scaling: frequencies / scaling.factor, "llama3": _llama3}
)


def _yarn(frequencies: torch.Tensor, theta: float, yarn: Yarn) -> torch.Tensor:
    """Scale as in YaRN (arXiv:2309.00071, section 3.2)."""
    dim, log_base = 2 * len(frequencies), 2 * math.log(theta)

    def pair_of(rotations: float) -> float:
        """The pair, counted with fractions, that turns so many times over the original context."""
        return dim * math.log(yarn.original_max_position_embeddings / (rotations * 2 * math.pi)) / log_base

    first, last = pair_of(yarn.beta_fast), pair_of(yarn.beta_slow)
    if yarn.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    share = ((torch.arange(dim // 2).float() - first) / max(last - first, 0.001)).clamp(0, 1)
    return frequencies / yarn.factor * share + frequencies * (1 - share)


def yarn_scale(yarn: Yarn) -> float:
    """Return the factor of cos and sin (arXiv:2309.00071, section 3.4)."""
    return yarn_factor(yarn.factor, yarn.mscale) / yarn_factor(yarn.factor, yarn.mscale_all_dim)


def yarn_factor(scaling_factor: float, weight: float) -> float:
    """Return YaRN's factor of attention (its equation 22), whose logarithm has the given weight."""
    return 0.1 * weight * math.log(scaling_factor) + 1.0 if scaling_factor > 1 else 1.0


def attention_scale(architecture: ModelArchitecture) -> float | None:
    """Return the scale of the products of queries and keys; None: 1 / sqrt(head_dim). With YaRN it has the factor of both, so that
    cos and sin need none."""
    scale, scaling = architecture.attention_scale, architecture.rope_scaling
    if not isinstance(scaling, Yarn):
        return scale
    return float((scale or architecture.head_dim**-0.5) * yarn_scale(scaling) ** 2)
