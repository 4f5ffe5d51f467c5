"""A mixture of experts with one linear layer for each matrix, under the names of its checkpoint.

transformers fuses all experts of a layer in two tensors, which a quantizer of linear layers does not see. Here each
expert has its own matrices: "model.layers.0.mlp.experts.7.gate_proj" is a module, both for calibration and read-back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Expert(nn.Module):
    """down_proj(act(gate_proj(x)) * up_proj(x))."""

    def __init__(self, hidden: int, intermediate: int, activation: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False, dtype=dtype)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False, dtype=dtype)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False, dtype=dtype)
        self.act_fn = activation

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(hidden)) * self.up_proj(hidden))


class SeparateExperts(nn.ModuleList):
    """Replacement of transformers' fused experts with the same call. An expert without tokens does not run."""

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """hidden [tokens, h]; chosen [tokens, k] experts and their weights -> [tokens, h]."""
        output = torch.zeros_like(hidden)
        for index, expert in enumerate(self):
            tokens, ranks = torch.where(chosen == index)
            if tokens.numel():
                weighted = expert(hidden[tokens]) * weights[tokens, ranks, None]
                output.index_add_(0, tokens, weighted.to(output.dtype))
        return output


def separate_experts(model: nn.Module) -> None:
    """Replace every fused mixture of the model in place, with the same values."""
    found = [(name, module) for name, module in model.named_modules() if _is_fused(module)]
    for name, module in found:
        model.set_submodule(name, _separated(module))


def _is_fused(module: nn.Module) -> bool:
    matrices = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
    return all(isinstance(matrix, nn.Parameter) and matrix.dim() == 3 for matrix in matrices)


@torch.no_grad()
def _separated(fused: Any) -> SeparateExperts:
    count, hidden, intermediate = fused.down_proj.shape
    with torch.device(fused.down_proj.device):
        experts = [Expert(hidden, intermediate, fused.act_fn, fused.down_proj.dtype) for _ in range(count)]
    for expert, gate_up, down in zip(experts, fused.gate_up_proj, fused.down_proj, strict=True):
        gate, up = gate_up.chunk(2)
        expert.gate_proj.weight.copy_(gate)
        expert.up_proj.weight.copy_(up)
        expert.down_proj.weight.copy_(down)
    return SeparateExperts(experts).train(fused.training)
