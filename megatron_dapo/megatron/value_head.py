"""The critic's output layer: one value a token in place of the output matrix."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_dapo.ops.value import token_values


class ValueHead(torch.nn.Module):
    """weight [1, h] and bias [1], whole on every tensor rank, in GPTModel's place of the output layer.

    Without sequence parallelism every tensor rank has all hidden states and computes the same values and gradients:
    nothing is summed. With it a rank computes the values of its own tokens, which are gathered ([P] numbers, not hidden
    states); its gradients are those of its tokens, and the mark that norms have makes megatron-core sum them.
    """

    def __init__(self, config: TransformerConfig, group: dist.ProcessGroup) -> None:
        super().__init__()
        settings = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.weight = torch.nn.Parameter(torch.empty(1, config.hidden_size, **settings))
        self.bias = torch.nn.Parameter(torch.empty(1, **settings))
        for parameter in (self.weight, self.bias):
            parameter.sequence_parallel = config.sequence_parallel
        self.sequence_parallel = config.sequence_parallel
        self.group = group

    def forward(
        self, hidden: torch.Tensor, weight: torch.Tensor | None = None, **unused: Any
    ) -> tuple[torch.Tensor, None]:
        """[P or its sequence-parallel part, 1, h] -> fp32 [P, 1, 1]."""
        values = token_values(hidden[:, 0], self.weight, self.bias)[:, None, None]
        if self.sequence_parallel:
            # Every tensor rank has the same loss, so the gradient of the gather is a cut, not a sum.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False, group=self.group)
        return values, None
