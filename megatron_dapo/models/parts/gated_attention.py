"""Grouped-query attention whose output is multiplied by a sigmoid of a second projection (Qwen3-Next, Qwen3.5)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

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
