"""A linear layer in FP8 with scales of blocks, emulated: products in fp32 of the values that FP8 would multiply.

The three products of Transformer Engine's blockwise recipe, with [.]r rounded under a scale for 128 values of a row,
[.]t under one for 128 tokens of a column, [.]b under one for 128 x 128:

    y      = [x]r [W]b^T             forward
    grad x = [g]r [W]b               g = grad y; as if rounding had the derivative 1
    grad W = [g]t^T [x]t             x is rounded again, in the direction in which it is summed
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_dapo.ops.fp8 import BLOCK, quantize_hidden, quantize_weight


def blockwise_linear(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[P, in] and [out, in] -> [P, out] in hidden's type. P, in and out must be multiples of 128, else ValueError."""
    for what, size in (("tokens", hidden.size(0)), ("inputs", weight.size(1)), ("outputs", weight.size(0))):
        if size % BLOCK:
            raise ValueError(f"FP8 in blocks: {size} {what} on this rank are no multiple of {BLOCK}")
    return _BlockwiseLinear.apply(hidden, weight)


def blockwise_linear_of_any(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`blockwise_linear` of any number of tokens, with zeros behind them up to the next multiple of 128, and 128 of them
    where there is no token. They take part in no block's largest magnitude and in no sum, so that the result is what
    fewer of them, or none, would give."""
    num_tokens = hidden.size(0)
    padding = max(1, -(-num_tokens // BLOCK)) * BLOCK - num_tokens
    return blockwise_linear(torch.nn.functional.pad(hidden, (0, 0, 0, padding)), weight)[:num_tokens]


def rounded_along_tokens(values: torch.Tensor) -> torch.Tensor:
    """[P, width] fp32, rounded under a scale for 128 tokens of a column."""
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
            product = rounded_along_tokens(gradient).t() @ rounded_along_tokens(hidden)
            to_weight = (product + _not_finite(gradient, 0).t()).to(weight.dtype)
        return to_hidden, to_weight


def _not_finite(values: torch.Tensor, dim: int) -> torch.Tensor:
    """0, or NaN where something along `dim` is not finite: a conversion that saturates would make 448 of infinity, and
    the step's guard would not see it."""
    if not values.size(dim):
        return values.new_zeros((), dtype=torch.float32).expand(1, 1)
    return values.abs().amax(dim=dim, keepdim=True).float() * 0.0
