"""Grouped-query attention whose output is multiplied by a sigmoid of a second projection (Qwen3-Next, Qwen3.5)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_dapo.models.activations import FP32, TrainerCut
from megatron_dapo.models.parts.attention import GroupedQueryAttention
from megatron_dapo.models.placement import EngineCut, Interleaved, Placement, Stack

_QUERY = "self_attn.q_proj.weight"


@dataclass(frozen=True)
class GatedAttention(GroupedQueryAttention):
    """q_proj has for each head its query, then its gate."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {**super().shapes(), _QUERY: (2 * self.heads * self.head_dim, self.hidden)}

    def megatron(self) -> Iterator[Placement]:
        """Yield buffers. linear_qkv has for each key-value head the queries of its heads, their gates, key and value."""
        ratio, size = self.heads // self.groups, self.head_dim
        for placement in super().megatron():
            if isinstance(placement, Interleaved):
                query, key, value = placement.unit
                halves = [
                    replace(query, block=size, start=(2 * head + half) * size, stride=2 * ratio * size)
                    for half in (0, 1)
                    for head in range(ratio)
                ]
                placement = replace(placement, unit=(*halves, key, value))
            yield placement

    def sglang(self, engine: EngineCut) -> Iterator[Placement]:
        """Yield buffers, which SGLang's layer has outside self_attn. A rank's query heads have their gates next to them."""
        for placement in super().sglang(engine):
            if isinstance(placement, Stack):
                query, *others = placement.parts
                placement = replace(placement, parts=(replace(query, block=2 * self.head_dim), *others))
            yield replace(placement, local=placement.local.removeprefix("self_attn."))

    @property
    def _projected(self) -> int:
        return 2

    def _gate(self, cut: TrainerCut, query: int) -> float:
        if cut.is_torch:
            # The gate in fp32 and, if that is another one, in the model's type; and the projection's input.
            return (FP32 + (cut.item if cut.item < FP32 else 0) + cut.item) * query
        # megatron-core fuses the product, which keeps a copy of the gate. In 16 bits the projection's input is new, too.
        return cut.item * query * (2 if cut.factor == cut.item else 1)
