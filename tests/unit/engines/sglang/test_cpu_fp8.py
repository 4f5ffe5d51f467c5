"""Arithmetic of a CPU server with blocks of FP8, without SGLang."""

from __future__ import annotations

import pytest
import torch

from megatron_dapo.engines.sglang.cpu_fp8 import block_linear, widened
from megatron_dapo.ops.fp8 import quantize_weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_product_is_that_of_the_widened_weight(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, bias, hidden = torch.randn(256, 384), torch.randn(256, dtype=dtype), torch.randn(2, 5, 384, dtype=dtype)
    quantized = quantize_weight(weight)
    output = block_linear(hidden, quantized.values, [128, 128], quantized.scales, bias=bias)
    expected = hidden.double() @ quantized.widened().double().t() + bias.double()
    assert output.dtype == dtype and output.shape == (2, 5, 256)
    assert torch.allclose(output.double(), expected, rtol=0, atol=1e-3 if dtype == torch.float32 else 0.5)


def test_blocks_at_the_end_may_be_smaller_and_matrices_stacked() -> None:
    values = torch.ones(3, 200, 130).to(torch.float8_e4m3fn)
    scales = torch.arange(3 * 2 * 2).view(3, 2, 2).float()
    wide = widened(values, [128, 128], scales)
    for expert in range(3):
        for row, column in ((0, 0), (127, 129), (128, 127), (199, 129)):
            assert float(wide[expert, row, column]) == float(scales[expert, row // 128, column // 128])


def test_quantized_activations_are_refused() -> None:
    with pytest.raises(AssertionError, match="not quantized on a CPU"):
        block_linear(torch.ones(1, 128), torch.ones(128, 128), [128, 128], torch.ones(1, 1), torch.ones(1, 1))
