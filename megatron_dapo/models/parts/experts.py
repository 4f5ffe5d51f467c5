"""A mixture of experts in place of the MLP, with its norm, its router and, in some models, an MLP for every token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_dapo.models.activations import FP32, INDEX, Kept, TrainerCut
from megatron_dapo.models.parts.mlp import engine_gated, engine_inner, gated_shapes, megatron_gated
from megatron_dapo.models.placement import EngineCut, LayerPart, PerExpert, Placement, StackedExperts, Whole
from megatron_dapo.precision import LinearSize

ROUTER = "mlp.gate.weight"
EXPERT_BIAS = "mlp.gate.e_score_correction_bias"  # fp32, and not trained
_SHARED = "mlp.shared_experts."
_SHARED_FIELD = "n_shared_experts * moe_intermediate_size"
_NORM = "post_attention_layernorm.weight"


@dataclass(frozen=True)
class RoutedExperts(LayerPart):
    """Norm, router and experts, each a gated MLP, as is the shared one."""

    hidden: int
    num_experts: int
    inner: int  # one expert's
    num_per_token: int
    bias: bool = False  # added to the scores that choose experts
    shared: int = 0  # intermediate size of the shared one, a multiple of `inner`; 0: none

    def shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {_NORM: (self.hidden,), ROUTER: (self.num_experts, self.hidden)}
        if self.bias:
            shapes[EXPERT_BIAS] = (self.num_experts,)
        for expert in range(self.num_experts):
            shapes |= gated_shapes(f"mlp.experts.{expert}.", self.hidden, self.inner)
        return shapes | gated_shapes(_SHARED, self.hidden, self.shared) if self.shared else shapes

    def megatron(self) -> Iterator[Placement]:
        # With experts the norm cannot be fused into linear_fc1: the router reads its output first.
        yield Whole("pre_mlp_layernorm.weight", _NORM)
        yield Whole("mlp.router.weight", ROUTER)
        if self.bias:
            yield Whole("mlp.router.expert_bias", EXPERT_BIAS)
        gated = megatron_gated("", "", self.inner, "moe_intermediate_size")
        yield PerExpert(self.num_experts, "mlp.experts.local_experts.{}.", "mlp.experts.{}.", gated)
        if self.shared:
            yield from megatron_gated(_SHARED, _SHARED, self.shared, _SHARED_FIELD)

    def linear_sizes(self) -> Iterator[LinearSize]:
        yield LinearSize("hidden_size", self.hidden)
        yield LinearSize("moe_intermediate_size", self.inner, "expert_tensor")
        if self.shared:
            yield LinearSize(_SHARED_FIELD, self.shared, "tensor")

    def sglang(self, engine: EngineCut) -> Iterator[Placement]:
        yield Whole(_NORM, _NORM)
        yield Whole(ROUTER, ROUTER)
        if self.bias:
            yield Whole(EXPERT_BIAS, EXPERT_BIAS)
        inner = engine_inner(self.inner, engine)
        yield StackedExperts(self.num_experts, "mlp.experts.", "mlp.experts.{}.", inner)
        if self.shared:
            yield from engine_gated(_SHARED, self.shared // self.inner * inner, _SHARED_FIELD)

    def kept(self, cut: TrainerCut) -> Kept:
        # Rows per token that a rank's experts compute under balanced routing.
        copies = cut.local * self.num_per_token * cut.expert_tensor
        inner = self.inner // cut.expert_tensor
        if cut.is_torch:
            # Per copy: the expert's input, [gate; up], the activation, up, their product, and the product times its
            # probability.
            experts = self._router(cut) + copies * (cut.item * (self.hidden + 6 * inner) + FP32)
        else:
            # Per copy: its expert's input and output, and the three products inside.
            experts = copies * (cut.item * (2 * self.hidden + 3 * inner) + FP32)
        if self.bias and cut.item < FP32:  # sigmoid scores are computed from a copy in fp32
            experts += FP32 * cut.stream(self.hidden)
        working = copies * cut.item * (2 * self.hidden + 3 * inner)
        return Kept(cut.normed(self.hidden) + experts + cut.gated_mlp(self.shared // cut.tensor), working=working)

    def _router(self, cut: TrainerCut) -> float:
        """Return the bytes of a token's probabilities and indices over all experts, and over the chosen ones."""
        return cut.local * (
            2 * FP32 * self.num_experts + self.num_experts + FP32 + self.num_per_token * (FP32 + 2 * INDEX)
        )

    @property
    def float32(self) -> frozenset[str]:
        return frozenset({EXPERT_BIAS} if self.bias else ())

    @property
    def never_trained(self) -> int:
        return self.num_experts * self.bias

    @property
    def weights_per_token(self) -> int:
        return self.hidden * (self.num_experts + 3 * (self.inner * self.num_per_token + self.shared))
