"""The head with products of bf16 factors on a CPU; `chunked` widens them to fp32. A CPU with instructions for bf16 takes half
the time.

A product is summed in fp32 and rounded to bf16, so that a log-prob is off by 0.001 on average, a tenth of what a bf16 model and its
engine differ by. Passes with gradients and without round alike: old and new log-probs of the same weights are the same numbers.
"""

from __future__ import annotations

import torch

from megatron_dapo.ops.lm_head import chunked
from megatron_dapo.ops.lm_head.inputs import Gradients, HeadInputs, KeptLogits, Upstream

room = chunked.room


class _Bf16Logits(chunked.TileLogits):
    def __init__(self, inputs: HeadInputs) -> None:
        super().__init__(inputs)
        self._dtype = torch.bfloat16

    def logits(self, tokens: slice) -> torch.Tensor:
        return torch.mm(self.tokens(tokens), self._rows.t()).float()


def obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the products cannot be computed, None if they can."""
    if device.type != "cpu":
        return f"the device is {device.type}, whose products of bf16 factors have fp32 results in `chunked`"
    return None if dtype == torch.bfloat16 else f"the model is in {dtype}, and it is for bfloat16"


def sums(inputs: HeadInputs, kept: KeptLogits | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the sums of `lm_head`."""
    return chunked.sums(inputs, kept, _Bf16Logits(inputs))


def gradients(inputs: HeadInputs, upstream: Upstream) -> Gradients:
    """Compute the gradients of `lm_head`."""
    return chunked.gradients(inputs, upstream, _Bf16Logits(inputs))
