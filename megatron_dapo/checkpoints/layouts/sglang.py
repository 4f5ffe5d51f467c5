"""Layout of SGLang's decoders under tensor and expert parallelism: names, rows and padding of each Hugging Face tensor.

Local names are those of the SGLang model's `named_parameters()` (0.5.17 to 0.5.23, one pipeline stage, no data-parallel
attention, no quantization, no redundant experts, an MoE runner that takes [gate; up] untransposed as the Triton and the
native one do). See the table in `SglangLayout`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from megatron_dapo.checkpoints.layouts.computed import (
    Buffer,
    ComputedLayout,
    RankContents,
    check_divides,
    collect_buffers,
)
from megatron_dapo.models.architecture import EMBEDDING, FINAL_NORM, LM_HEAD, ROUTER, ModelArchitecture
from megatron_dapo.plan.memory import SGLANG_VOCABULARY_MULTIPLE as VOCABULARY_MULTIPLE
from megatron_dapo.reshard.layout import Shard, TensorSpec, local_holes
from megatron_dapo.reshard.slices import Slice
from megatron_dapo.rounding import round_up

CPU_INTERMEDIATE_MULTIPLE = 32  # on a CPU the engine pads intermediate sizes to a multiple of this times its size


@dataclass(frozen=True)
class EngineSizes:
    """Sizes over all ranks of one engine, including the zero heads, rows or columns that it appends as padding."""

    query_heads: int
    key_value_heads: int
    intermediate: int  # size of a dense MLP; 0 in a model with experts
    expert_intermediate: int  # 0 in a dense model
    vocabulary: int


def _mlp_sizes(architecture: ModelArchitecture) -> tuple[int, int]:
    """Return the intermediate sizes of a dense layer and of an expert, 0 if the model has none."""
    experts = architecture.experts
    return (architecture.intermediate_size, 0) if experts is None else (0, experts.intermediate_size)


def _cuda_sizes(architecture: ModelArchitecture, tensor_parallel: int, expert_parallel: int) -> EngineSizes:
    """Return the sizes on an accelerator: only the vocabulary is padded, and key-value heads may be replicated."""
    dense, expert = _mlp_sizes(architecture)
    heads, vocabulary = architecture.num_key_value_heads, round_up(architecture.vocab_size, VOCABULARY_MULTIPLE)
    if heads % tensor_parallel and tensor_parallel % heads:
        raise ValueError(
            f"engine tensor parallel size {tensor_parallel} is neither a multiple nor a divisor of "
            f"num_key_value_heads {heads}, which SGLang needs"
        )
    check_divides("engine tensor", tensor_parallel, "num_attention_heads", architecture.num_attention_heads)
    check_divides("engine tensor", tensor_parallel, "intermediate_size", dense)
    check_divides("engine tensor", tensor_parallel // expert_parallel, "moe_intermediate_size", expert)
    check_divides("engine tensor", tensor_parallel, "the padded vocabulary", vocabulary)
    return EngineSizes(architecture.num_attention_heads, heads, dense, expert, vocabulary)


def _cpu_sizes(architecture: ModelArchitecture, tensor_parallel: int, expert_parallel: int) -> EngineSizes:
    """Return the sizes on a CPU, which pads sizes that do not divide: heads, intermediate and vocabulary."""
    dense, expert = _mlp_sizes(architecture)
    heads = architecture.num_key_value_heads
    if architecture.num_attention_heads % tensor_parallel or heads % tensor_parallel:
        heads = round_up(heads, tensor_parallel)
    vocabulary = round_up(architecture.vocab_size, VOCABULARY_MULTIPLE)
    if vocabulary % tensor_parallel:
        vocabulary = round_up(architecture.vocab_size, VOCABULARY_MULTIPLE * tensor_parallel)
    return EngineSizes(
        query_heads=heads * architecture.query_groups_ratio,
        key_value_heads=heads,
        intermediate=round_up(dense, CPU_INTERMEDIATE_MULTIPLE * tensor_parallel),
        expert_intermediate=round_up(expert, CPU_INTERMEDIATE_MULTIPLE * tensor_parallel),
        vocabulary=vocabulary,
    )


class SglangLayout(ComputedLayout):
    """Layout of `num_engines` equal engines; rank = engine * T + tensor-parallel rank t.

    | local buffer | content of rank t of T |
    |---|---|
    | model.embed_tokens, lm_head | rows [t V'/T, ...) of the vocabulary padded to V' |
    | qkv_proj | its query heads, then its key heads, then its value heads |
    | gate_up_proj | [gate rows of t; up rows of t] |
    | o_proj, down_proj | columns of t |
    | norms, router | whole on every rank |
    | experts.w13_weight [n, 2 i, h] | of each of its n experts [gate rows; up rows] |
    | experts.w2_weight [n, h, i] | of each of its n experts the columns |

    With fewer key-value heads K than T, rank t holds head t // (T / K). Under expert parallelism E, rank t holds the
    experts of expert rank t // (T / E), cut into T / E. A tied dense model has no separate lm_head; a tied one with
    experts has a copy. Gemma 3 has the whole embedding on every rank and four norms per layer; with a vision tower, its
    names begin with "language_model.". Elements without a shard are `padding`. They must be zero, which they are not in
    an engine that starts with random weights.
    """

    def __init__(
        self,
        architecture: ModelArchitecture,
        tensor_parallel: int,
        expert_parallel: int,
        dtype: torch.dtype,
        num_engines: int,
        sizes: EngineSizes,
    ) -> None:
        super().__init__({name: TensorSpec(shape, dtype) for name, shape in architecture.shapes().items()})
        self.architecture = architecture
        self.tensor_parallel = tensor_parallel
        self.expert_parallel = expert_parallel
        self.num_engines = num_engines
        self.sizes = sizes
        self.dtype = dtype

    @property
    def num_ranks(self) -> int:
        return self.num_engines * self.tensor_parallel

    def padding(self, rank: int) -> dict[str, tuple[Slice, ...]]:
        """Return the slices of the parameters, in local coordinates, that no tensor fills; they must be zero."""
        holes = local_holes(self.shards(rank), self.local_shapes(rank))
        return {name: slices for name, slices in holes.items() if slices}

    def _replica_key(self, rank: int) -> int:
        return rank % self.tensor_parallel

    def _compute(self, rank: int) -> RankContents:
        buffers = self._buffers(self._replica_key(rank))
        return collect_buffers((_prefixed(self.prefix, buffer), self.dtype) for buffer in buffers)

    @property
    def prefix(self) -> str:
        """Prefix of the names of all local buffers."""
        return "language_model." if self.architecture.model_type == "gemma3" else ""

    def _buffers(self, tensor: int) -> Iterator[Buffer]:
        vocabulary = self._share(self.sizes.vocabulary)
        if self.architecture.gemma3 is not None:
            yield self._whole(EMBEDDING, EMBEDDING)
        else:
            yield self._rows(EMBEDDING, [(EMBEDDING, tensor, vocabulary)])
        for layer in range(self.architecture.num_layers):
            prefix = f"model.layers.{layer}."
            yield from self._attention(prefix, tensor)
            if self.architecture.experts is not None:
                yield self._whole(prefix + ROUTER, prefix + ROUTER)
                yield from self._experts(prefix + "mlp.experts.", tensor)
            else:
                yield from self._mlp(prefix + "mlp.", tensor)
            if self.architecture.gemma3 is not None:
                for name in ("pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight"):
                    yield self._whole(prefix + name, prefix + name)
        yield self._whole(FINAL_NORM, FINAL_NORM)
        if not self.architecture.tie_word_embeddings:
            yield self._rows(LM_HEAD, [(LM_HEAD, tensor, vocabulary)])
        elif self.architecture.experts is not None:
            # SGLang ties the two only in its dense models.
            yield self._rows(LM_HEAD, [(EMBEDDING, tensor, vocabulary)])

    def _attention(self, prefix: str, tensor: int) -> Iterator[Buffer]:
        attention, head = prefix + "self_attn.", self.architecture.head_dim
        num_query = self._share(self.sizes.query_heads) * head
        yield self._whole(prefix + "input_layernorm.weight", prefix + "input_layernorm.weight")
        for kind in ("weight", "bias") if self.architecture.qkv_bias else ("weight",):
            yield self._rows(attention + "qkv_proj." + kind, self._qkv(attention, kind, tensor))
        if self.architecture.qk_norm:
            yield self._whole(attention + "q_norm.weight", attention + "q_norm.weight")
            yield self._whole(attention + "k_norm.weight", attention + "k_norm.weight")
        yield self._columns(attention + "o_proj.weight", attention + "o_proj.weight", tensor, num_query)
        yield self._whole(prefix + "post_attention_layernorm.weight", prefix + "post_attention_layernorm.weight")

    def _qkv(self, attention: str, kind: str, tensor: int) -> list[tuple[str, int, int]]:
        heads, size, head = self.sizes.key_value_heads, self.tensor_parallel, self.architecture.head_dim
        # A rank holds at least one key-value head: `replicas` neighbors share it.
        replicas, rows = max(1, size // heads), max(1, heads // size) * head
        query = (f"{attention}q_proj.{kind}", tensor, self._share(self.sizes.query_heads) * head)
        return [query, *((f"{attention}{name}_proj.{kind}", tensor // replicas, rows) for name in "kv")]

    def _mlp(self, prefix: str, tensor: int) -> Iterator[Buffer]:
        size = self._share(self.sizes.intermediate)
        parts = [(f"{prefix}{name}_proj.weight", tensor, size) for name in ("gate", "up")]
        yield self._rows(prefix + "gate_up_proj.weight", parts)
        yield self._columns(prefix + "down_proj.weight", prefix + "down_proj.weight", tensor, size)

    def _experts(self, prefix: str, tensor: int) -> Iterator[Buffer]:
        experts, cut = self.architecture.experts, self.tensor_parallel // self.expert_parallel
        assert experts is not None, "a layer with experts in a dense model"
        rank, index = divmod(tensor, cut)
        size, num_local = self.sizes.expert_intermediate // cut, experts.num_experts // self.expert_parallel
        real, hidden = min(experts.intermediate_size - index * size, size), self.architecture.hidden_size
        gate_up, down = prefix + "w13_weight", prefix + "w2_weight"
        # Offsets and shapes are the same for every expert; a large model would otherwise have a million such tuples.
        rows, columns = ((index * size, 0), (real, hidden)), ((0, index * size), (hidden, real))
        gate_up_shards: list[Shard] = []
        down_shards: list[Shard] = []
        for slot, names in enumerate(self._expert_names[prefix][rank * num_local : (rank + 1) * num_local]):
            if real > 0:
                gate_up_shards.append(Shard(names[0], *rows, gate_up, (slot, 0, 0)))
                gate_up_shards.append(Shard(names[1], *rows, gate_up, (slot, size, 0)))
                down_shards.append(Shard(names[2], *columns, down, (slot, 0, 0)))
        yield Buffer(gate_up, (num_local, 2 * size, hidden), tuple(gate_up_shards))
        yield Buffer(down, (num_local, hidden, size), tuple(down_shards))

    @cached_property
    def _expert_names(self) -> dict[str, list[tuple[str, str, str]]]:
        """Names of each expert's gate, up and down matrix, by the prefix of a layer's experts."""
        num_experts = self.architecture.experts.num_experts if self.architecture.experts else 0
        prefixes = [f"model.layers.{layer}.mlp.experts." for layer in range(self.architecture.num_layers)]
        return {
            prefix: [
                (f"{prefix}{e}.gate_proj.weight", f"{prefix}{e}.up_proj.weight", f"{prefix}{e}.down_proj.weight")
                for e in range(num_experts)
            ]
            for prefix in prefixes
        }

    def _share(self, size: int) -> int:
        return size // self.tensor_parallel


def _prefixed(prefix: str, buffer: Buffer) -> Buffer:
    if not prefix:
        return buffer
    name = prefix + buffer.name
    return Buffer(name, buffer.shape, tuple(shard._replace(local=name) for shard in buffer.shards))


def sglang_layout(
    architecture: ModelArchitecture,
    tensor_parallel: int,
    dtype: torch.dtype,
    num_engines: int = 1,
    *,
    expert_parallel: int = 1,
    device: str = "cuda",
) -> SglangLayout:
    """Return the layout of `num_engines` engines of `tensor_parallel` ranks each, all parameters in `dtype`.

    `device` of the engine is "cuda" or "cpu", on which SGLang pads differently. Raises ValueError if the engine would
    refuse the sizes.
    """
    if device not in ("cuda", "cpu"):
        raise ValueError(f"engine device {device!r}: choose one of cuda, cpu")
    if tensor_parallel < 1 or num_engines < 1:
        raise ValueError(f"engines: {num_engines} of {tensor_parallel} ranks; both must be at least 1")
    _check_experts(architecture, tensor_parallel, expert_parallel)
    if architecture.gemma3 is not None and not architecture.tie_word_embeddings:
        raise ValueError(
            "tie_word_embeddings is false, but SGLang computes the logits of a Gemma 3 with its embedding; it cannot serve "
            "this model"
        )
    sizes = (_cpu_sizes if device == "cpu" else _cuda_sizes)(architecture, tensor_parallel, expert_parallel)
    return SglangLayout(architecture, tensor_parallel, expert_parallel, dtype, num_engines, sizes)


def _check_experts(architecture: ModelArchitecture, tensor_parallel: int, expert_parallel: int) -> None:
    if expert_parallel < 1 or tensor_parallel % expert_parallel:
        raise ValueError(
            f"engine expert parallel size {expert_parallel} does not divide its tensor parallel size "
            f"{tensor_parallel}; choose a divisor"
        )
    if architecture.experts is not None and architecture.has_dense_layers:
        dense = architecture.num_layers - len(architecture.experts.layers)
        raise ValueError(
            f"{dense} of {architecture.num_layers} layers have no experts (mlp_only_layers, decoder_sparse_step), but "
            f"SGLang builds every layer of a {architecture.model_type} with experts; it cannot serve this model"
        )
    num_experts = architecture.experts.num_experts if architecture.experts else 0
    if expert_parallel > 1 and not num_experts:
        raise ValueError(f"engine expert parallel size {expert_parallel} needs a mixture-of-experts model")
    check_divides("engine expert", expert_parallel, "num_experts", num_experts)
