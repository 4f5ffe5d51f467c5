"""Layers used where Transformer Engine is not: RMSNorm, a linear layer with the norm inside, and their FP8 forms.

Parameters, their names and the communication are megatron-core's, so checkpoints do not depend on which layers ran.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_dapo.ops.fp8 import blockwise_linear, blockwise_linear_padded


class RMSNorm(torch.nn.Module):
    """Root mean square norm (arXiv:1910.07467, eq. 4)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **unused: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = _norm_weight(config, hidden_size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalize [..., hidden_size] -> the same shape."""
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


class NormColumnParallelLinear(ColumnParallelLinear):
    """A column-parallel linear layer with the RMSNorm of its input inside, as in Transformer Engine."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **settings: Any) -> None:
        super().__init__(input_size, output_size, config=config, **settings)
        self.layer_norm_weight = _norm_weight(config, input_size)

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Map [tokens, 1, input_size] to [tokens, 1, this rank's outputs], and return the bias left to the caller."""
        # Before the gather of sequence parallelism: each rank normalizes its own tokens.
        normed = F.rms_norm(hidden, self.layer_norm_weight.shape, self.layer_norm_weight, self.config.layernorm_epsilon)
        return super().forward(normed, *args, **kwargs)


def _norm_weight(config: TransformerConfig, size: int) -> torch.nn.Parameter:
    weight = torch.nn.Parameter(torch.ones(size, dtype=config.params_dtype, device=torch.cuda.current_device()))
    # megatron-core sums the gradients of marked parameters over tensor ranks, each of which has seen its own tokens alone.
    weight.sequence_parallel = config.sequence_parallel
    return weight


class Fp8NormColumnParallelLinear(NormColumnParallelLinear):
    """Norm, gather or copy to the tensor ranks, and an emulated FP8 product with this rank's rows."""

    def _forward_impl(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        **unused: Any,
    ) -> torch.Tensor:
        if sequence_parallel:
            # The tensor ranks return partial gradients: they are summed as they are scattered.
            input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=self.tp_group)
        elif allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=self.tp_group)
        return _multiply(input, weight, bias)


class Fp8RowParallelLinear(RowParallelLinear):
    """An emulated FP8 product with this rank's columns; megatron-core sums the ranks' outputs."""

    def _forward_impl(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        **unused: Any,
    ) -> torch.Tensor:
        return _multiply(input, weight, bias)


class _ExpertProduct:
    """An emulated FP8 product of any number of tokens routed to an expert; the token dispatcher communicates."""

    def _forward_impl(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, **unused: Any
    ) -> torch.Tensor:
        assert bias is None, "experts have no bias"
        return blockwise_linear_padded(input, weight)


class Fp8ExpertColumnParallelLinear(_ExpertProduct, ColumnParallelLinear):
    """One expert's [tokens, in] -> [tokens, this rank's rows]."""


class Fp8ExpertRowParallelLinear(_ExpertProduct, RowParallelLinear):
    """One expert's [tokens, this rank's columns] -> [tokens, out]; the dispatcher sums the ranks' outputs."""


def _multiply(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Map [P, 1, in] to [P, 1, out]."""
    output = blockwise_linear(hidden.flatten(0, 1), weight).unflatten(0, hidden.shape[:2])
    return output if bias is None else output + bias
