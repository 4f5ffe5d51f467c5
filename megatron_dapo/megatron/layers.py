"""Layers used without Transformer Engine: RMSNorm, a linear layer with the norm inside, and their FP8 forms.

Parameters, their names and the communication are megatron-core's, so checkpoints do not depend on which layers ran.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_dapo.ops.fp8 import blockwise_linear, blockwise_linear_padded

if TYPE_CHECKING:
    from megatron.core.tensor_parallel.layers import RowParallelLinear as _RowParallel
else:
    _RowParallel = object  # PostNorm is a mixin at run time: its base is the row-parallel layer it is combined with


class RMSNorm(torch.nn.Module):
    """Root mean square norm (arXiv:1910.07467, eq. 4)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **unused: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = _norm_weight(config, hidden_size)
        self.zero_centered = config.layernorm_zero_centered_gamma

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalize [..., hidden_size] -> the same shape."""
        return rms_norm(hidden, self.weight, self.eps, self.zero_centered)


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float, zero_centered: bool) -> torch.Tensor:
    """Normalize [..., h] by a weight [h], or by 1 + weight (`zero_centered`)."""
    if not zero_centered:
        return F.rms_norm(hidden, weight.shape, weight, eps)
    # Stay in fp32 to the end: 1 + weight has fewer digits in bf16 than the weight.
    return F.rms_norm(hidden.float(), weight.shape, 1 + weight.float(), eps).type_as(hidden)


class NormColumnParallelLinear(ColumnParallelLinear):
    """A column-parallel linear layer with the RMSNorm of its input inside, as in Transformer Engine."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **settings: Any) -> None:
        super().__init__(input_size, output_size, config=config, **settings)
        self.layer_norm_weight = _norm_weight(config, input_size)

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Map [tokens, 1, input_size] to [tokens, 1, this rank's outputs], and return the bias left to the caller."""
        # Normalize before the sequence-parallel gather, so that each rank normalizes its tokens.
        settings = self.config.layernorm_epsilon, self.config.layernorm_zero_centered_gamma
        normed = rms_norm(hidden, self.layer_norm_weight, *settings)
        return super().forward(normed, *args, **kwargs)


class PostNorm(_RowParallel):
    """Mixin that adds a norm of the output to a row-parallel linear layer, under Megatron-Bridge's name for it."""

    norm_class: type = RMSNorm

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **settings: Any) -> None:
        super().__init__(input_size, output_size, config=config, **settings)
        self.post_layernorm = self.norm_class(config=config, hidden_size=output_size, eps=config.layernorm_epsilon)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Map [tokens, 1, this rank's inputs] to [tokens, 1, output_size], and return the bias (None)."""
        # By now the output is summed over tensor ranks and, under sequence parallelism, cut by tokens.
        output, bias = super().forward(hidden)
        if (adapter := getattr(self, "adapter", None)) is not None:  # `lora.attach_adapters` sets it.
            output = adapter.add_to(output, hidden)
        return self.post_layernorm(output), bias


class PostNormRowParallelLinear(PostNorm, RowParallelLinear):
    """A row-parallel linear layer with an RMSNorm of its output inside."""


def _norm_weight(config: TransformerConfig, size: int) -> torch.nn.Parameter:
    weight = torch.nn.Parameter(torch.ones(size, dtype=config.params_dtype, device=torch.cuda.current_device()))
    # megatron-core sums the gradients of marked parameters over tensor ranks: each rank has only seen its tokens.
    weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return weight


class Fp8ColumnParallelLinear(ColumnParallelLinear):
    """A gather or copy to the tensor ranks, and an emulated FP8 product with this rank's rows."""

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
            # The tensor ranks return partial gradients, which are summed as they are scattered.
            input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=self.tp_group)
        elif allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=self.tp_group)
        return fp8_product(input, weight, bias)


class Fp8NormColumnParallelLinear(NormColumnParallelLinear, Fp8ColumnParallelLinear):
    """The same after a norm."""


class Fp8RowParallelLinear(RowParallelLinear):
    """An emulated FP8 product with this rank's columns; megatron-core sums the ranks' outputs."""

    def _forward_impl(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        **unused: Any,
    ) -> torch.Tensor:
        return fp8_product(input, weight, bias)


class Fp8PostNormRowParallelLinear(PostNorm, Fp8RowParallelLinear):
    """An emulated FP8 product with this rank's columns, and the norm of the sum."""


class _ExpertProduct:
    """An emulated FP8 product of any number of tokens routed to an expert; the token dispatcher communicates."""

    def _forward_impl(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, **unused: Any
    ) -> torch.Tensor:
        assert bias is None, "experts have no bias"
        return blockwise_linear_padded(input, weight)


class Fp8ExpertColumnParallelLinear(_ExpertProduct, ColumnParallelLinear):
    """Maps one expert's [tokens, in] to [tokens, this rank's rows]."""


class Fp8ExpertRowParallelLinear(_ExpertProduct, RowParallelLinear):
    """Maps one expert's [tokens, this rank's columns] to [tokens, out]; the dispatcher sums the ranks' outputs."""


def fp8_product(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Map [P, 1, in] to [P, 1, out] by an emulated FP8 product."""
    output = blockwise_linear(hidden.flatten(0, 1), weight).unflatten(0, hidden.shape[:2])
    return output if bias is None else output + bias
