"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1), with its norm."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_dapo.models.activations import FP32, Kept, TrainerCut
from megatron_dapo.models.blocks import LatentAttention
from megatron_dapo.models.placement import CutColumns, EngineCut, LayerPart, Placement, Rows, Stack, Whole
from megatron_dapo.precision import LinearSize

_ATTENTION = "self_attn.{}.weight"


@dataclass(frozen=True)
class MultiHeadLatentAttention(LayerPart):
    """Norm, compression and expansion of queries (one projection if they are not compressed), of keys with values, and the
    projection of the output. The compressions are whole on every rank."""

    hidden: int
    heads: int
    sizes: LatentAttention

    def shapes(self) -> dict[str, tuple[int, ...]]:
        sizes, hidden = self.sizes, self.hidden
        query, compressed = self.heads * sizes.query_dim, sizes.key_value_rank + sizes.rotary_dim
        shapes: dict[str, tuple[int, ...]] = {"q_proj": (query, hidden)}
        if sizes.query_rank is not None:
            shapes = {"q_a_proj": (sizes.query_rank, hidden), "q_a_layernorm": (sizes.query_rank,)}
            shapes["q_b_proj"] = (query, sizes.query_rank)
        shapes |= {"kv_a_proj_with_mqa": (compressed, hidden), "kv_a_layernorm": (sizes.key_value_rank,)}
        shapes["kv_b_proj"] = (self.heads * (sizes.content_dim + sizes.value_dim), sizes.key_value_rank)
        shapes["o_proj"] = (hidden, self.heads * sizes.value_dim)
        named = {_ATTENTION.format(name): shape for name, shape in shapes.items()}
        return {"input_layernorm.weight": (hidden,), **named}

    def megatron(self) -> Iterator[Placement]:
        prefix = "self_attention.linear_"
        yield Whole("input_layernorm.weight", "input_layernorm.weight")
        if self.sizes.query_rank is None:
            yield Stack(prefix + "q_proj.weight", (self._heads("q_proj", self.sizes.query_dim),))
        else:
            yield Whole(prefix + "q_down_proj.weight", _ATTENTION.format("q_a_proj"))
            yield Whole(prefix + "q_up_proj.layer_norm_weight", _ATTENTION.format("q_a_layernorm"))
            yield Stack(prefix + "q_up_proj.weight", (self._heads("q_b_proj", self.sizes.query_dim),))
        yield Whole(prefix + "kv_down_proj.weight", _ATTENTION.format("kv_a_proj_with_mqa"))
        yield Whole(prefix + "kv_up_proj.layer_norm_weight", _ATTENTION.format("kv_a_layernorm"))
        yield Stack(prefix + "kv_up_proj.weight", (self._key_value_heads,))
        yield CutColumns(prefix + "proj.weight", self._heads("o_proj", self.sizes.value_dim))

    def linear_sizes(self) -> Iterator[LinearSize]:
        sizes, heads = self.sizes, f"num_attention_heads {self.heads} x "
        yield LinearSize("hidden_size", self.hidden)
        if sizes.query_rank is not None:
            yield LinearSize("q_lora_rank", sizes.query_rank)
        yield LinearSize("kv_lora_rank", sizes.key_value_rank)
        compressed = f"kv_lora_rank {sizes.key_value_rank} + qk_rope_head_dim {sizes.rotary_dim}"
        yield LinearSize(compressed, self._compressed, ends_inside=True)
        for what, size in (
            (f"(qk_nope_head_dim {sizes.content_dim} + qk_rope_head_dim {sizes.rotary_dim})", sizes.query_dim),
            (f"(qk_nope_head_dim {sizes.content_dim} + v_head_dim {sizes.value_dim})", sizes.content_dim + sizes.value_dim),
            (f"v_head_dim {sizes.value_dim}", sizes.value_dim),
        ):
            yield LinearSize(heads + what, self.heads * size, "tensor")

    def sglang(self, engine: EngineCut) -> Iterator[Placement]:
        """Yield buffers. The two compressions are one matrix. What SGLang absorbs into queries and outputs is no parameter:
        it derives that from kv_b_proj after loading."""
        yield Whole("input_layernorm.weight", "input_layernorm.weight")
        whole, heads = (
            ["kv_a_layernorm"],
            Stack(_ATTENTION.format("q_proj"), (self._heads("q_proj", self.sizes.query_dim),)),
        )
        if self.sizes.query_rank is None:
            whole.append("kv_a_proj_with_mqa")
        else:
            compressions = (("q_a_proj", self.sizes.query_rank), ("kv_a_proj_with_mqa", self._compressed))
            parts = tuple(Rows(_ATTENTION.format(name), 1, rows, replicates=True) for name, rows in compressions)
            yield Stack(_ATTENTION.format("fused_qkv_a_proj_with_mqa"), parts)
            whole.append("q_a_layernorm")
            heads = Stack(_ATTENTION.format("q_b_proj"), (self._heads("q_b_proj", self.sizes.query_dim),))
        yield from (Whole(_ATTENTION.format(name), _ATTENTION.format(name)) for name in whole)
        yield heads
        yield Stack(_ATTENTION.format("kv_b_proj"), (self._key_value_heads,))
        yield CutColumns(_ATTENTION.format("o_proj"), self._heads("o_proj", self.sizes.value_dim))

    def kept(self, cut: TrainerCut) -> Kept:
        sizes, heads = self.sizes, self.heads // cut.tensor
        query, value = cut.item * heads * sizes.query_dim, cut.item * heads * sizes.value_dim
        # Flash attention needs values as large as keys: their padding is kept, and the projection reads a copy of the output.
        pads, sums, is_fp8 = sizes.value_dim < sizes.query_dim, FP32 * heads, cut.factor < cut.item
        latents, normed = self._latents(cut)
        outside = cut.normed(self.hidden) + latents + normed + (cut.item if cut.is_torch else cut.factor) * heads * sizes.value_dim
        # Queries and keys read the same tensor, but each its own copy in FP8.
        outside += cut.factor * cut.stream(self.hidden) if is_fp8 and not cut.is_torch else 0
        core = sums + (query if pads or is_fp8 else 0)
        if not cut.is_torch:
            # A checkpoint of core attention has the values without padding.
            padding = query - value if pads else 0
            expansion = normed + 2 * query + (0 if pads else value)
            whole = outside + 3 * query + core
            return Kept(whole, core + padding, sums + query + (query if pads else 0), expansion)
        core_again = sums + query
        if cut.context > 1:
            # Keys and values of all ranks instead of the rank's, and the mask in the model's type.
            gathered = 2 * query * cut.context + cut.item * cut.sequence_tokens
            core, core_again = core + gathered - 2 * query, core_again + gathered
        return Kept(outside + 3 * query + core, core, core_again)

    def _latents(self, cut: TrainerCut) -> tuple[float, float]:
        """Return the bytes of the latent vectors and their scales, and those of the normed ones."""
        latents = normed = 0.0
        ranks = [(self.sizes.key_value_rank, self.sizes.rotary_dim)]
        if self.sizes.query_rank is not None:
            ranks.append((self.sizes.query_rank, 0))
        for rank, others in ranks:
            # A copy in fp32 leaves out what is next to the vector.
            latents += cut.norm(rank) + (cut.item * cut.stream(others) if cut.item == FP32 or not cut.is_torch else 0)
            normed += (cut.item if cut.is_torch else cut.factor) * cut.stream(rank)
        return latents, normed

    @property
    def attention_width(self) -> int:
        # Scores take a query's elements, sums of values those of a value.
        return self.heads * (self.sizes.query_dim + self.sizes.value_dim) // 2

    @property
    def absorbed_width(self) -> int:
        # Scores take a cached vector, outputs its part without positions.
        return self.heads * (self._compressed + self.sizes.key_value_rank)

    def cached_per_token(self, engine: EngineCut) -> int:
        """Return the elements of a token's compressed key and value, which every rank caches whole."""
        return self._compressed

    @property
    def _compressed(self) -> int:
        return self.sizes.key_value_rank + self.sizes.rotary_dim

    @property
    def _key_value_heads(self) -> Rows:
        return self._heads("kv_b_proj", self.sizes.content_dim + self.sizes.value_dim)

    def _heads(self, name: str, size: int) -> Rows:
        return Rows(_ATTENTION.format(name), self.heads, size, "num_attention_heads")
