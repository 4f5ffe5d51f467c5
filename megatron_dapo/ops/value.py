"""One value a token from hidden states, in fp32 arithmetic whatever the type of the model."""

from __future__ import annotations

from typing import Any

import torch

CHUNK_TOKENS = 4096  # tokens whose hidden states live in fp32 at a time


def token_values(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Compute hidden [P, h] . weight [1, h] + bias [1] -> [P] fp32 (fp64 from fp64), differentiable in all three.

    16-bit inputs are widened chunk by chunk in both directions, so no second copy of all hidden states is kept.
    """
    return _TokenValues.apply(hidden, weight, bias)


class _TokenValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight, bias)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        column, offset = weight[0].to(wide), bias.to(wide)
        values = torch.empty(hidden.size(0), dtype=wide, device=hidden.device)
        for part, out in zip(hidden.split(CHUNK_TOKENS), values.split(CHUNK_TOKENS), strict=True):
            torch.mv(part.to(wide), column, out=out)
        return values.add_(offset)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden, weight, bias = ctx.saved_tensors
        column = weight[0].to(gradient.dtype)
        to_hidden, to_weight = torch.empty_like(hidden), torch.zeros_like(column)
        parts = zip(*(t.split(CHUNK_TOKENS) for t in (hidden, gradient, to_hidden)), strict=True)
        for part, part_gradient, out in parts:
            out.copy_(torch.outer(part_gradient, column))
            to_weight.addmv_(part.to(gradient.dtype).t(), part_gradient)
        return to_hidden, to_weight[None].to(weight.dtype), gradient.sum()[None].to(bias.dtype)
