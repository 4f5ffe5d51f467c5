"""fused_weight_gradient_mlp_cuda: adds a weight's gradient to the sum that is kept for it."""

from __future__ import annotations

import torch

CALLS = 0


def wgrad_gemm_accum_fp32(input: torch.Tensor, d_output: torch.Tensor, d_weight: torch.Tensor, /) -> None:
    """input [tokens, in], d_output [tokens, out], d_weight [out, in] fp32."""
    global CALLS
    CALLS += 1
    assert d_weight.dtype == torch.float32 and input.dim() == d_output.dim() == 2
    d_weight.addmm_(d_output.float().t(), input.float())
