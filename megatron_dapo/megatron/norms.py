"""Root mean square norms: alone, and inside a linear layer as Transformer Engine has them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig


class RMSNorm(torch.nn.Module):
    """Root mean square norm (arXiv:1910.07467, eq. 4); the weight is marked for sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **unused: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = _norm_weight(config, hidden_size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., hidden_size] -> the same shape."""
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


class NormColumnParallelLinear(ColumnParallelLinear):
    """A column-parallel linear layer with the RMSNorm of its input inside, as Transformer Engine has it."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **settings: Any) -> None:
        super().__init__(input_size, output_size, config=config, **settings)
        self.layer_norm_weight = _norm_weight(config, input_size)

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[tokens, 1, input_size] -> [tokens, 1, this rank's outputs] and the bias left to the caller, if any."""
        # Before the gather of sequence parallelism: each rank norms its own tokens.
        normed = F.rms_norm(hidden, self.layer_norm_weight.shape, self.layer_norm_weight, self.config.layernorm_epsilon)
        return super().forward(normed, *args, **kwargs)


def _norm_weight(config: TransformerConfig, size: int) -> torch.nn.Parameter:
    weight = torch.nn.Parameter(torch.ones(size, dtype=config.params_dtype, device=torch.cuda.current_device()))
    weight.sequence_parallel = config.sequence_parallel
    return weight
