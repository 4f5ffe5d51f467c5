"""Layout of a Megatron-core GPT model under TP x PP x VPP x EP: names, rows and padding of each Hugging Face tensor.

Local names are "{vp_stage}.{parameter path inside that model chunk}" with Transformer Engine's parameter names. Data-
and context-parallel ranks hold replicas, except of experts. See the table in `MegatronLayout`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from megatron_dapo.checkpoints.layouts.computed import Buffer, ComputedLayout, RankContents, collect_buffers
from megatron_dapo.models.architecture import (
    EMBEDDING,
    FINAL_NORM,
    LANGUAGE_MODEL,
    LM_HEAD,
    VALUE_BIAS,
    VALUE_WEIGHT,
    ModelArchitecture,
)
from megatron_dapo.models.placement import PerExpert, StackedExperts, check_cut, check_divides
from megatron_dapo.parallel.layout import ExpertCoordinates, ParallelLayout
from megatron_dapo.plan.memory import padded_vocabulary
from megatron_dapo.reshard.layout import TensorSpec


class MegatronLayout(ComputedLayout):
    """Layout of the actor's or critic's parameters, by tensor-parallel rank t of T:

    | local buffer | rows |
    |---|---|
    | embedding.word_embeddings, output_layer | rows [t V'/T, ...) of the vocabulary padded to V' |
    | decoder.layers.i | what the layer's parts say (`LayerPart.megatron`), cut over T |
    | output_layer of a value head: weight [1, h], bias [1] | whole on every rank of the last pipeline stage |
    | experts.local_experts.i | expert e n + i (expert rank e holds n), cut as a dense MLP over expert_tensor ranks |

    A tied model has a second copy of the embedding as output_layer on the last pipeline stage.
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
                yield from self._layer(layer, local, name, tensor, experts)
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

    def _layer(self, layer: int, local: str, name: str, tensor: int, experts: ExpertCoordinates) -> Iterator[Buffer]:
        for part in self.architecture.parts(layer):
            for placement in part.megatron():
                if isinstance(placement, PerExpert):
                    yield from self._experts(placement, local, name, experts)
                else:
                    assert not isinstance(placement, StackedExperts), f"{placement.local} is SGLang's"
                    yield self._placed(placement, local, name, tensor, self.parallel.tensor)

    def _experts(self, placement: PerExpert, local: str, name: str, coordinates: ExpertCoordinates) -> Iterator[Buffer]:
        num_local = placement.num_experts // self.parallel.expert
        for index in range(num_local):
            here = local + placement.local.format(index)
            there = name + placement.name.format(coordinates.expert * num_local + index)
            for one in placement.placements:
                yield self._placed(one, here, there, coordinates.tensor, self.parallel.expert_tensor_size)

    def _vocabulary(self, local: str, name: str, tensor: int) -> Buffer:
        size = self.parallel.tensor
        rows = padded_vocabulary(self.tensors[name].shape[0], size) // size
        return self._rows(local, [(name, tensor * rows, rows, None)])


def _check_divisible(architecture: ModelArchitecture, parallel: ParallelLayout) -> None:
    for part in (part for parts in architecture.kinds_of_layers for part in parts):
        placements = list(part.megatron())
        check_cut("tensor", parallel.tensor, placements, "Megatron-core")
        for experts in placements:
            if isinstance(experts, PerExpert):
                check_divides("expert", parallel.expert, "num_experts", experts.num_experts)
                check_cut("expert tensor", parallel.expert_tensor_size, experts.placements, "Megatron-core")
    if architecture.experts is None and parallel.expert > 1:
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
    # Checkpoints may mix types; a trainer holds nearly all parameters in a single type.
    if isinstance(dtype, torch.dtype):
        one = dtype
        dtype = {name: torch.float32 if architecture.is_float32(name) else one for name in architecture.shapes()}
    return MegatronLayout(architecture, parallel, dtype)
