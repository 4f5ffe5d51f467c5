"""Layout of a Megatron-core GPT model under TP x PP x VPP x EP: names, rows and padding of each Hugging Face tensor.

Local names are "{vp_stage}.{parameter path inside that model chunk}" with Transformer Engine's parameter names. Data-
and context-parallel ranks hold replicas, except of experts. See the table in `MegatronLayout`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from megatron_dapo.checkpoints.layouts.computed import (
    Buffer,
    ComputedLayout,
    RankContents,
    check_divides,
    collect_buffers,
)
from megatron_dapo.models.architecture import (
    EMBEDDING,
    FINAL_NORM,
    LANGUAGE_MODEL,
    LM_HEAD,
    ROUTER,
    VALUE_BIAS,
    VALUE_WEIGHT,
    ModelArchitecture,
)
from megatron_dapo.parallel.layout import ExpertCoordinates, ParallelLayout
from megatron_dapo.plan.memory import padded_vocabulary
from megatron_dapo.reshard.layout import Shard, TensorSpec
from megatron_dapo.reshard.slices import Slice, intersect


class MegatronLayout(ComputedLayout):
    """Layout of the actor's or critic's parameters, by tensor-parallel rank t of T:

    | local buffer | rows |
    |---|---|
    | embedding.word_embeddings, output_layer | rows [t V'/T, ...) of the vocabulary padded to V' |
    | linear_qkv | for each key-value head: its query heads, the key head, the value head; cut evenly into T |
    | linear_fc1 | [gate rows of t; up rows of t] |
    | linear_proj, linear_fc2 | columns of t |
    | norms, router | whole on every rank |
    | output_layer of a value head: weight [1, h], bias [1] | whole on every rank of the last pipeline stage |
    | experts.local_experts.i | expert e n + i (expert rank e holds n), cut as a dense MLP over expert_tensor ranks |

    Layers with experts have their norm as pre_mlp_layernorm, dense ones inside linear_fc1. Norms after attention and MLP
    (Gemma 3) are linear_proj.post_layernorm and linear_fc2.post_layernorm.
    With fewer key-value heads than T, linear_qkv is cut inside a head's group, as Megatron-core does (it gathers the
    activations). A tied model has a second copy of the embedding as output_layer on the last pipeline stage.
    """

    def __init__(
        self, architecture: ModelArchitecture, parallel: ParallelLayout, dtypes: Mapping[str, torch.dtype]
    ) -> None:
        _check_divisible(architecture, parallel)
        super().__init__({name: TensorSpec(shape, dtypes[name]) for name, shape in architecture.shapes().items()})
        self.architecture = architecture
        self.parallel = parallel

    @property
    def num_ranks(self) -> int:
        return self.parallel.world_size

    def _replica_key(self, rank: int) -> tuple[int, ...]:
        dense, experts = self.parallel.coordinates(rank), self.parallel.expert_coordinates(rank)
        key = (dense.tensor, dense.pipeline)
        return key if self.architecture.experts is None else (*key, experts.tensor, experts.expert)

    def _compute(self, rank: int) -> RankContents:
        dense, experts = self.parallel.coordinates(rank), self.parallel.expert_coordinates(rank)
        buffers = self._buffers(dense.tensor, dense.pipeline, experts)
        return collect_buffers((buffer, self._dtype_of(buffer)) for buffer in buffers)

    def _dtype_of(self, buffer: Buffer) -> torch.dtype:
        # A buffer without shards is all padding, which only vocabulary rows can be.
        dtypes = {self.tensors[shard.tensor].dtype for shard in buffer.shards} or {self.tensors[EMBEDDING].dtype}
        if len(dtypes) > 1:
            parts = sorted({f"{shard.tensor} {self.tensors[shard.tensor].dtype}" for shard in buffer.shards})
            raise ValueError(
                f"{buffer.name} fuses tensors of different types, which Megatron cannot hold: {', '.join(parts)}"
            )
        return dtypes.pop()

    def _buffers(self, tensor: int, pipeline: int, experts: ExpertCoordinates) -> Iterator[Buffer]:
        parallel, architecture = self.parallel, self.architecture
        last_stage = parallel.virtual_pipeline - 1
        for stage in range(parallel.virtual_pipeline):
            first_chunk = pipeline == 0 and stage == 0
            last_chunk = pipeline == parallel.pipeline - 1 and stage == last_stage
            # With virtual stages a rank has several chunks; only the outermost two have embedding and head.
            if first_chunk:
                yield self._vocabulary(f"{stage}.embedding.word_embeddings.weight", EMBEDDING, tensor)
            for index, layer in enumerate(parallel.layers_of(pipeline, stage, architecture.num_layers)):
                local, name = f"{stage}.decoder.layers.{index}.", f"model.layers.{layer}."
                yield from self._attention(local, name, tensor)
                if architecture.has_experts(layer):
                    yield from self._experts(local, name, experts)
                else:
                    yield from self._mlp(local, name, tensor)
            if last_chunk:
                yield self._whole(f"{stage}.decoder.final_layernorm.weight", FINAL_NORM)
                yield from self._head(f"{stage}.output_layer.", first_chunk, tensor)

    def _head(self, local: str, first_chunk: bool, tensor: int) -> Iterator[Buffer]:
        if self.architecture.head != LANGUAGE_MODEL:
            suffixes = {VALUE_WEIGHT: "weight", VALUE_BIAS: "bias"}
            yield from (self._whole(local + suffixes[name], name) for name in self.architecture.head_shapes())
        elif not self.architecture.tie_word_embeddings:
            yield self._vocabulary(local + "weight", LM_HEAD, tensor)
        elif not first_chunk:
            # On one chunk the output matrix is the embedding itself.
            yield self._vocabulary(local + "weight", EMBEDDING, tensor)

    def _attention(self, local: str, name: str, tensor: int) -> Iterator[Buffer]:
        attention, qkv = local + "self_attention.", local + "self_attention.linear_qkv."
        yield self._whole(qkv + "layer_norm_weight", name + "input_layernorm.weight")
        yield self._qkv(qkv + "weight", name + "self_attn.{}_proj.weight", tensor)
        if self.architecture.qkv_bias:
            yield self._qkv(qkv + "bias", name + "self_attn.{}_proj.bias", tensor)
        if self.architecture.qk_norm:
            yield self._whole(attention + "q_layernorm.weight", name + "self_attn.q_norm.weight")
            yield self._whole(attention + "k_layernorm.weight", name + "self_attn.k_norm.weight")
        yield self._row_parallel(
            attention + "linear_proj.weight", name + "self_attn.o_proj.weight", tensor, self.parallel.tensor
        )
        if self.architecture.gemma3 is not None:
            yield self._whole(attention + "linear_proj.post_layernorm.weight", name + "post_attention_layernorm.weight")

    def _mlp(self, local: str, name: str, tensor: int) -> Iterator[Buffer]:
        size, is_gemma3 = self.parallel.tensor, self.architecture.gemma3 is not None
        norm = "pre_feedforward_layernorm.weight" if is_gemma3 else "post_attention_layernorm.weight"
        yield self._whole(local + "mlp.linear_fc1.layer_norm_weight", name + norm)
        yield self._gate_up(local + "mlp.linear_fc1.weight", name + "mlp.", tensor, size)
        yield self._row_parallel(local + "mlp.linear_fc2.weight", name + "mlp.down_proj.weight", tensor, size)
        if is_gemma3:
            yield self._whole(
                local + "mlp.linear_fc2.post_layernorm.weight", name + "post_feedforward_layernorm.weight"
            )

    def _experts(self, local: str, name: str, coordinates: ExpertCoordinates) -> Iterator[Buffer]:
        assert self.architecture.experts is not None
        size = self.parallel.expert_tensor_size
        num_local = self.architecture.experts.num_experts // self.parallel.expert
        # With experts the norm cannot be fused into linear_fc1: the router reads its output first.
        yield self._whole(local + "pre_mlp_layernorm.weight", name + "post_attention_layernorm.weight")
        yield self._whole(local + "mlp.router.weight", name + ROUTER)
        for index in range(num_local):
            here = f"{local}mlp.experts.local_experts.{index}."
            there = f"{name}mlp.experts.{coordinates.expert * num_local + index}."
            yield self._gate_up(here + "linear_fc1.weight", there, coordinates.tensor, size)
            yield self._row_parallel(here + "linear_fc2.weight", there + "down_proj.weight", coordinates.tensor, size)

    def _row_parallel(self, local: str, name: str, index: int, count: int) -> Buffer:
        return self._columns(local, name, index, self.tensors[name].shape[1] // count)

    def _vocabulary(self, local: str, name: str, tensor: int) -> Buffer:
        size = self.parallel.tensor
        return self._rows(local, [(name, tensor, padded_vocabulary(self.tensors[name].shape[0], size) // size)])

    def _gate_up(self, local: str, prefix: str, index: int, count: int) -> Buffer:
        names = prefix + "gate_proj.weight", prefix + "up_proj.weight"
        return self._rows(local, [(name, index, self.tensors[name].shape[0] // count) for name in names])

    def _qkv(self, local: str, pattern: str, tensor: int) -> Buffer:
        """Return the rows of rank `tensor` of the interleaved matrix of all heads; a bias is a matrix without columns."""
        tail = self.tensors[pattern.format("q")].shape[1:]
        zeros = (0,) * len(tail)
        segments = list(_interleaved_rows(self.architecture))
        num_rows = sum(rows for _, _, rows in segments) // self.parallel.tensor
        mine = Slice((tensor * num_rows,), (num_rows,))
        shards, position = [], 0
        for projection, start, rows in segments:
            # The cut may go through a head, so a rank can hold any part of a segment.
            common = intersect(mine, Slice((position,), (rows,)))
            if common is not None:
                offset, size = common.offset[0], common.shape[0]
                source = (start + offset - position, *zeros)
                shards.append(
                    Shard(pattern.format(projection), source, (size, *tail), local, (offset - mine.offset[0], *zeros))
                )
            position += rows
        return Buffer(local, (num_rows, *tail), tuple(shards))


def _interleaved_rows(architecture: ModelArchitecture) -> Iterator[tuple[str, int, int]]:
    """Yield (projection, its first row, number of rows) in the order of Megatron's fused QKV."""
    head, ratio = architecture.head_dim, architecture.query_groups_ratio
    for group in range(architecture.num_key_value_heads):
        yield "q", group * ratio * head, ratio * head
        yield "k", group * head, head
        yield "v", group * head, head


def _check_divisible(architecture: ModelArchitecture, parallel: ParallelLayout) -> None:
    tensor, groups = parallel.tensor, architecture.num_key_value_heads
    check_divides("tensor", tensor, "num_attention_heads", architecture.num_attention_heads)
    if architecture.has_dense_layers:
        check_divides("tensor", tensor, "intermediate_size", architecture.intermediate_size)
    if groups % tensor and tensor % groups:
        raise ValueError(
            f"tensor parallel size {tensor} is neither a multiple nor a divisor of num_key_value_heads {groups}, "
            "which Megatron-core needs"
        )
    # Megatron cuts the fused QKV evenly by rows, not by heads.
    rows = (architecture.num_attention_heads + 2 * groups) * architecture.head_dim
    check_divides("tensor", tensor, "the rows of the fused QKV", rows)
    experts = architecture.experts
    if experts is not None:
        check_divides("expert", parallel.expert, "num_experts", experts.num_experts)
        check_divides("expert tensor", parallel.expert_tensor_size, "moe_intermediate_size", experts.intermediate_size)
    elif parallel.expert > 1:
        raise ValueError(
            f"expert parallel size {parallel.expert} needs a mixture-of-experts model; {architecture.model_type} is dense"
        )
    parallel.layers_of(0, 0, architecture.num_layers)  # raises if the layers do not split


def megatron_layout(
    architecture: ModelArchitecture, parallel: ParallelLayout, dtype: torch.dtype | Mapping[str, torch.dtype]
) -> MegatronLayout:
    """Return the layout of the model's parameters under `parallel`; `dtype`: one for all, or by Hugging Face name.

    Raises ValueError if the sizes do not divide the model.
    """
    # Checkpoints may mix types; a trainer holds all parameters in a single type.
    if isinstance(dtype, torch.dtype):
        dtype = dict.fromkeys(architecture.shapes(), dtype)
    return MegatronLayout(architecture, parallel, dtype)
