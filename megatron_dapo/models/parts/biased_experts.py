"""A mixture of experts with biases, router included, whose gate and up are one matrix (gpt-oss), with its norm.

Rows of gate and up alternate, as in checkpoints and in SGLang, and so do they in Megatron: expert tensor ranks cut between pairs.

A checkpoint has one tensor for all experts of a layer, "mlp.experts.gate_up_proj" [experts, in, out], whose expert 3 is here
"mlp.experts.3.gate_up_proj" [out, in], as everywhere else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from megatron_dapo.models.activations import FP32, INDEX, Kept, TrainerCut
from megatron_dapo.models.parts.mlp import engine_inner
from megatron_dapo.models.placement import (
    CutColumns,
    EngineCut,
    LayerPart,
    PerExpert,
    Placement,
    Rows,
    Stack,
    StackedExperts,
    Whole,
)
from megatron_dapo.precision import LinearSize

if TYPE_CHECKING:
    import torch

_NORM, _ROUTER = "post_attention_layernorm.weight", "mlp.router."
_GATE_UP, _DOWN, _BIAS = "gate_up_proj", "down_proj", "_bias"
_FIELD = "intermediate_size"
_EXPERT = re.compile(rf"(.*\.mlp\.experts\.)(\d+)\.((?:{_GATE_UP}|{_DOWN})(?:{_BIAS})?)")


class StoredExpert(NamedTuple):
    """Where a checkpoint has an expert's tensor."""

    tensor: str  # all experts of the layer
    expert: int
    is_matrix: bool  # transposed there


def stored_expert(name: str) -> StoredExpert | None:
    """Return where a checkpoint has an expert's tensor; None for any other."""
    match = _EXPERT.fullmatch(name)
    return None if match is None else StoredExpert(match[1] + match[3], int(match[2]), not name.endswith(_BIAS))


def experts_of(stored: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a view of each expert's tensor in that of all experts of a layer, under its name."""
    prefix, _, kind = stored.rpartition(".")
    for expert, one in enumerate(tensor):
        yield f"{prefix}.{expert}.{kind}", one if kind.endswith(_BIAS) else one.T


@dataclass(frozen=True)
class BiasedExperts(LayerPart):
    """Norm, router and experts."""

    hidden: int
    num_experts: int
    inner: int
    num_per_token: int

    def shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {_NORM: (self.hidden,)}
        shapes |= {_ROUTER + "weight": (self.num_experts, self.hidden), _ROUTER + "bias": (self.num_experts,)}
        for expert in range(self.num_experts):
            prefix = f"mlp.experts.{expert}."
            shapes |= {prefix + _GATE_UP: (2 * self.inner, self.hidden), prefix + _GATE_UP + _BIAS: (2 * self.inner,)}
            shapes |= {prefix + _DOWN: (self.hidden, self.inner), prefix + _DOWN + _BIAS: (self.hidden,)}
        return shapes

    def megatron(self) -> Iterator[Placement]:
        yield Whole("pre_mlp_layernorm.weight", _NORM)
        yield Whole("mlp.router.weight", _ROUTER + "weight")
        yield Whole("mlp.router.bias", _ROUTER + "bias")
        kinds = (("weight", ""), ("bias", _BIAS))
        gate_up = (Stack(f"linear_fc1.{own}", (Rows(_GATE_UP + end, self.inner, 2, _FIELD),)) for own, end in kinds)
        down = CutColumns("linear_fc2.weight", Rows(_DOWN, self.inner, 1, _FIELD))
        bias = Whole("linear_fc2.bias", _DOWN + _BIAS)
        experts = "mlp.experts.local_experts.{}.", "mlp.experts.{}."
        yield PerExpert(self.num_experts, *experts, (*gate_up, down, bias))

    def linear_sizes(self) -> Iterator[LinearSize]:
        yield from ()  # Experts with biases are computed in the model's type.

    def sglang(self, engine: EngineCut) -> Iterator[Placement]:
        yield StackedExperts(
            self.num_experts, "mlp.experts.", "mlp.experts.{}.", engine_inner(self.inner, engine), biased=True
        )
        yield Whole(_ROUTER + "weight", _ROUTER + "weight")
        yield Whole(_ROUTER + "bias", _ROUTER + "bias")
        yield Whole(_NORM, _NORM)

    def kept(self, cut: TrainerCut) -> Kept:
        copies = cut.local * self.num_per_token * cut.expert_tensor
        inner = self.inner // cut.expert_tensor
        working = copies * cut.item * (2 * self.hidden + 3 * inner)
        if cut.is_torch:
            # Scores and choices; per copy the expert's input, [gate; up], the clamped gate, its activation, up + 1, their product,
            # and the product times its probability.
            router = cut.local * (2 * FP32 * self.num_experts + self.num_experts + self.num_per_token * (FP32 + 2 * INDEX))
            experts = router + copies * (cut.item * (self.hidden + 7 * inner) + FP32)
        else:
            # Per copy: the expert's input and output, and the same products, which no kernel of megatron-core's fuses here.
            experts = copies * (cut.item * (2 * self.hidden + 7 * inner) + FP32)
        return Kept(cut.normed(self.hidden) + experts, working=working)

    @property
    def weights_per_token(self) -> int:
        return self.hidden * (self.num_experts + 3 * self.inner * self.num_per_token)
