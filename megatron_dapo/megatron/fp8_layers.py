"""The own linear layers with their products in FP8, emulated; communication and parameters are megatron-core's."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

from megatron_dapo.megatron.norms import NormColumnParallelLinear
from megatron_dapo.ops.fp8_linear import blockwise_linear, blockwise_linear_of_any


class Fp8NormColumnParallelLinear(NormColumnParallelLinear):
    """Norm, gather or copy to the tensor ranks, and an FP8 product with this rank's rows."""

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
            # What tensor ranks give back are parts of one gradient: they are summed as they are scattered.
            input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=self.tp_group)
        elif allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=self.tp_group)
        return _multiply(input, weight, bias)


class Fp8RowParallelLinear(RowParallelLinear):
    """An FP8 product with this rank's columns; megatron-core sums the ranks' outputs."""

    def _forward_impl(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        **unused: Any,
    ) -> torch.Tensor:
        return _multiply(input, weight, bias)


class _ExpertProduct:
    """An FP8 product of the tokens that were routed to an expert, however many. Their dispatcher communicates."""

    def _forward_impl(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, **unused: Any
    ) -> torch.Tensor:
        assert bias is None, "experts have no bias"
        return blockwise_linear_of_any(input, weight)


class Fp8ExpertColumnParallelLinear(_ExpertProduct, ColumnParallelLinear):
    """[tokens, in] -> [tokens, this rank's rows] of one expert."""


class Fp8ExpertRowParallelLinear(_ExpertProduct, RowParallelLinear):
    """[tokens, this rank's columns] -> [tokens, out] of one expert; the ranks' outputs are summed by the dispatcher."""


def _multiply(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """[P, 1, in] -> [P, 1, out]."""
    output = blockwise_linear(hidden.flatten(0, 1), weight).unflatten(0, hidden.shape[:2])
    return output if bias is None else output + bias
