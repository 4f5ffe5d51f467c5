"""Values of LoRA adapters: their start, and their sum with the weights they belong to."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch

from megatron_dapo.checkpoints.formats.peft import PeftAdapters
from megatron_dapo.checkpoints.layouts.lora import LoraLayout, shards_by_buffer
from megatron_dapo.checkpoints.load import WeightLoadReport, fill, seeded_generator
from megatron_dapo.models.lora import LORA_A, LORA_B, WEIGHT
from megatron_dapo.reshard.execution import Buffers
from megatron_dapo.reshard.layout import ComputedBuffers, Shard, SingleHolderLayout, TensorSpec, shard_view, slice_view
from megatron_dapo.reshard.slices import Slice


def initialize_adapters(seed: int, layout: LoraLayout, rank: int, parameters: Buffers) -> WeightLoadReport:
    """Fill the adapters of `rank` as PEFT does: lora_A uniform in +-1 / sqrt(inputs), lora_B zero.

    The values depend only on the seed and the name, so every layout starts from the same adapters.
    """
    specs = {name: TensorSpec(spec.shape, torch.float32) for name, spec in layout.tensors.items()}
    return fill(SingleHolderLayout(specs, layout.num_ranks), _FreshAdapters(seed), layout, rank, parameters)


def load_adapters(directory: Path, layout: LoraLayout, rank: int, parameters: Buffers) -> WeightLoadReport:
    """Fill the adapters of `rank` from a PEFT directory. Raises ValueError if it does not fit the layout."""
    with PeftAdapters(directory) as stored:
        stored.check(layout.architecture.shapes(), layout.targets)
        report = fill(SingleHolderLayout(stored.specs, layout.num_ranks), stored, layout, rank, parameters)
    if not all(bool(torch.isfinite(buffer.sum())) for buffer in parameters.values()):
        raise ValueError(f"{directory}: some of its elements are not numbers: take another copy of the adapters")
    return report


class _FreshAdapters:
    """`ShardReader` of adapters before training."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def read(self, rank: int, shard: Shard, bounds: Slice, out: torch.Tensor) -> None:
        """Copy `bounds` of a fresh tensor to `out`."""
        if shard.tensor.endswith(LORA_B):
            out.zero_()
        else:
            out.copy_(slice_view(fresh_lora_a(self._seed, shard.tensor, shard.shape), bounds))


def fresh_lora_a(seed: int, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return lora_A [r, inputs] before training, fp32."""
    bound = 1 / math.sqrt(shape[1])  # kaiming_uniform_ with a = sqrt(5)
    return torch.empty(shape).uniform_(-bound, bound, generator=seeded_generator(seed, name))


class MergedWeights(ComputedBuffers):
    """The buffers of a rank's base layout with W + scale B A in place of each adapted W, in the type of W.

    Sums are fp32 and rounded once. Only what is read is computed, so the model is never copied as a whole.
    """

    def __init__(self, layout: LoraLayout, rank: int, parameters: Buffers, scale: float) -> None:
        """`parameters`: this rank's buffers, base and adapters, by local name."""
        self._parameters, self._scale = parameters, scale
        self._names = tuple(layout.base.local_specs(rank))
        self._adapters = {f"{each.layer}{WEIGHT}": each for each in layout.adapters(rank)}
        self._shards = shards_by_buffer(layout.base.shards(rank))

    def __getitem__(self, name: str) -> torch.Tensor:
        values = self._parameters[name]
        if name not in self._adapters:
            return values
        merged = values.clone()
        for shard in self._shards[name]:
            shard_view(merged, shard).copy_(self.chunk(shard, shard.bounds))
        return merged

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def chunk(self, shard: Shard, bounds: Slice) -> torch.Tensor:
        """See `ComputedBuffers.chunk`."""
        values = shard_view(self._parameters[shard.local], shard, bounds)
        adapter, matrix = self._adapters.get(shard.local), shard.tensor.removesuffix(WEIGHT)
        if adapter is None or matrix not in adapter.matrices:
            return values
        down = next(each for each in adapter.a.shards if each.tensor == matrix + LORA_A)
        up = next(
            each
            for each in adapter.b.shards
            if each.tensor == matrix + LORA_B and each.global_offset[0] == shard.global_offset[0]
        )
        (row, column), (rows, columns) = bounds
        r = down.shape[0]
        a = shard_view(self._parameters[down.local], down, Slice((0, column), (r, columns)))
        b = shard_view(self._parameters[up.local], up, Slice((row, 0), (rows, r)))
        return torch.addmm(values.float(), b.float(), a.float(), alpha=self._scale).to(values.dtype)

