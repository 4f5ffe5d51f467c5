"""Layers with a mixture of experts: megatron-core's MoELayer with the routing of the Qwen3-MoE models.

The auxiliary losses of pre-training (load balancing, z-loss) are off: they would pull the policy away from the
objective. Tokens are never dropped, so a token's output does not depend on the others in its micro-batch.
"""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig


class SoftmaxFirstRouter(TopKRouter):
    """Softmax over all experts, then the k most probable, whose probabilities are divided by their sum if `normalize`:
    the order of transformers and SGLang. Logits have the model's type, the rest is fp32.
    """

    # megatron-core's router has no such division. A softmax of the chosen logits alone, which it has, is equal in exact
    # arithmetic and rounds differently. Set on each instance by `normalize_probabilities`: the config has no field for it.
    normalize = True

    def forward(
        self, hidden: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Map hidden [tokens, 1, h] to (weights fp32, chosen bool), both [tokens, experts]; weights are 0 if not chosen."""
        logits = F.linear(hidden.flatten(0, -2), self.weight)
        probabilities = logits.softmax(dim=-1, dtype=torch.float32)
        weights, experts = probabilities.topk(self.topk, dim=-1)
        if self.normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        chosen = torch.zeros_like(probabilities, dtype=torch.bool).scatter(1, experts, True)
        return torch.zeros_like(probabilities).scatter(1, experts, weights), chosen


def normalize_probabilities(chunk: torch.nn.Module, normalize: bool) -> None:
    """Set on the chunk's routers whether the chosen experts' probabilities are divided by their sum."""
    for module in chunk.modules():
        if isinstance(module, SoftmaxFirstRouter):
            module.normalize = normalize


# Of an expert's matrix in a grouped layer. Transformer Engine has one parameter an expert, so only names and order differ.
_GROUPED = re.compile(r"(?<=\.mlp\.experts\.)(linear_fc[12])\.weight(\d+)$")


def one_name_an_expert(path: str) -> str:
    """Return a parameter's path with the name that SequentialMLP gives it: grouped or not, an expert's matrix has one name."""
    return _GROUPED.sub(r"local_experts.\2.\1.weight", path)


class GroupedExperts(SequentialMLP):
    """This rank's experts with the parameters of megatron-core's TEGroupedMLP, in its names and order, computed one after
    another: what a machine without Transformer Engine has in its place."""

    def __init__(self, num_local_experts: int, config: TransformerConfig, *arguments: Any, **settings: Any) -> None:
        super().__init__(num_local_experts, config, *arguments, **settings)
        experts = tuple(self.local_experts)
        del self.local_experts
        self.local_experts = experts  # no longer a module of this one: its parameters are registered below
        for layer, dim in (("linear_fc1", 0), ("linear_fc2", 1)):
            weights = torch.nn.Module()
            for index, expert in enumerate(experts):
                weight = getattr(expert, layer).weight
                set_tensor_model_parallel_attributes(weight, True, dim, 1)
                weights.register_parameter(f"weight{index}", weight)
            setattr(self, layer, weights)


def experts_spec(
    column: type[ColumnParallelLinear] = ColumnParallelLinear,
    row: type[RowParallelLinear] = RowParallelLinear,
    is_grouped: bool = False,
) -> ModuleSpec:
    """Specify what replaces an MLP: the router, and this rank's experts one after another under the names of
    SequentialMLP or of a grouped layer, each of the given classes of linear layers."""
    mlp = MLPSubmodules(linear_fc1=column, linear_fc2=row)
    experts = ModuleSpec(module=GroupedExperts if is_grouped else SequentialMLP, submodules=mlp)
    return ModuleSpec(module=MoELayer, submodules=MoESubmodules(experts=experts, router=SoftmaxFirstRouter))
