"""Gated MLP (arXiv:2002.05202) of a dense layer, with its norm."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_dapo.models.activations import Kept, TrainerCut
from megatron_dapo.models.placement import CutColumns, EngineCut, LayerPart, Placement, Rows, Stack, Whole
from megatron_dapo.precision import LinearSize
from megatron_dapo.rounding import round_up

CPU_INTERMEDIATE_MULTIPLE = 32  # SGLang pads intermediate sizes to a multiple of this times its ranks


@dataclass(frozen=True)
class GatedMlp(LayerPart):
    """Norm, gate, up and down projection; `post_norm`: a norm of the output (Gemma 3)."""

    hidden: int
    inner: int
    norm: str = "post_attention_layernorm.weight"
    post_norm: str = ""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        post_norm: dict[str, tuple[int, ...]] = {self.post_norm: (self.hidden,)} if self.post_norm else {}
        return {self.norm: (self.hidden,), **gated_shapes("mlp.", self.hidden, self.inner), **post_norm}

    def megatron(self) -> Iterator[Placement]:
        yield Whole("mlp.linear_fc1.layer_norm_weight", self.norm)
        yield from megatron_gated("mlp.", "mlp.", self.inner, "intermediate_size")
        if self.post_norm:
            yield Whole("mlp.linear_fc2.post_layernorm.weight", self.post_norm)

    def linear_sizes(self) -> Iterator[LinearSize]:
        yield LinearSize("hidden_size", self.hidden)
        yield LinearSize("intermediate_size", self.inner, "tensor")

    def sglang(self, engine: EngineCut) -> Iterator[Placement]:
        yield Whole(self.norm, self.norm)
        yield from engine_gated("mlp.", engine_inner(self.inner, engine), "intermediate_size")
        if self.post_norm:
            yield Whole(self.post_norm, self.post_norm)

    def kept(self, cut: TrainerCut) -> Kept:
        inner = self.inner // cut.tensor
        after = cut.norm(self.hidden) if self.post_norm else 0
        return Kept(cut.normed(self.hidden) + cut.gated_mlp(inner) + after, working=3 * cut.item * inner)


def gated_shapes(prefix: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of one gated MLP, of a dense layer or of an expert."""
    into = (inner, hidden)
    return {
        prefix + "gate_proj.weight": into,
        prefix + "up_proj.weight": into,
        prefix + "down_proj.weight": into[::-1],
    }


def gated_rows(prefix: str, inner: int, field: str) -> tuple[Rows, Rows, Rows]:
    """Return the rows of gate and up, and the columns of down."""
    gate, up, down = (Rows(f"{prefix}{name}_proj.weight", inner, 1, field) for name in ("gate", "up", "down"))
    return gate, up, down


def megatron_gated(local: str, prefix: str, inner: int, field: str) -> tuple[Stack, CutColumns]:
    """Return Megatron's two buffers of one gated MLP: [gate rows; up rows], and columns of down."""
    gate, up, down = gated_rows(prefix, inner, field)
    return Stack(local + "linear_fc1.weight", (gate, up)), CutColumns(local + "linear_fc2.weight", down)


def engine_gated(prefix: str, inner: int, field: str) -> tuple[Stack, CutColumns]:
    """Return SGLang's two buffers of one gated MLP: [gate rows; up rows], and columns of down."""
    gate, up, down = gated_rows(prefix, inner, field)
    return Stack(prefix + "gate_up_proj.weight", (gate, up)), CutColumns(prefix + "down_proj.weight", down)


def engine_inner(inner: int, engine: EngineCut) -> int:
    """Return the intermediate size of all ranks of an engine, with the padding that it appends on a CPU."""
    return round_up(inner, CPU_INTERMEDIATE_MULTIPLE * engine.tensor) if engine.pads else inner
