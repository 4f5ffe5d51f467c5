"""How the model's linear layers multiply: of the policy, of the reference and of the critic."""

from __future__ import annotations

from typing import Literal

from megatron_dapo.config.section import NonNegativeInt, Section

RecipeName = Literal["", "fp32", "bf16", "fp8_blockwise", "fp8_current", "fp8_delayed"]


class PrecisionConfig(Section):
    """How linear layers multiply. What is not computed in FP8 has model.dtype; main params and moments are float32."""

    recipe: RecipeName = ""
    """"": as model.dtype says. fp32, bf16: the same by name; must agree with model.dtype. fp8_blockwise: e4m3 with a
    scale for 128 values and 128 x 128 of a weight, which SGLang serves (compute capability 9.0 and CUDA 12.9; emulated
    on a CPU). fp8_current, fp8_delayed: one scale a tensor, of the tensor or of earlier steps."""

    num_layers_at_start_in_bf16: NonNegativeInt = 0
    """First layers of the model that stay in model.dtype under an FP8 recipe. Raise it when FP8 costs learning."""

    num_layers_at_end_in_bf16: NonNegativeInt = 0
    """Last layers of the model that stay in model.dtype under an FP8 recipe."""

    fp8_param: bool = False
    """Hold the weights of FP8 layers as FP8 alone, beside their float32 main params. Saves memory; Transformer Engine only,
    needs parallel.use_distributed_optimizer."""
