"""Products of bfloat16 on CPUs whose cores have no instructions for them.

torch's kernels then take 4 to 145 times as long as those of float32 (benchmarks/bf16_products.py). Here operands are widened, and the
product in float32 is rounded once, as the instructions do.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache

import torch

from megatron_dapo.config.process_limits import multiplies_bf16


def prepare_bf16(dtype: torch.dtype, device: str) -> None:
    """Widen bfloat16 products in this process if a model of this type computes on a CPU without instructions for them."""
    if dtype == torch.bfloat16 and device == "cpu" and not multiplies_bf16():
        widen_bf16_products()


@cache
def widen_bf16_products() -> torch.library.Library:
    """Compute bfloat16 products on the CPU in float32, in all of this process. Other types are computed as before."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"(?s).*[Oo]verriding a previously registered kernel")
        for operator in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm):
            library.impl(operator.default, _widened(operator.out), "CPU")
    return library  # Its kernels are in use as long as it exists.


def _widened(kernel: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return the product that `kernel`, torch's for a given output, computes in float32 if its operands are bfloat16."""

    def product(*operands: torch.Tensor, **scalars: float) -> torch.Tensor:
        left, right = operands[-2:]
        if any(operand.dtype != torch.bfloat16 for operand in operands):
            return kernel(*operands, **scalars, out=left.new_empty((*left.shape[:-1], right.size(-1))))
        widened = [operand.float() for operand in operands]
        return kernel(*widened, **scalars, out=widened[0].new_empty((*left.shape[:-1], right.size(-1)))).bfloat16()

    return product
