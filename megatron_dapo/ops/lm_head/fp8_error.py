"""What rounding to FP8 can cost a logit and a log-prob.

With e_x and e_w the most by which rounding moves a hidden state and a weight (`ops.fp8.rounding_bound`), a logit of fp8
differs from the exact one by at most

    bound = sum_k (e_x |w| + |x| e_w + e_x e_w)        (about 0.13 sum_k |x w|)

and, since a log of a sum of exponentials moves by no more than its largest logit does, a log-prob by at most
(bound of its target + largest bound of its token) / temperature. That is the worst case, where all errors of a sum have
one sign; errors of either sign add up to about 0.04 times the root of sum_k (x w)^2.
"""

from __future__ import annotations

import torch

from megatron_dapo.ops.fp8 import quantize_hidden, quantize_weight, rounding_bound


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
