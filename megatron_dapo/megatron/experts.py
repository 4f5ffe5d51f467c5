"""Layers with a mixture of experts: megatron-core's MoELayer with the routing of the Qwen3-MoE models.

The auxiliary losses of pre-training (load balancing, z-loss) are off: they would pull the policy away from the
objective. Tokens are never dropped, so the output of a token does not depend on the others in its micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from megatron_dapo.megatron.described import submodules_of


class SoftmaxFirstRouter(TopKRouter):
    """Softmax over all experts, then the k most probable, whose probabilities are divided by their sum if the config
    says so: the order in which transformers and SGLang compute it.

    megatron-core's router knows softmax before or after the choice, but not the division; dividing is the same as a
    softmax of the chosen logits, yet rounds otherwise. Logits have the model's type, what follows is fp32.
    """

    # Set on each instance by `normalize_probabilities`: megatron-core's config has no field for it.
    normalize = True

    def forward(
        self, hidden: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden [tokens, 1, h] -> (weights fp32, chosen bool), both [tokens, experts]; weights are 0 if not chosen."""
        logits = F.linear(hidden.flatten(0, -2), self.weight)
        probabilities = logits.softmax(dim=-1, dtype=torch.float32)
        weights, experts = probabilities.topk(self.topk, dim=-1)
        if self.normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        chosen = torch.zeros_like(probabilities, dtype=torch.bool).scatter(1, experts, True)
        return torch.zeros_like(probabilities).scatter(1, experts, weights), chosen


def normalize_probabilities(chunk: torch.nn.Module, normalize: bool) -> None:
    """Tell the chunk's routers whether the chosen experts' probabilities are divided by their sum."""
    for module in chunk.modules():
        if isinstance(module, SoftmaxFirstRouter):
            module.normalize = normalize


def experts_spec(
    column: type[ColumnParallelLinear] = ColumnParallelLinear, row: type[RowParallelLinear] = RowParallelLinear
) -> ModuleSpec:
    """In place of an MLP: the router, and this rank's experts one after another under the names of SequentialMLP, each
    of the given classes of linear layers."""
    mlp = MLPSubmodules(linear_fc1=column, linear_fc2=row)
    return ModuleSpec(
        module=MoELayer,
        submodules=MoESubmodules(experts=ModuleSpec(module=SequentialMLP, submodules=mlp), router=SoftmaxFirstRouter),
    )


def route_softmax_first(layer: ModuleSpec) -> ModuleSpec:
    """The layer with experts that another specification made (Transformer Engine's), with the router above."""
    submodules = layer.submodules
    assert isinstance(submodules, TransformerLayerSubmodules), f"not a transformer layer: {submodules}"
    submodules_of(submodules.mlp).router = SoftmaxFirstRouter
    return layer


def layer_pattern(layers: Sequence[int], with_experts: frozenset[int]) -> list[int]:
    """1 where a layer has experts, else 0: megatron-core's `moe_layer_freq`."""
    return [int(layer in with_experts) for layer in layers]
