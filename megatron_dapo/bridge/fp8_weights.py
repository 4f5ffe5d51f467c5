"""The trainer's parameters in an FP8 engine's format, quantized chunk by chunk while buckets are filled.

Rounding uses `ops.fp8`, as in the trainer: a block has the same multiplier and values whichever ranks hold its parts.
Scales are computed when an `Fp8Weights` is made (4 bytes per 16,384 values), values when a chunk is read, a few MiB at
a time. The model is never copied as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from megatron_dapo.checkpoints.layouts.fp8 import KV_SCALE_VALUE, SCALES, Fp8SourceLayout, block_slice
from megatron_dapo.ops.fp8 import BLOCK, E4M3, block_multiplier
from megatron_dapo.reshard.execution import Buffers
from megatron_dapo.reshard.layout import ComputedBuffers, Shard, shard_view
from megatron_dapo.reshard.slices import Slice

# Replaces every element in place by its maximum over all trainer ranks.
LargestOverRanks = Callable[[torch.Tensor], None]
_CHUNK_ELEMENTS = 1 << 20


def single_rank(magnitudes: torch.Tensor) -> None:
    """`LargestOverRanks` for a single process."""


class Fp8Weights(ComputedBuffers):
    """`Buffers` of the shards of an `Fp8SourceLayout` on one rank, with the current weights.

    If blocks are cut between ranks, construction is collective: every rank makes one at the same time. `chunk` returns
    a part without building the whole buffer; this is how buckets are filled.
    """

    def __init__(
        self, layout: Fp8SourceLayout, rank: int, parameters: Buffers, largest: LargestOverRanks = single_rank
    ) -> None:
        self.layout = layout
        self._rank = rank
        self._parameters = parameters
        self._touched = layout.touched(rank)
        self._shards: dict[str, list[Shard]] = {}  # buffer -> its quantized shards
        for shard in layout.trainer.shards(rank):
            if shard.tensor in layout.quantized:
                self._shards.setdefault(shard.local, []).append(shard)
        self._multipliers = {n: block_multiplier(m) for n, m in self._magnitudes(largest).items()}

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self._shards:
            # Rows of tensors that stay as they are have no e4m3 values: a delta net's beta and alpha.
            values = torch.zeros_like(self._parameters[name], dtype=E4M3)
            for shard in self._shards[name]:
                shard_view(values, shard).copy_(self.chunk(shard, shard.bounds))
            return values
        if name in self._parameters:
            return self._parameters[name]
        if name in self.layout.constants:
            return torch.full((), KV_SCALE_VALUE)
        if name.endswith(SCALES) and name.removesuffix(SCALES) in self._multipliers:
            return self._multipliers[name.removesuffix(SCALES)].reciprocal()
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self.layout.buffer_names(self._rank)))

    def __len__(self) -> int:
        return len(self.layout.buffer_names(self._rank))

    def chunk(self, shard: Shard, bounds: Slice) -> torch.Tensor:
        """Return global slice `bounds` of `shard` as it is sent."""
        if shard.local not in self._parameters:
            return shard_view(self[shard.local], shard, bounds)
        values = shard_view(self._parameters[shard.local], shard, bounds)
        if shard.tensor not in self.layout.quantized:
            return values
        quantized = torch.empty(values.shape, dtype=E4M3, device=values.device)
        for rows, factors in self._factors(shard.tensor, bounds, values.device):
            _times(values[rows], factors, bounds.offset[1], quantized[rows])
        return quantized

    def widened_chunk(self, shard: Shard, bounds: Slice) -> torch.Tensor:
        """Return the values the engine computes with in place of `bounds`: quantized values times scales, float32."""
        quantized = self.chunk(shard, bounds)
        widened = torch.empty(quantized.shape, dtype=torch.float32, device=quantized.device)
        for rows, factors in self._factors(shard.tensor, bounds, quantized.device):
            _times(quantized[rows], factors.reciprocal(), bounds.offset[1], widened[rows])
        return widened

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the trainer's parameters the engine's values inside the context, and restore them bit for bit after it.

        Needs host memory for one copy of this rank's quantized parameters.
        """
        own = {name: self._parameters[name].detach().to("cpu", copy=True) for name in self._shards}
        try:
            with torch.no_grad():
                for name, shards in self._shards.items():
                    for shard in shards:
                        widened = self.widened_chunk(shard, shard.bounds)
                        shard_view(self._parameters[name], shard).copy_(widened)
            yield
        finally:
            with torch.no_grad():
                for name, values in own.items():
                    self._parameters[name].detach().copy_(values)

    def _factors(self, tensor: str, bounds: Slice, device: torch.device) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield row ranges of a slice, relative to its start, and multipliers of the rows' blocks [rows, blocks]."""
        table, touched, wanted = self._multipliers[tensor], self._touched[tensor], block_slice(*bounds)
        first = wanted.offset[1] - touched.offset[1]
        table = table[:, first : first + wanted.shape[1]].to(device)
        step = max(1, _CHUNK_ELEMENTS // max(1, bounds.shape[1]))
        for start in range(0, bounds.shape[0], step):
            stop = min(start + step, bounds.shape[0])
            numbers = torch.arange(bounds.offset[0] + start, bounds.offset[0] + stop, device=device) // BLOCK
            yield slice(start, stop), table[numbers - touched.offset[0]]

    def _magnitudes(self, largest: LargestOverRanks) -> dict[str, torch.Tensor]:
        """Return the largest magnitude over all ranks, for each block that this rank holds part of."""
        found: dict[str, torch.Tensor] = {}
        for local, shards in self._shards.items():
            for shard in shards:
                table = torch.zeros(self._touched[shard.tensor].shape, device=self._parameters[local].device)
                self._add_magnitudes(shard, found.setdefault(shard.tensor, table))
        if self.layout.shared:
            self._exchange(found, largest)
        return found

    def _add_magnitudes(self, shard: Shard, table: torch.Tensor) -> None:
        values = shard_view(self._parameters[shard.local], shard)
        row, column = shard.global_offset
        touched = self._touched[shard.tensor]
        first = column // BLOCK - touched.offset[1]
        step = max(1, _CHUNK_ELEMENTS // max(1, shard.shape[1]))
        for start in range(0, shard.shape[0], step):
            largest = _blocks(values[start : start + step].abs(), column).amax(dim=2).float()
            numbers = torch.arange(row + start, row + start + largest.shape[0], device=values.device) // BLOCK
            columns = table[:, first : first + largest.shape[1]]
            index = (numbers - touched.offset[0])[:, None].expand_as(largest)
            columns.scatter_reduce_(0, index, largest, "amax")

    def _exchange(self, found: dict[str, torch.Tensor], largest: LargestOverRanks) -> None:
        """Make blocks shared by several ranks agree on all of them."""
        whole = {name: torch.zeros(self.layout.tensors[name + SCALES].shape) for name in self.layout.shared}
        mine = {name: found[name] for name in whole if name in found}
        for name, magnitudes in mine.items():
            _inside(whole[name], self._touched[name]).copy_(magnitudes)
        vector = torch.cat([table.flatten() for table in whole.values()])
        largest(vector)
        for (name, table), values in zip(whole.items(), vector.split([table.numel() for table in whole.values()])):
            if name in mine:
                mine[name].copy_(_inside(values.view(table.shape), self._touched[name]))


def _inside(table: torch.Tensor, bounds: Slice) -> torch.Tensor:
    (row, column), (rows, columns) = bounds
    return table[row : row + rows, column : column + columns]


def _blocks(values: torch.Tensor, column: int) -> torch.Tensor:
    """Return rows starting at `column` of the tensor as [rows, blocks, 128], zero-padded."""
    before = column % BLOCK
    behind = -(before + values.shape[1]) % BLOCK
    if before or behind:
        values = torch.nn.functional.pad(values, (before, behind))
    return values.unflatten(1, (-1, BLOCK))


def _times(values: torch.Tensor, factors: torch.Tensor, column: int, out: torch.Tensor) -> None:
    """Write each value times its block's factor to `out`: computed in float32, rounded to the type of `out`."""
    before = column % BLOCK
    product = (_blocks(values.float(), column) * factors[..., None]).flatten(1)
    out.copy_(product[:, before : before + values.shape[1]])
