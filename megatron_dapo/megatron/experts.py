"""Layers with a mixture of experts: megatron-core's MoELayer with the routing of Qwen3-MoE and DeepSeek-V3 models.

The auxiliary losses of pre-training (load balancing, z-loss) are off: they would pull the policy away from the
objective. Tokens are never dropped, so a token's output does not depend on the others in its micro-batch.

Routing replay (R3, arXiv:2510.11370): a token goes to the experts that the engine chose when it sampled. The router
weights them, with gradients, as if it had chosen them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

if TYPE_CHECKING:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear as _Column
    from megatron.core.tensor_parallel.layers import RowParallelLinear as _Row
else:
    _Column = _Row = object  # PairedRows and MarkedBiases are mixins at run time


@dataclass(frozen=True)
class EngineRouting:
    """The engine's choice of experts for this rank's tokens of one micro-batch."""

    experts: torch.Tensor  # [P_local, layers, experts a token]
    is_known: torch.Tensor  # [P_local] bool; the router chooses at the others (padding, last tokens of sequences)

    def of_layer(self, layer: int, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (experts int64 [tokens, experts a token], is_known [tokens, 1]) for the tokens of one of `size`
        sequence-parallel ranks."""
        count = len(self.is_known) // size
        part = slice(rank * count, (rank + 1) * count)
        return self.experts[part, layer].long(), self.is_known[part, None]


class SoftmaxFirstRouter(TopKRouter):
    """Softmax over all experts, then the k most probable, with their probabilities divided by their sum if `normalize`.

    This is the order of operations in transformers and SGLang. Logits have the model's type, the rest is fp32.
    """

    # megatron-core's router cannot divide like this. Its softmax over only the chosen logits is equal in exact
    # arithmetic, but rounds differently. `normalize_probabilities` sets this on each instance: the config has no field
    # for it.
    normalize = True
    # `replayed`: what the next forward replays, (experts, is_known) from `EngineRouting.of_layer`. `num_replayed`:
    # counts of replayed choices, and of those that this router would also have made.
    replayed: tuple[torch.Tensor, torch.Tensor] | None = None
    num_replayed: torch.Tensor | None = None  # [2]

    def forward(
        self, hidden: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Map hidden [tokens, 1, h] to (weights fp32, chosen bool), both [tokens, experts]; weights are 0 if not chosen."""
        scores = self.scores(hidden.flatten(0, -2))
        experts = self.choose(scores)
        if self.replayed is not None:
            experts = self._replay(experts, *self.replayed)
        weights = self.weigh(scores.gather(1, experts))
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, experts, True)
        return torch.zeros_like(scores).scatter(1, experts, weights), chosen

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map hidden [tokens, h] to fp32 scores [tokens, experts]."""
        return F.linear(hidden, self.weight).softmax(dim=-1, dtype=torch.float32)

    def choose(self, scores: torch.Tensor) -> torch.Tensor:
        """Return each token's experts [tokens, k], given all scores."""
        return scores.topk(self.topk, dim=-1).indices

    def weigh(self, scores: torch.Tensor) -> torch.Tensor:
        """Map the chosen experts' scores [tokens, k] to the weights of their outputs."""
        return scores / scores.sum(dim=-1, keepdim=True) if self.normalize else scores

    @torch.no_grad()
    def _replay(self, own: torch.Tensor, engines: torch.Tensor, is_known: torch.Tensor) -> torch.Tensor:
        both = ((own[:, :, None] == engines[:, None]).any(1) & is_known).sum()
        counts = torch.stack((is_known.sum() * self.topk, both))
        self.num_replayed = counts if self.num_replayed is None else self.num_replayed + counts
        return torch.where(is_known, engines, own)


class SoftmaxLastRouter(SoftmaxFirstRouter):
    """The k highest logits, which have a bias, choose experts; their softmax weighs them (gpt-oss)."""

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map hidden [tokens, h] to fp32 logits [tokens, experts]."""
        return F.linear(hidden, self.weight, self.bias).float()

    def weigh(self, scores: torch.Tensor) -> torch.Tensor:
        """Map the chosen experts' logits [tokens, k] to the weights of their outputs."""
        return scores.softmax(dim=-1)


class GroupedSigmoidRouter(SoftmaxFirstRouter):
    """Sigmoid scores, k experts of the best groups, and their scores scaled (DeepSeek-V3, arXiv:2412.19437, section 2.1.2).

    `expert_bias` is added to the scores only to choose. A group is as good as its two best experts. Everything is fp32,
    as in transformers. megatron-core's router scores a group by k / groups experts and always divides by the sum.
    """

    def __init__(self, config: TransformerConfig, *arguments: Any, **settings: Any) -> None:
        super().__init__(config, *arguments, **settings)
        device = torch.cuda.current_device()
        # Pre-training balances the experts' load by it. A parameter, so that it is loaded, synced and saved like the others.
        bias = torch.empty(config.num_moe_experts, dtype=torch.float32, device=device)
        self.expert_bias = torch.nn.Parameter(bias, requires_grad=False)

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map hidden [tokens, h] to fp32 scores [tokens, experts]."""
        return F.linear(hidden.float(), self.weight.float()).sigmoid()

    @torch.no_grad()
    def choose(self, scores: torch.Tensor) -> torch.Tensor:
        """Return each token's experts [tokens, k], given all scores."""
        biased = scores + self.expert_bias
        groups, num_kept = self.config.moe_router_num_groups, self.config.moe_router_group_topk
        if groups != num_kept:
            grouped = biased.unflatten(-1, (groups, -1))
            kept = grouped.topk(2, dim=-1).values.sum(dim=-1).topk(num_kept, dim=-1).indices
            is_kept = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(1, kept, True)
            biased = grouped.masked_fill(~is_kept[..., None], -torch.inf).flatten(1)
        return biased.topk(self.topk, dim=-1).indices

    def weigh(self, scores: torch.Tensor) -> torch.Tensor:
        """Map the chosen experts' scores [tokens, k] to the weights of their outputs."""
        # All k scores may underflow to 0.
        divided = scores / (scores.sum(dim=-1, keepdim=True) + 1e-20) if self.normalize else scores
        return divided * self.config.moe_router_topk_scaling_factor


def replay_routing(chunk: GPTModel) -> None:
    """Make the chunk's routers replay the `packed_seq_params.routing` of each forward."""

    # Read the layer's argument, because recomputation calls a layer with its original arguments, perhaps after another
    # micro-batch's forward.
    def set_replayed(layer: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        routing, router = keywords["packed_seq_params"].routing, layer.mlp.router
        group = layer.pg_collection.tp
        place = (group.rank(), group.size()) if layer.config.sequence_parallel else (0, 1)
        router.replayed = None if routing is None else routing.of_layer(layer.layer_number - 1, *place)

    for layer in chunk.decoder.layers:
        if isinstance(layer.mlp, MoELayer):
            layer.register_forward_pre_hook(set_replayed, with_kwargs=True)


def take_replayed(chunk: torch.nn.Module) -> torch.Tensor:
    """Return the counts [2], since the last call, of replayed expert choices and of those that the router would also
    have made."""
    total = torch.zeros(2, dtype=torch.int64)
    for module in chunk.modules():
        if isinstance(module, SoftmaxFirstRouter) and module.num_replayed is not None:
            total += module.num_replayed.cpu()
            module.num_replayed = None
    return total


def normalize_probabilities(chunk: torch.nn.Module, normalize: bool) -> None:
    """Set on the chunk's routers whether the chosen experts' probabilities are divided by their sum."""
    for module in chunk.modules():
        if isinstance(module, SoftmaxFirstRouter):
            module.normalize = normalize


def forget_dispatched_tokens(chunk: torch.nn.Module) -> None:
    """Make each layer's dispatcher release a micro-batch's probabilities once the layer has computed it.

    megatron-core's dispatchers keep them until the next micro-batch. That holds [tokens, experts] per layer while
    engines generate, and through the autograd graph, which Python's garbage collector cannot traverse, even an unused
    model.
    """
    for module in chunk.modules():
        if isinstance(module, MoELayer):
            module.register_forward_hook(_forget)


def _forget(layer: MoELayer, *_: Any) -> None:
    # These are attributes of the dispatcher and, for the flexible one, of its communication manager.
    dispatcher = layer.token_dispatcher
    for holder in (dispatcher, getattr(dispatcher, "_comm_manager", None)):
        for name, value in list(vars(holder).items()) if holder is not None else ():
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                setattr(holder, name, None)


# An expert's matrix, or that of its adapter, in a grouped layer. Transformer Engine has one parameter per expert, so only names
# and order differ.
_GROUPED = re.compile(r"(?<=\.mlp\.experts\.)(linear_fc[12])\.(weight|bias|adapter_[ab])(\d+)$")
_SINGLE = re.compile(r"(?<=\.mlp\.experts\.)local_experts\.\d+\.")


def one_name_an_expert(path: str) -> str:
    """Return a parameter's path under its SequentialMLP name, so that an expert's matrix has one name, grouped or
    not."""
    return _GROUPED.sub(lambda found: f"local_experts.{found[3]}.{found[1]}.{found[2].replace('adapter_', 'adapter.')}", path)


def grouped_layer(path: str) -> str:
    """Return the path of the grouped layer that holds an expert's linear layer, given its SequentialMLP path."""
    return _SINGLE.sub("", path)


class ExpertWeights(torch.nn.Module):
    """One linear layer's matrices, for all experts of a rank."""

    def __init__(self, layers: Sequence[torch.nn.Module]) -> None:
        """`layers`: the linear layer of each expert."""
        super().__init__()
        self.layers = tuple(layers)  # no submodules: their parameters are this module's

    def forward(self) -> None:
        """Run only the hooks of a forward pass: megatron-core's gather of the weights waits for them."""


class GroupedExperts(SequentialMLP):
    """This rank's experts, with the parameter names and order of megatron-core's TEGroupedMLP, computed one after
    another. Replaces it on machines without Transformer Engine."""

    def __init__(self, num_local_experts: int, config: TransformerConfig, *arguments: Any, **settings: Any) -> None:
        super().__init__(num_local_experts, config, *arguments, **settings)
        experts = tuple(self.local_experts)
        del self.local_experts
        # Not a submodule any more: its parameters are registered below.
        self.local_experts: tuple[torch.nn.Module, ...] = experts
        for layer, dim in (("linear_fc1", 0), ("linear_fc2", 1)):
            weights = ExpertWeights([getattr(expert, layer) for expert in experts])
            for index, expert in enumerate(experts):
                weight = getattr(expert, layer).weight
                if not hasattr(weight, "tensor_model_parallel"):  # later megatron-core versions mark it
                    set_tensor_model_parallel_attributes(weight, True, dim, 1)
                weights.register_parameter(f"weight{index}", weight)
            for index, expert in enumerate(experts if config.add_bias_linear else ()):
                weights.register_parameter(f"bias{index}", getattr(expert, layer).bias)
            setattr(self, layer, weights)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute the experts as SequentialMLP does."""
        self.linear_fc1()
        self.linear_fc2()
        return super().forward(*inputs)


class PairedRows(_Column):
    """Mixin of an expert's first linear layer whose rows of gate and up alternate: its outputs are all gates, then all ups, which
    megatron-core's activation takes."""

    def forward(self, *inputs: Any, **others: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Map this rank's tokens to [tokens, this rank's gates and ups], and the same order of the bias left to the caller."""
        output, bias = super().forward(*inputs, **others)
        return halves(output), None if bias is None else halves(bias)


def halves(pairs: torch.Tensor) -> torch.Tensor:
    """Move the first of each pair of neighbors [..., 2 n] into the first half."""
    return pairs.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


class PairedColumnParallelLinear(PairedRows, ColumnParallelLinear):
    """The first linear layer of an expert with biases."""


class MarkedBiases(_Row):
    """Mixin of an expert's second linear layer, whose bias tensor ranks have of different experts."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        for name, parameter in self.named_parameters():
            if name.startswith("bias"):
                # megatron-core would add up the gradients of all tensor ranks, and count the first rank's for the norm.
                parameter.sequence_parallel = False
                if not hasattr(parameter, "tensor_model_parallel"):
                    set_tensor_model_parallel_attributes(parameter, True, 0, 1)


class BiasedExpertRowParallelLinear(MarkedBiases, RowParallelLinear):
    """The second linear layer of an expert with biases, which is whole on its rank."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        # A sum over a group of one rank would return a view, to which megatron-core adds the bias in place.
        self.explicit_expert_comm = True


def experts_spec(
    routed: MLPSubmodules, shared: MLPSubmodules, router: type[SoftmaxFirstRouter], is_grouped: bool = False
) -> ModuleSpec:
    """Specify the replacement for an MLP: the router, this rank's experts and the shared one, with their linear layers, named as
    in SequentialMLP or a grouped layer."""
    experts = ModuleSpec(module=GroupedExperts if is_grouped else SequentialMLP, submodules=routed)
    # Not built unless the configuration gives it a size.
    submodules = MoESubmodules(
        experts=experts, shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=shared), router=router
    )
    return ModuleSpec(module=MoELayer, submodules=submodules)
