"""Layout of LoRA adapters (arXiv:2106.09685) next to a Megatron-core model: two matrices for each adapted matrix.

The Hugging Face matrix X.weight [out, in] gets X.lora_A.weight [r, in] and X.lora_B.weight [out, r], PEFT's names. Their
place follows from that of X: a rank with rows R and columns C of X holds columns C of lora_A and rows R of lora_B.

| local buffer of linear layer L | content |
|---|---|
| L.adapter.a [m r, columns of L] | lora_A of the m adapted matrices that L fuses (q, k, v; gate, up), one after another |
| L.adapter.b [rows of L, r] | lora_B in the order of L's rows; rows of matrices without an adapter are padding |
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

from megatron_dapo.checkpoints.layouts.computed import Buffer, ComputedLayout, RankContents, collect_buffers
from megatron_dapo.checkpoints.layouts.megatron import MegatronLayout
from megatron_dapo.models.architecture import EMBEDDING, ModelArchitecture
from megatron_dapo.models.lora import FUSED, LORA_A, LORA_B, WEIGHT, adapter_shapes, chosen_targets, matrix_name
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.reshard.layout import Shard, TensorSpec

ADAPTER = ".adapter."  # part of the local name of every adapter's buffer


class AdapterBuffers(NamedTuple):
    """The adapter of one linear layer on one rank."""

    layer: str  # local name of the linear layer, without ".weight"
    matrices: tuple[str, ...]  # adapted matrices that it fuses, without ".weight"
    a: Buffer
    b: Buffer


class LoraLayout(ComputedLayout):
    """Layout of the adapters of rank `lora_rank` for the matrices of `base` named `targets`, see `chosen_targets`."""

    def __init__(self, base: MegatronLayout, lora_rank: int, targets: Sequence[str]) -> None:
        self.base, self.lora_rank, self.targets = base, lora_rank, chosen_targets(base.tensors, targets)
        dtype = base.tensors[EMBEDDING].dtype  # the model's, of which few tensors differ
        shapes = adapter_shapes({name: spec.shape for name, spec in base.tensors.items()}, lora_rank, self.targets)
        super().__init__({name: TensorSpec(shape, dtype) for name, shape in shapes.items()})
        self._adapters_of: dict[Hashable, tuple[AdapterBuffers, ...]] = {}

    @property
    def architecture(self) -> ModelArchitecture:
        return self.base.architecture

    @property
    def parallel(self) -> ParallelLayout:
        return self.base.parallel

    @property
    def num_ranks(self) -> int:
        return self.base.num_ranks

    def adapters(self, rank: int) -> tuple[AdapterBuffers, ...]:
        """Return the adapters of a rank's linear layers, in model order."""
        key = self._replica_key(rank)
        if key not in self._adapters_of:
            self._adapters_of[key] = tuple(self._adapters(rank))
        return self._adapters_of[key]

    def _replica_key(self, rank: int) -> Hashable:
        return self.base._replica_key(rank)

    def _compute(self, rank: int) -> RankContents:
        [dtype] = {spec.dtype for spec in self.tensors.values()}
        return collect_buffers((buffer, dtype) for adapter in self.adapters(rank) for buffer in (adapter.a, adapter.b))

    def _adapters(self, rank: int) -> Iterator[AdapterBuffers]:
        for local, shards in shards_by_buffer(self.base.shards(rank)).items():
            layer, fused = local.removesuffix(WEIGHT), FUSED.get(matrix_name(local), ())
            if unknown := {matrix_name(shard.tensor) for shard in shards if local.endswith(WEIGHT)} & {*self.targets} - {*fused}:
                raise ValueError(
                    f"model.lora.targets names {min(unknown)}, whose layer {matrix_name(local)} takes no adapter; leave it out"
                )
            parent = shards[0].tensor.removesuffix(WEIGHT).rpartition(".")[0]
            # All of them, also those without a row on this rank: tensor ranks sum the gradients of equal buffers.
            fused_here = (f"{parent}.{name}" for name in fused if name in self.targets)
            matrices = tuple(name for name in fused_here if name + WEIGHT in self.base.tensors)
            if local.endswith(WEIGHT) and matrices:
                yield self._adapter(layer, matrices, shards, self.base.local_specs(rank)[local].shape)

    def _adapter(
        self, layer: str, matrices: tuple[str, ...], shards: list[Shard], shape: tuple[int, ...]
    ) -> AdapterBuffers:
        r, (rows, columns), first = self.lora_rank, shape, shards[0].global_offset[1]
        a, b = f"{layer}{ADAPTER}a", f"{layer}{ADAPTER}b"
        down = tuple(
            Shard(name + LORA_A, (0, first), (r, columns), a, (place * r, 0)) for place, name in enumerate(matrices)
        )
        up = tuple(
            Shard(name + LORA_B, (shard.global_offset[0], 0), (shard.shape[0], r), b, (shard.local_offset[0], 0))
            for shard in shards
            if (name := shard.tensor.removesuffix(WEIGHT)) in matrices
        )
        return AdapterBuffers(layer, matrices, Buffer(a, (len(matrices) * r, columns), down), Buffer(b, (rows, r), up))


def shards_by_buffer(shards: Collection[Shard]) -> Mapping[str, list[Shard]]:
    """Return the shards of each local buffer, in their order."""
    found: dict[str, list[Shard]] = {}
    for shard in shards:
        found.setdefault(shard.local, []).append(shard)
    return found

