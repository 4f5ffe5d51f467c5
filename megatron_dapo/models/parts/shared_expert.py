"""The expert that every token goes to, next to the routed ones, times a sigmoid of a projection (Qwen3-Next, Qwen3.5)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_dapo.models.activations import Kept, TrainerCut
from megatron_dapo.models.parts.mlp import engine_inner, gated_rows, gated_shapes, megatron_gated
from megatron_dapo.models.placement import CutColumns, EngineCut, LayerPart, Placement, Stack, Whole
from megatron_dapo.precision import LinearSize

_EXPERT, SHARED_GATE = "mlp.shared_expert.", "mlp.shared_expert_gate.weight"
_FIELD = "shared_expert_intermediate_size"


@dataclass(frozen=True)
class GatedSharedExpert(LayerPart):
    """A gated MLP, which reads what the router reads, and the projection to its gate."""

    hidden: int
    inner: int

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {**gated_shapes(_EXPERT, self.hidden, self.inner), SHARED_GATE: (1, self.hidden)}

    def megatron(self) -> Iterator[Placement]:
        yield Whole("mlp.shared_experts.gate_weight", SHARED_GATE)
        yield from megatron_gated("mlp.shared_experts.", _EXPERT, self.inner, _FIELD)

    def linear_sizes(self) -> Iterator[LinearSize]:
        yield LinearSize(_FIELD, self.inner, "tensor")

    def sglang(self, engine: EngineCut) -> Iterator[Placement]:
        gate, up, down = gated_rows(_EXPERT, engine_inner(self.inner, engine), _FIELD)
        yield Stack(_EXPERT + "gate_up_proj.weight", (gate, up))
        yield CutColumns(_EXPERT + "down_proj.weight", down)
        yield Whole(SHARED_GATE, SHARED_GATE)

    def kept(self, cut: TrainerCut) -> Kept:
        # The routed experts' part counts the norm. The gate keeps itself and what it multiplies.
        gate = cut.item * (cut.stream(self.hidden) + cut.local)
        return Kept(cut.gated_mlp(self.inner // cut.tensor) + gate)
