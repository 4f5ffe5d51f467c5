"""Gated delta net (arXiv:2412.06464) in place of attention, with its norm: linear_attn of Qwen3-Next and Qwen3.5."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_dapo.models.activations import FP32, FP64, INDEX, Kept, TrainerCut
from megatron_dapo.models.placement import CutColumns, EngineCut, LayerPart, Placement, Rows, Stack, Whole
from megatron_dapo.precision import LinearSize

_NET = "linear_attn."
CONVOLUTION, BETA_AND_ALPHA = _NET + "conv1d.weight", _NET + "in_proj_ba.weight"
DECAY = _NET + "A_log"  # fp32, as in SGLang and in Qwen3.5's published checkpoints
CHUNK = 64  # tokens of a chunk of the delta rule: the published kernels' choice
_KEY_HEADS, _VALUE_HEADS = "linear_num_key_heads", "linear_num_value_heads"


@dataclass(frozen=True)
class GatedDeltaMixer(LayerPart):
    """Norm, projections to queries, keys, values, gates, beta and alpha, convolution, decay, gated norm and output.

    `fused`: a checkpoint has two projections, whose rows go from key head to key head (Qwen3-Next); otherwise four, with
    all heads' queries, then all keys, then all values in the first.
    """

    hidden: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel_size: int
    fused: bool

    @property
    def _ratio(self) -> int:
        """Value heads of a key head."""
        return self.value_heads // self.key_heads

    @property
    def _widths(self) -> tuple[int, int]:
        """Widths of all keys and of all values."""
        return self.key_heads * self.key_dim, self.value_heads * self.value_dim

    def shapes(self) -> dict[str, tuple[int, ...]]:
        keys, values = self._widths
        into = {"qkvz": 2 * (keys + values), "ba": 2 * self.value_heads}
        if not self.fused:
            into = {"qkv": 2 * keys + values, "z": values, "b": self.value_heads, "a": self.value_heads}
        return {
            "input_layernorm.weight": (self.hidden,),
            **{f"{_NET}in_proj_{name}.weight": (rows, self.hidden) for name, rows in into.items()},
            CONVOLUTION: (2 * keys + values, 1, self.kernel_size),
            _NET + "dt_bias": (self.value_heads,),
            DECAY: (self.value_heads,),
            _NET + "norm.weight": (self.value_dim,),
            _NET + "out_proj.weight": (self.hidden, values),
        }

    def megatron(self) -> Iterator[Placement]:
        """Yield buffers. A rank's rows of in_proj are its heads' queries, keys, values, gates, beta and alpha."""
        yield Stack("self_attention.dt_bias", self._per_head("dt_bias"))
        yield Stack("self_attention.A_log", self._per_head("A_log"))
        yield Stack("self_attention.in_proj.weight", self._projected())
        yield Whole("self_attention.in_proj.layer_norm_weight", "input_layernorm.weight")
        yield Stack("self_attention.conv1d.weight", self._by_head("conv1d"))
        yield Whole("self_attention.out_norm.weight", _NET + "norm.weight")
        yield CutColumns("self_attention.out_proj.weight", self._output())

    def linear_sizes(self) -> Iterator[LinearSize]:
        keys, values = self._widths
        width = f"linear_num_value_heads {self.value_heads} x linear_value_head_dim {self.value_dim}"
        what = f"in_proj rows of queries, keys, values and gates, 2 x (linear_num_key_heads {self.key_heads} x linear_key_head_dim "
        yield LinearSize("hidden_size", self.hidden)
        yield LinearSize(f"{what}{self.key_dim} + {width})", 2 * (keys + values), "tensor")
        # The last block of in_proj has only these.
        rows = f"in_proj rows of beta and alpha, 2 linear_num_value_heads {self.value_heads}"
        yield LinearSize(rows, 2 * self.value_heads, "tensor", ends_inside=True)
        yield LinearSize(f"gated delta net outputs, {width}", values, "tensor")

    def sglang(self, engine: EngineCut) -> Iterator[Placement]:
        """Yield buffers. in_proj_qkvz has a rank's queries, keys, values and gates; if the checkpoint's are fused, its rows."""
        yield Stack(_NET + "dt_bias", self._per_head("dt_bias"))
        yield Stack(_NET + "A_log", self._per_head("A_log"))
        yield Stack(CONVOLUTION, self._by_head("conv1d"))
        if self.fused:
            for name in (_NET + "in_proj_qkvz.weight", BETA_AND_ALPHA):
                rows = self.shapes()[name][0] // self.key_heads
                yield Stack(name, (Rows(name, self.key_heads, rows, _KEY_HEADS),))
        else:
            yield Stack(_NET + "in_proj_qkvz.weight", self._projected()[:4])
            yield Stack(BETA_AND_ALPHA, self._projected()[4:])
        yield Whole(_NET + "norm.weight", _NET + "norm.weight")
        yield CutColumns(_NET + "out_proj.weight", self._output())
        yield Whole("input_layernorm.weight", "input_layernorm.weight")

    @property
    def float32(self) -> frozenset[str]:
        return frozenset({DECAY})

    @property
    def fp32_products(self) -> int:
        size, of_value = self.key_dim, self.value_dim
        # Products of keys, and of queries and keys, the triangular solution and outputs in a chunk; and three with the state.
        of_head = CHUNK * (2 * size + (size + of_value) // 2 + of_value) + 3 * size * of_value
        return self.value_heads * of_head

    @property
    def state_elements(self) -> tuple[int, int]:
        """Elements of a sequence's state: of the convolution, in the model's type, and of the recurrence, in fp32."""
        keys, values = self._widths
        return (2 * keys + values) * (self.kernel_size - 1), self.value_heads * self.key_dim * self.value_dim

    def kept(self, cut: TrainerCut) -> Kept:
        """Return what the project's module keeps, which also runs between Transformer Engine's linear layers: sums, and what
        they are made of, are in fp32."""
        keys, values = (width // cut.tensor for width in self._widths)
        heads, item = self.value_heads // cut.tensor, cut.item
        mixed = 2 * keys + values
        projected = item * (mixed + values + 2 * heads)
        # The norm's input, its scale, its output and the gate's SiLU. In 16 bits the gate is a copy; a norm on a CPU keeps
        # its input times the scale, too.
        gated = FP32 * (values * (3 + (item < FP32) + cut.is_torch) + heads)
        projection = (item if cut.is_torch else cut.factor) * values
        core = self._kept_by_rule(cut, keys, values)
        if cut.context > 1:
            # Tokens of all ranks for a share of the heads. In 16 bits nothing else needs the projection then.
            core += item * (mixed + 2 * heads) - (projected if item < FP32 else 0)
        outside = cut.normed(self.hidden) + projected
        # Norm, gate and projection of the output are freed before the rule is computed again.
        core_again = core - gated - projection
        # Measured: at most so many rows of gradients at a time. Without gradients the rule holds most of what it keeps.
        working = FP32 * heads * 2 * (self.key_dim + self.value_dim + CHUNK)
        return Kept(outside + gated + projection + core, core, core_again, working=working, forward=core)

    def _kept_by_rule(self, cut: TrainerCut, keys: int, values: int) -> float:
        """Return the bytes of convolution and delta rule, whose queries and keys have `keys` elements on a rank."""
        heads, groups = self.value_heads // cut.tensor, self.key_heads // cut.tensor
        mixed = 2 * keys + values
        # Rows with the tokens before each sequence, sums before and after SiLU, an index.
        rows = 1 + (self.kernel_size - 1) / cut.sequence_tokens
        convolution = cut.item * mixed * rows + 2 * FP32 * mixed + INDEX
        # Softplus and its input, decay, beta; norms of queries and keys, and these divided by them.
        gates = FP32 * (4 * heads + 2 * groups + 2 * keys)
        # Each token has in its chunk a row of decays, products of keys, these times beta and times the decays, products of queries
        # and keys, and these times the decays.
        slots = cut.chunk_padding(CHUNK)
        size, of_value = self.key_dim, self.value_dim
        rule = 6 * FP32 * CHUNK * heads + (FP64 + 2 * FP32) * heads
        # Keys and queries; both sides of the equation, and corrected values.
        rule += FP32 * heads * (2 * size + 2 * (size + of_value) + of_value)
        if cut.sequence_tokens > CHUNK:  # keys to a chunk's end and queries from its start: the first state is zero
            rule += FP32 * heads * 2 * size
        states = FP32 * heads * size * of_value / CHUNK
        return convolution + gates + slots * (rule + states)

    def _projected(self) -> tuple[Rows, ...]:
        """Return the rows of queries, keys, values, gates, beta and alpha."""
        if not self.fused:
            others = (("in_proj_z", self.value_dim), ("in_proj_b", 1), ("in_proj_a", 1))
            gates = (Rows(f"{_NET}{name}.weight", self.value_heads, rows, _VALUE_HEADS) for name, rows in others)
            return (*self._by_head("in_proj_qkv"), *gates)
        values = self._ratio * self.value_dim
        parts, start = [], 0
        for rows in (self.key_dim, self.key_dim, values, values):
            stride = 2 * (self.key_dim + values)
            parts.append(Rows(_NET + "in_proj_qkvz.weight", self.key_heads, rows, _KEY_HEADS, start=start, stride=stride))
            start += rows
        for start in (0, self._ratio):
            sizes = (self.key_heads, self._ratio, _KEY_HEADS)
            parts.append(Rows(BETA_AND_ALPHA, *sizes, start=start, stride=2 * self._ratio))
        return tuple(parts)

    def _by_head(self, name: str) -> tuple[Rows, Rows, Rows]:
        """Return the rows of queries, keys and values in a tensor that has one after the other."""
        tensor, (keys, _) = f"{_NET}{name}.weight", self._widths
        queries = Rows(tensor, self.key_heads, self.key_dim, _KEY_HEADS, end=keys)
        of_keys = Rows(tensor, self.key_heads, self.key_dim, _KEY_HEADS, start=keys, end=2 * keys)
        return queries, of_keys, Rows(tensor, self.value_heads, self.value_dim, _VALUE_HEADS, start=2 * keys)

    def _per_head(self, name: str) -> tuple[Rows]:
        return (Rows(_NET + name, self.value_heads, 1, _VALUE_HEADS),)

    def _output(self) -> Rows:
        return Rows(_NET + "out_proj.weight", self.value_heads, self.value_dim, _VALUE_HEADS)
