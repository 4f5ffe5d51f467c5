"""Rounding to FP8 by a search, and bounds on the error that rounding to FP8 causes in a value, a logit and a log-prob.

e4m3 has 3 bits after the leading one, so rounding moves a value x by at most 2^-4 |x|, or by half the step of its
subnormals, 2^-10 in the scaled block, whichever is more. With e_x and e_w these bounds for a hidden state and a weight, a
logit differs from the exact one by at most

    bound = sum_k (e_x |w| + |x| e_w + e_x e_w)        (about 0.13 sum_k |x w|)

A log of a sum of exponentials moves by no more than its largest logit does, so a log-prob differs by at most
(bound of its target + largest bound of its token) / temperature. This is the worst case, where all errors of a sum have one
sign; errors of either sign add up to about 0.04 times the root of sum_k (x w)^2.
"""

from __future__ import annotations

import torch

from megatron_dapo.ops.fp8 import Quantized, quantize_hidden, quantize_weight

RELATIVE_ERROR = 2.0**-4
HALF_SUBNORMAL_STEP = 2.0**-10
POSITIVE = sorted(
    {m / 8 * 2.0**-6 for m in range(8)}
    | {2.0 ** (e - 7) * (1 + m / 8) for e in range(1, 16) for m in range(8)} - {480.0}
)


def rounded(values: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """[P, Q] fp64: to the nearest of all values of e4m3, under one power of two for a block of rows x columns. The last blocks
    may be smaller."""
    height, width = values.shape
    padded = torch.nn.functional.pad(values.double(), (0, -width % columns, 0, -height % rows))
    blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    largest = blocks.abs().amax(dim=(1, 3), keepdim=True)
    scale = torch.where(largest > 0, 2.0 ** torch.floor(torch.log2(448 / largest)), 1.0)
    grid = torch.tensor(POSITIVE, dtype=torch.float64)
    nearest = grid[torch.bucketize(blocks.abs() * scale, (grid[1:] + grid[:-1]) / 2)]
    return (blocks.sign() * nearest / scale).flatten(2).flatten(0, 1)[:height, :width]


def rounding_bound(values: torch.Tensor, quantized: Quantized) -> torch.Tensor:
    """[rows, width] fp64: the most by which rounding can have moved each of `values`."""
    subnormal = HALF_SUBNORMAL_STEP * quantized.spread_scales().double()
    return torch.maximum(RELATIVE_ERROR * values.double().abs(), subnormal)


def logit_error_bound(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[P, rows] fp64: the most by which a product of quantized values can differ from the exact one."""
    hidden_error = rounding_bound(hidden, quantize_hidden(hidden))
    weight_error = rounding_bound(weight, quantize_weight(weight))
    of_hidden, of_weight = hidden.double().abs(), weight.double().abs()
    return hidden_error @ of_weight.t() + of_hidden @ weight_error.t() + hidden_error @ weight_error.t()


def logprob_error_bound(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, *, temperature: float, vocab_size: int
) -> torch.Tensor:
    """[P] fp64: see the module's docstring."""
    bound = logit_error_bound(hidden, weight)[:, :vocab_size]
    return (bound.gather(1, targets[:, None])[:, 0] + bound.amax(dim=1)) / temperature
