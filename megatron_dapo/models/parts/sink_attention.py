"""Grouped-query attention with sinks (arXiv:2309.17453) and a bias of the output (gpt-oss)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_dapo.models.activations import FP32, Kept, TrainerCut
from megatron_dapo.models.parts.attention import HEADS, GroupedQueryAttention
from megatron_dapo.models.placement import EngineCut, Placement, Rows, Stack, Whole

SINKS, _OUTPUT_BIAS = "self_attn.sinks", "self_attn.o_proj.bias"


@dataclass(frozen=True)
class SinkAttention(GroupedQueryAttention):
    """Each head has a learned logit, the sink, in the denominator of its softmax; it has no value."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {**super().shapes(), _OUTPUT_BIAS: (self.hidden,), SINKS: (self.heads,)}

    def megatron(self) -> Iterator[Placement]:
        yield from super().megatron()
        # Summed over ranks before it is added, so that every rank holds it.
        yield Whole("self_attention.linear_proj.bias", _OUTPUT_BIAS)
        yield Stack("self_attention.core_attention.softmax_offset", (Rows(SINKS, self.heads, 1, *HEADS),))

    def sglang(self, engine: EngineCut) -> Iterator[Placement]:
        yield from super().sglang(engine)
        yield Whole(_OUTPUT_BIAS, _OUTPUT_BIAS)
        yield Stack(SINKS, (Rows(SINKS, self._engine_heads(engine)[0], 1, *HEADS),))

    def _kept_by_torch(self, cut: TrainerCut, query: int, group: int, outside: float, norms: int) -> Kept:
        """Return what torch's modules keep: the softmax is of all scores, and each query head has a copy of keys and values."""
        heads, item = self.heads // cut.tensor, cut.item
        attended = item * query * (1 + 2 * cut.context) + FP32 * heads * (cut.sequence_tokens + 1)
        attended += item * heads * cut.sequence_tokens if item < FP32 else 0
        inputs = item * (query + group) + item * (query + 2 * group)  # rotated, and the projection with the values
        return Kept(outside + attended + item * query, attended - inputs, attended + item * query)
