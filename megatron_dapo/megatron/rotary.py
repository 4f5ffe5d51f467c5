"""Inverse frequencies of the rotary embedding, as Hugging Face configurations define them.

megatron-core builds the unscaled ones and knows one set of Llama 3 constants; these are set on its rotary module
instead, so that every supported `rope_scaling` has the numbers of the configuration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from megatron_dapo.checkpoints.architecture import RopeScaling


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> torch.Tensor:
    """[head_dim / 2] fp32: theta^(-2i / head_dim), scaled as `scaling` says."""
    base = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim)
    return base if scaling is None else SCALINGS[scaling.kind](base, scaling)


def _linear(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Position interpolation (arXiv:2306.15595): positions divided by the factor."""
    return frequencies / scaling.factor


def _llama3(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Llama 3.1: long wavelengths divided by the factor, short ones kept, a blend of the two in between."""
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


SCALINGS: Mapping[str, Callable[[torch.Tensor, RopeScaling], torch.Tensor]] = MappingProxyType(
    {"linear": _linear, "llama3": _llama3}
)
