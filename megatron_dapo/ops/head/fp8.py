"""FP8 with a scale a block, the rule of Transformer Engine's blockwise recipe, and what rounding to it can cost.

Hidden states have a scale for 128 values of a token, the weight one for 128 x 128. With `amax` the largest magnitude of
a block, its values are multiplied by the largest power of two that is at most 448 / amax (1 for a block of zeros),
rounded to e4m3 to the nearest, ties to even, and multiplied back after the product. Powers of two change no bit of a
value but its exponent, and are what Transformer Engine and SGLang's checkpoints of this scheme use here.

**Error.** e4m3 has 3 bits after the leading one, so rounding moves a value x by at most 2^-4 |x|, or by half the step of
its subnormals, 2^-10 in the scaled block, whichever is more. With e_x and e_w those limits, a logit of fp8 differs from
the exact one by at most

    bound = sum_k (e_x |w| + |x| e_w + e_x e_w)        (about 0.13 sum_k |x w|)

and, since a log of a sum of exponentials moves by no more than its largest logit does, a log-prob by at most
(bound of its target + largest bound of its token) / temperature. That is the worst case, where all errors of a sum have
one sign; errors of either sign add up to about 0.04 times the root of sum_k (x w)^2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK = 128  # values along the hidden size, and rows of the weight, that share a scale
E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max  # 448
RELATIVE_ERROR = 2.0**-4
HALF_SUBNORMAL_STEP = 2.0**-10


@dataclass(frozen=True)
class Quantised:
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


def quantise_hidden(hidden: torch.Tensor) -> Quantised:
    """[P, width] of any float type; a scale for 128 values of a token. `width` must be a multiple of 128."""
    blocks = hidden.float().unflatten(1, (-1, BLOCK))
    multiplier = _multiplier(blocks.abs().amax(dim=2))
    return Quantised((blocks * multiplier[..., None]).to(E4M3).flatten(1), multiplier.reciprocal())


def quantise_weight(weight: torch.Tensor) -> Quantised:
    """[rows, width]; a scale for 128 x 128. Both must be multiples of 128."""
    blocks = weight.float().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    multiplier = _multiplier(blocks.abs().amax(dim=(1, 3)))
    values = (blocks * multiplier[:, None, :, None]).to(E4M3)
    return Quantised(values.flatten(2, 3).flatten(0, 1), multiplier.reciprocal())


def _multiplier(amax: torch.Tensor) -> torch.Tensor:
    """The largest power of two of at most 448 / amax; 1 where there is nothing to scale, or nothing finite."""
    fits = LARGEST / amax
    power = torch.ldexp(torch.ones_like(fits), torch.frexp(fits.clamp(max=2.0**126)).exponent - 1)
    return torch.where((amax > 0) & torch.isfinite(amax), power, 1.0)


def logit_error_bound(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[P, rows] fp64: the most by which a product of quantised values can differ from the exact one."""
    hidden_error = _rounding_bound(hidden, quantise_hidden(hidden))
    weight_error = _rounding_bound(weight, quantise_weight(weight))
    of_hidden, of_weight = hidden.double().abs(), weight.double().abs()
    return hidden_error @ of_weight.t() + of_hidden @ weight_error.t() + hidden_error @ weight_error.t()


def logprob_error_bound(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, *, temperature: float, vocab_size: int
) -> torch.Tensor:
    """[P] fp64: see the module's docstring."""
    bound = logit_error_bound(hidden, weight)[:, :vocab_size]
    return (bound.gather(1, targets[:, None])[:, 0] + bound.amax(dim=1)) / temperature


def _rounding_bound(values: torch.Tensor, quantised: Quantised) -> torch.Tensor:
    subnormal = HALF_SUBNORMAL_STEP * quantised.spread_scales().double()
    return torch.maximum(RELATIVE_ERROR * values.double().abs(), subnormal)
