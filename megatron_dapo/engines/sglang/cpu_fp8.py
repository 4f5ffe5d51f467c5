"""FP8 in blocks on a CPU, which a stock SGLang runs with AMX and its kernel package alone. With CUDA it changes nothing.

A layer's e4m3 weight is multiplied by its blocks' scales, rounded to the type of the activations, and used in a plain
product; activations are not quantised. SGLang's own CPU kernel does the same in one piece, but repacks the weights in
place first; here they stay as they were loaded, so that the loader of deliveries finds them. Slow, and for tests:
every product widens its weight again.
"""

from __future__ import annotations

from typing import Any

import torch


def apply_to_sglang() -> None:
    """Let `Fp8LinearMethod` run without AMX (imports sglang). Experts in FP8 stay refused by SGLang itself."""
    from sglang.srt.layers.quantization import fp8

    fp8.dispatch_w8a8_block_fp8_linear = lambda: block_linear
    fp8.Fp8LinearMethod.process_weights_after_loading_block_quant = _keep_blocks
    # A product of float32 activations is as good as one of 16 bits here, and can be compared more closely.
    fp8.Fp8Config.get_supported_act_dtypes = classmethod(_activation_dtypes)


def block_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    block_size: list[int],
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """[..., columns] -> [..., rows] with weight [rows, columns] e4m3 and a scale for every `block_size` of it."""
    assert input_scale is None, "activations are not quantised on a CPU"
    return torch.nn.functional.linear(input, widened(weight, block_size, weight_scale).to(input.dtype), bias)


def widened(weight: torch.Tensor, block_size: list[int], scales: torch.Tensor) -> torch.Tensor:
    """[rows, columns] float32."""
    rows, columns = weight.shape
    scales = scales.repeat_interleave(block_size[0], 0)[:rows].repeat_interleave(block_size[1], 1)[:, :columns]
    return weight.float() * scales


def _keep_blocks(method: Any, layer: torch.nn.Module) -> None:
    """In place of the repacking: weight and weight_scale_inv are what `block_linear` takes."""


def _activation_dtypes(config: Any) -> list[torch.dtype]:
    return [torch.bfloat16, torch.half, torch.float32]
