"""FP8 with a scale a block, by the rule of Transformer Engine's blockwise recipe, and a linear layer that emulates it.

A matrix of activations [rows, width] has a scale for 128 values of a row, a weight one for 128 x 128. With `amax` the
largest magnitude of a block, its values are multiplied by the largest power of two that is at most 448 / amax (1 for a
block of zeros), rounded to e4m3 to the nearest, ties to even, and multiplied back after the product.

The three products of a linear layer, with [.]r quantized under a scale for 128 values of a row, [.]t under one for 128
tokens of a column, [.]b under one for 128 x 128:

    y      = [x]r [W]b^T             forward
    grad x = [g]r [W]b               g = grad y; as if rounding had the derivative 1
    grad W = [g]t^T [x]t             x is quantized again, in the direction in which it is summed
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megatron_dapo.rounding import round_up

# The log-prob head, the weight sync and the emulated layers share this rule: scales that are powers of two change no bit of
# a value but its exponent, so quantizing a quantized value changes nothing.
BLOCK = 128  # values along a row, and rows of a weight, that share a scale
END = 16  # divides the rows of a smaller last block: Transformer Engine's products need that
E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max  # 448


@dataclass(frozen=True)
class Quantized:
    """`values` [rows, width] e4m3; `scales` fp32, [rows, width / 128] or [rows / 128, width / 128]: the original values
    are about `values * scales`."""

    values: torch.Tensor
    scales: torch.Tensor

    def widened(self) -> torch.Tensor:
        """Return the values that the products multiply, [rows, width] fp32."""
        return self.values.float() * self.spread_scales()

    def spread_scales(self) -> torch.Tensor:
        """Return the scale of every value, [rows, width]."""
        rows_a_scale = self.values.size(0) // max(1, self.scales.size(0))
        return self.scales.repeat_interleave(rows_a_scale, 0).repeat_interleave(BLOCK, 1)


def quantize_hidden(hidden: torch.Tensor) -> Quantized:
    """Quantize [rows, width] of any float type, a scale for 128 values of a row. `width` must be a multiple of 128."""
    blocks = hidden.float().unflatten(1, (-1, BLOCK))
    multiplier = block_multiplier(blocks.abs().amax(dim=2))
    return Quantized((blocks * multiplier[..., None]).to(E4M3).flatten(1), multiplier.reciprocal())


def quantize_weight(weight: torch.Tensor) -> Quantized:
    """Quantize [rows, width], a scale for 128 x 128. Both must be multiples of 128."""
    blocks = weight.float().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    multiplier = block_multiplier(blocks.abs().amax(dim=(1, 3)))
    values = (blocks * multiplier[:, None, :, None]).to(E4M3)
    return Quantized(values.flatten(2, 3).flatten(0, 1), multiplier.reciprocal())


def block_multiplier(amax: torch.Tensor) -> torch.Tensor:
    """Return the largest power of two of at most 448 / amax; 1 if amax is 0 or not finite."""
    fits = LARGEST / amax
    # frexp gives a mantissa in [0.5, 1): its exponent less 1 is floor(log2). The clamp keeps ldexp finite in fp32.
    power = torch.ldexp(torch.ones_like(fits), torch.frexp(fits.clamp(max=2.0**126)).exponent - 1)
    return torch.where((amax > 0) & torch.isfinite(amax), power, 1.0)


# ---- a linear layer, emulated


def blockwise_linear(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply [P, in] by [out, in] -> [P, out] in hidden's type. The last block of `out` may be smaller. ValueError if P or in
    is no multiple of 128, or out of 16."""
    num_outputs = weight.size(0)
    sizes = (("tokens", hidden.size(0), BLOCK), ("inputs", weight.size(1), BLOCK), ("outputs", num_outputs, END))
    for name, size, multiple in sizes:
        if size % multiple:
            raise ValueError(f"FP8 in blocks: {size} {name} on this rank are no multiple of {multiple}")
    if not num_outputs % BLOCK:
        return _BlockwiseLinear.apply(hidden, weight)
    # Rows of zeros change no scale and no sum.
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -num_outputs % BLOCK))
    return _BlockwiseLinear.apply(hidden, padded)[:, :num_outputs]


def blockwise_linear_padded(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Run `blockwise_linear` on any number of tokens, 0 included."""
    num_tokens = hidden.size(0)
    # Rows of zeros are in no block's largest magnitude and in no sum: the result does not depend on how many there are.
    padding = round_up(max(num_tokens, 1), BLOCK) - num_tokens
    return blockwise_linear(torch.nn.functional.pad(hidden, (0, 0, 0, padding)), weight)[:num_tokens]


def quantized_along_tokens(values: torch.Tensor) -> torch.Tensor:
    """Quantize [P, width] under a scale for 128 tokens of a column; returns the values in fp32."""
    return quantize_hidden(values.t()).widened().t()


class _BlockwiseLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        product = quantize_hidden(hidden).widened() @ quantize_weight(weight).widened().t()
        return (product + _not_finite(hidden, 1)).to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        hidden, weight = ctx.saved_tensors
        to_hidden = to_weight = None
        if ctx.needs_input_grad[0]:
            product = quantize_hidden(gradient).widened() @ quantize_weight(weight).widened()
            to_hidden = (product + _not_finite(gradient, 1)).to(hidden.dtype)
        if ctx.needs_input_grad[1]:
            product = quantized_along_tokens(gradient).t() @ quantized_along_tokens(hidden)
            to_weight = (product + _not_finite(gradient, 0).t()).to(weight.dtype)
        return to_hidden, to_weight


def _not_finite(values: torch.Tensor, dim: int) -> torch.Tensor:
    """Return 0, or NaN if a value along `dim` is not finite."""
    # A conversion that saturates makes 448 of infinity, and the optimizer step's guard would not see it.
    if not values.size(dim):
        return values.new_zeros((), dtype=torch.float32).expand(1, 1)
    return values.abs().amax(dim=dim, keepdim=True).float() * 0.0
