"""FP8 with a scale a block: the rule of Transformer Engine's blockwise recipe, of trainer, log-prob head and rollout.

A matrix of activations [rows, width] has a scale for 128 values of a row, a weight one for 128 x 128. With `amax` the
largest magnitude of a block, its values are multiplied by the largest power of two that is at most 448 / amax (1 for a
block of zeros), rounded to e4m3 to the nearest, ties to even, and multiplied back after the product. Powers of two
change no bit of a value but its exponent, and are what Transformer Engine and SGLang's checkpoints of this scheme use
here.

**Error.** e4m3 has 3 bits after the leading one, so rounding moves a value x by at most 2^-4 |x|, or by half the step of
its subnormals, 2^-10 in the scaled block, whichever is more (`rounding_bound`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK = 128  # values along a row, and rows of a weight, that share a scale
E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max  # 448
RELATIVE_ERROR = 2.0**-4
HALF_SUBNORMAL_STEP = 2.0**-10


@dataclass(frozen=True)
class Quantized:
    """`values` [rows, width] e4m3; `scales` fp32, [rows, width / 128] or [rows / 128, width / 128], what the values are
    multiplied with to get the originals back."""

    values: torch.Tensor
    scales: torch.Tensor

    def widened(self) -> torch.Tensor:
        """[rows, width] fp32, the values that the products really multiply."""
        return self.values.float() * self.spread_scales()

    def spread_scales(self) -> torch.Tensor:
        """[rows, width] the scale of every value."""
        rows_a_scale = self.values.size(0) // max(1, self.scales.size(0))
        return self.scales.repeat_interleave(rows_a_scale, 0).repeat_interleave(BLOCK, 1)


def quantize_hidden(hidden: torch.Tensor) -> Quantized:
    """[rows, width] of any float type; a scale for 128 values of a row. `width` must be a multiple of 128."""
    blocks = hidden.float().unflatten(1, (-1, BLOCK))
    multiplier = block_multiplier(blocks.abs().amax(dim=2))
    return Quantized((blocks * multiplier[..., None]).to(E4M3).flatten(1), multiplier.reciprocal())


def quantize_weight(weight: torch.Tensor) -> Quantized:
    """[rows, width]; a scale for 128 x 128. Both must be multiples of 128."""
    blocks = weight.float().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    multiplier = block_multiplier(blocks.abs().amax(dim=(1, 3)))
    values = (blocks * multiplier[:, None, :, None]).to(E4M3)
    return Quantized(values.flatten(2, 3).flatten(0, 1), multiplier.reciprocal())


def block_multiplier(amax: torch.Tensor) -> torch.Tensor:
    """The largest power of two of at most 448 / amax; 1 where there is nothing to scale, or nothing finite."""
    fits = LARGEST / amax
    power = torch.ldexp(torch.ones_like(fits), torch.frexp(fits.clamp(max=2.0**126)).exponent - 1)
    return torch.where((amax > 0) & torch.isfinite(amax), power, 1.0)


def rounding_bound(values: torch.Tensor, quantized: Quantized) -> torch.Tensor:
    """[rows, width] fp64: the most by which rounding can have moved each of `values`."""
    subnormal = HALF_SUBNORMAL_STEP * quantized.spread_scales().double()
    return torch.maximum(RELATIVE_ERROR * values.double().abs(), subnormal)
