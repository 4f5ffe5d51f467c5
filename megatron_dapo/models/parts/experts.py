"""A mixture of experts in place of the MLP, with its norm and its router."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_dapo.models.parts.mlp import engine_inner, gated_shapes, megatron_gated
from megatron_dapo.models.placement import EngineCut, LayerPart, PerExpert, Placement, StackedExperts, Whole

ROUTER = "mlp.gate.weight"
_NORM = "post_attention_layernorm.weight"


@dataclass(frozen=True)
class RoutedExperts(LayerPart):
    """Norm, router and experts, each a gated MLP."""

    hidden: int
    num_experts: int
    inner: int  # one expert's
    num_per_token: int

    def shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {_NORM: (self.hidden,), ROUTER: (self.num_experts, self.hidden)}
        for expert in range(self.num_experts):
            shapes |= gated_shapes(f"mlp.experts.{expert}.", self.hidden, self.inner)
        return shapes

    def megatron(self) -> Iterator[Placement]:
        # With experts the norm cannot be fused into linear_fc1: the router reads its output first.
        yield Whole("pre_mlp_layernorm.weight", _NORM)
        yield Whole("mlp.router.weight", ROUTER)
        gated = megatron_gated("", "", self.inner, "moe_intermediate_size")
        yield PerExpert(self.num_experts, "mlp.experts.local_experts.{}.", "mlp.experts.{}.", gated)

    def sglang(self, engine: EngineCut) -> Iterator[Placement]:
        yield Whole(_NORM, _NORM)
        yield Whole(ROUTER, ROUTER)
        inner = engine_inner(self.inner, engine)
        yield StackedExperts(self.num_experts, "mlp.experts.", "mlp.experts.{}.", inner)

    @property
    def weights_per_token(self) -> int:
        return self.hidden * (self.num_experts + 3 * self.inner * self.num_per_token)
