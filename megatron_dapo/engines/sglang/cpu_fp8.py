"""FP8 in blocks on a CPU, which a stock SGLang runs only with AMX and its kernel package. With CUDA it changes nothing.

A layer's e4m3 weight is multiplied by its blocks' scales, rounded to the type of the activations, and used in a plain
product, experts' weights in SGLang's own native loop over experts; activations are not quantized. SGLang's CPU kernels
do the same in one piece, but repack the weights in place first; here they stay as they were loaded, so that the weight
sync finds them. Slow, and for tests: every product widens its weight again.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


def apply_to_sglang() -> None:
    """Let `Fp8LinearMethod` and `Fp8MoEMethod` run without AMX (imports sglang)."""
    from sglang.srt.layers.quantization import fp8
    from sglang.srt.models.deepseek_common import deepseek_weight_loader

    # In place of SGLang's choice among kernels of GPUs; later versions tell the size of blocks.
    fp8.dispatch_w8a8_block_fp8_linear = lambda **conditions: block_linear
    fp8.Fp8LinearMethod.process_weights_after_loading_block_quant = _keep_blocks
    fp8.Fp8MoEMethod.process_weights_after_loading = _keep_blocks
    fp8.Fp8MoEMethod.apply = _apply_experts
    # A product of float32 activations is as good as one of 16 bits here, and can be compared more closely.
    fp8.Fp8Config.get_supported_act_dtypes = classmethod(lambda config: [torch.bfloat16, torch.half, torch.float32])
    # As on a GPU, latent attention absorbs the values of the blocks, not of e4m3 with one scale a matrix.
    deepseek_weight_loader.block_quant_to_tensor_quant = _block_values


def block_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    block_size: list[int],
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """[..., columns] -> [..., rows] with weight [rows, columns] e4m3 and a scale for every `block_size` of it."""
    assert input_scale is None, "activations are not quantized on a CPU"
    return torch.nn.functional.linear(input, widened(weight, block_size, weight_scale).to(input.dtype), bias)


def widened(weight: torch.Tensor, block_size: list[int], scales: torch.Tensor) -> torch.Tensor:
    """[..., rows, columns] float32."""
    rows, columns = weight.shape[-2:]
    scales = scales.repeat_interleave(block_size[0], -2)[..., :rows, :].repeat_interleave(block_size[1], -1)
    return weight.float() * scales[..., :columns]


def _block_values(
    weight: torch.Tensor, scales: torch.Tensor, block_size: list[int]
) -> tuple[torch.Tensor, None]:
    """The default type is the model's while it is loaded; later values are copied to those of its type."""
    return widened(weight, block_size, scales).to(torch.get_default_dtype()), None


def _keep_blocks(method: Any, layer: torch.nn.Module) -> None:
    """In place of the repacking: weights and scales are what `block_linear` and `_apply_experts` take."""


def _apply_experts(method: Any, layer: Any, dispatch_output: Any) -> Any:
    from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    hidden, block_size = dispatch_output.hidden_states, method.quant_config.weight_block_size
    experts = SimpleNamespace(
        num_experts=layer.num_experts,
        w13_weight=widened(layer.w13_weight, block_size, layer.w13_weight_scale_inv).to(hidden.dtype),
        w2_weight=widened(layer.w2_weight, block_size, layer.w2_weight_scale_inv).to(hidden.dtype),
    )
    output = moe_forward_native(experts, hidden, dispatch_output.topk_output, method.moe_runner_config)
    return StandardCombineInput(hidden_states=output)
