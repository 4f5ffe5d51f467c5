"""Grouped-query attention (arXiv:2305.13245), with its norm."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_dapo.models.activations import FP32, Kept, TrainerCut
from megatron_dapo.models.placement import (
    CutColumns,
    EngineCut,
    Interleaved,
    LayerPart,
    Placement,
    Rows,
    Stack,
    Whole,
)
from megatron_dapo.precision import LinearSize
from megatron_dapo.rounding import round_up

_PROJECTIONS = "self_attn.{}_proj.{}"
HEADS, _GROUPS = ("num_attention_heads", False), ("num_key_value_heads", True)  # fields of `Rows`


@dataclass(frozen=True)
class GroupedQueryAttention(LayerPart):
    """Norm, projections of queries, keys and values, and of the output; `post_norm`: a norm of the output (Gemma 3)."""

    hidden: int
    heads: int
    groups: int  # key-value heads
    head_dim: int
    bias: bool = False  # queries, keys and values have one
    qk_norm: bool = False
    post_norm: bool = False

    @property
    def _kinds(self) -> tuple[str, ...]:
        return ("weight", "bias") if self.bias else ("weight",)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        query, key_value = self.heads * self.head_dim, self.groups * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (self.hidden,)}
        for name, rows in (("q", query), ("k", key_value), ("v", key_value)):
            shapes[_PROJECTIONS.format(name, "weight")] = (rows, self.hidden)
            if self.bias:
                shapes[_PROJECTIONS.format(name, "bias")] = (rows,)
        if self.qk_norm:
            shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (self.head_dim,)
        shapes["self_attn.o_proj.weight"] = (self.hidden, query)
        return {**shapes, "post_attention_layernorm.weight": (self.hidden,)} if self.post_norm else shapes

    def megatron(self) -> Iterator[Placement]:
        """Yield buffers. linear_qkv has for each key-value head its query heads, the key head and the value head; it is
        cut evenly over ranks, inside a head's group if there are fewer key-value heads than ranks."""
        yield Whole("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight")
        ratio = self.heads // self.groups
        for kind in self._kinds:
            unit = tuple(
                Rows(_PROJECTIONS.format(name, kind), self.groups, heads * self.head_dim, *_GROUPS)
                for name, heads in (("q", ratio), ("k", 1), ("v", 1))
            )
            yield Interleaved(f"self_attention.linear_qkv.{kind}", self.groups, unit)
        if self.qk_norm:
            yield Whole("self_attention.q_layernorm.weight", "self_attn.q_norm.weight")
            yield Whole("self_attention.k_layernorm.weight", "self_attn.k_norm.weight")
        yield CutColumns("self_attention.linear_proj.weight", self._output(self.heads))
        if self.post_norm:
            yield Whole("self_attention.linear_proj.post_layernorm.weight", "post_attention_layernorm.weight")

    def linear_sizes(self) -> Iterator[LinearSize]:
        heads, groups, size = self.heads, self.groups, self.head_dim
        yield LinearSize("hidden_size", self.hidden)
        queries = f"num_attention_heads {heads}" if self._projected == 1 else f"{self._projected} num_attention_heads {heads}"
        what = f"QKV rows, ({queries} + 2 num_key_value_heads {groups}) x head_dim {size}"
        yield LinearSize(what, (self._projected * heads + 2 * groups) * size, "tensor")
        yield LinearSize(f"attention outputs, num_attention_heads {heads} x head_dim {size}", heads * size, "tensor")

    def sglang(self, engine: EngineCut) -> Iterator[Placement]:
        """Yield buffers. qkv_proj has a rank's query heads, then its key heads, then its value heads."""
        heads, groups = self._engine_heads(engine)
        yield Whole("input_layernorm.weight", "input_layernorm.weight")
        for kind in self._kinds:
            parts = tuple(
                Rows(_PROJECTIONS.format(name, kind), blocks, self.head_dim, *field)
                for name, blocks, field in (("q", heads, HEADS), ("k", groups, _GROUPS), ("v", groups, _GROUPS))
            )
            yield Stack(f"self_attn.qkv_proj.{kind}", parts)
        if self.qk_norm:
            yield Whole("self_attn.q_norm.weight", "self_attn.q_norm.weight")
            yield Whole("self_attn.k_norm.weight", "self_attn.k_norm.weight")
        yield CutColumns("self_attn.o_proj.weight", self._output(heads))
        if self.post_norm:
            yield Whole("post_attention_layernorm.weight", "post_attention_layernorm.weight")

    def kept(self, cut: TrainerCut) -> Kept:
        query, group = self.heads * self.head_dim // cut.tensor, self.groups * self.head_dim // cut.tensor
        sums = FP32 * (self.heads // cut.tensor)  # a head's softmax
        outside = cut.normed(self.hidden) + (cut.norm(self.hidden) if self.post_norm else 0)
        norms = FP32 * (self.heads // cut.tensor + self.groups // cut.tensor)
        if not cut.is_torch:
            heads: float = cut.item * (2 * query + 2 * group)
            if cut.factor < cut.item:  # attention keeps the output, the projection its copy
                heads += cut.factor * query
            if self.qk_norm:
                heads += cut.item * (query + group) + norms
            heads += self._gate(cut, query)
            return Kept(outside + heads + sums, sums, sums + cut.item * query)
        return self._kept_by_torch(cut, query, group, outside, norms)

    def _kept_by_torch(self, cut: TrainerCut, query: int, group: int, outside: float, norms: int) -> Kept:
        """Return what torch's modules keep; `norms`: bytes of the scales of all queries and keys."""
        item = cut.item
        projected = item * (self._projected * query + 2 * group)  # kept whole, because the values are part of it
        core = FP32 * (self.heads // cut.tensor)
        core_again, freed = core + item * query, 0.0
        is_fp32_norm = self.qk_norm and item == FP32
        if cut.context > 1:
            # Keys and values of all ranks instead of the rank's, and the mask in the model's type.
            gathered = 2 * item * group * cut.context + item * cut.sequence_tokens
            core, core_again = core + gathered, core_again + gathered
            freed = item * group + (0 if is_fp32_norm else projected)
        heads = item * (2 * query + group) + projected + self._gate(cut, query)
        if self.qk_norm:
            heads += FP32 * (2 * query + group) + norms
            # In fp32, keys are part of the projection, otherwise fp32 copies; the same holds for the queries of a single
            # group.
            heads += 0 if is_fp32_norm else FP32 * group
            heads -= FP32 * query if is_fp32_norm and self.groups == cut.tensor else 0
        return Kept(outside + heads + core - freed, core - freed, core_again)

    @property
    def _projected(self) -> int:
        """Vectors of a query's size that a head's projection has."""
        return 1

    def _gate(self, cut: TrainerCut, query: int) -> float:
        """Return the bytes of a gate of the output; without one, attention and projection share the output."""
        return 0

    @property
    def attention_width(self) -> int:
        return self.heads * self.head_dim

    def cached_per_token(self, engine: EngineCut) -> int:
        # With fewer heads than ranks, neighboring ranks hold the same head.
        return 2 * max(1, self._engine_heads(engine)[1] // engine.tensor) * self.head_dim

    def _output(self, heads: int) -> Rows:
        return Rows("self_attn.o_proj.weight", heads, self.head_dim, *HEADS)

    def _engine_heads(self, engine: EngineCut) -> tuple[int, int]:
        """Return the query and key-value heads of all ranks; an engine on a CPU appends heads of zeros."""
        if not engine.pads or not (self.heads % engine.tensor or self.groups % engine.tensor):
            return self.heads, self.groups
        groups = round_up(self.groups, engine.tensor)
        return groups * (self.heads // self.groups), groups
