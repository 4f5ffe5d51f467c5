"""Base class of layouts that follow from sizes: a rank's shards and buffers are computed on first use and cached."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from megatron_dapo.models.placement import CutColumns, Interleaved, Stack, Whole
from megatron_dapo.reshard.layout import Shard, TensorSpec
from megatron_dapo.reshard.slices import Slice, intersect


class Buffer(NamedTuple):
    """One local buffer and the shards of global tensors in it. Elements that no shard covers are padding."""

    name: str
    shape: tuple[int, ...]
    shards: tuple[Shard, ...]


class RankContents(NamedTuple):
    """Shards of global tensors on one rank, and its local buffers in model order."""

    shards: tuple[Shard, ...]
    specs: Mapping[str, TensorSpec]


class ComputedLayout(ABC):
    """A `Layout` that also knows shape and type of every local buffer.

    A subclass defines the number of ranks, a key that replicas of a model share, and the contents of a rank.
    """

    def __init__(self, tensors: Mapping[str, TensorSpec]) -> None:
        self.tensors = tensors
        # One entry per key, not per rank: planners recognize replicas by the identity of their tuple of shards.
        self._contents_of: dict[Hashable, RankContents] = {}

    @property
    @abstractmethod
    def num_ranks(self) -> int:
        """Number of ranks, replicas included."""

    @abstractmethod
    def _replica_key(self, rank: int) -> Hashable:
        """Return a key that is equal for ranks with equal contents."""

    @abstractmethod
    def _compute(self, rank: int) -> RankContents: ...

    def shards(self, rank: int) -> tuple[Shard, ...]:
        return self._contents(rank).shards

    def buffer_names(self, rank: int) -> frozenset[str]:
        return frozenset(self.local_specs(rank))

    def local_specs(self, rank: int) -> Mapping[str, TensorSpec]:
        """Return shape and dtype of every local buffer of a rank, in model order."""
        return self._contents(rank).specs

    def local_shapes(self, rank: int) -> dict[str, tuple[int, ...]]:
        return {name: spec.shape for name, spec in self.local_specs(rank).items()}

    def _contents(self, rank: int) -> RankContents:
        assert 0 <= rank < self.num_ranks, f"rank {rank} outside {self.num_ranks}"
        key = self._replica_key(rank)
        if key not in self._contents_of:
            self._contents_of[key] = self._compute(rank)
        return self._contents_of[key]

    def _whole(self, local: str, name: str) -> Buffer:
        """Return a buffer `local` that is tensor `name`."""
        shape = self.tensors[name].shape
        zeros = (0,) * len(shape)
        return Buffer(local, shape, (Shard(name, zeros, shape, local, zeros),))

    def _placed(
        self, placement: Whole | Stack | Interleaved | CutColumns, local: str, name: str, index: int, count: int
    ) -> Buffer:
        """Return rank `index` of `count`'s buffer of a placement whose names follow the prefixes `local` and `name`."""
        if isinstance(placement, Whole):
            return self._whole(local + placement.local, name + placement.name)
        if isinstance(placement, CutColumns):
            columns = placement.columns
            return self._columns(local + placement.local, name + columns.name, *columns.share(index, count))
        if isinstance(placement, Stack):
            stacked = [
                (name + part.name, *piece, part.end) for part in placement.parts for piece in part.pieces(index, count)
            ]
            return self._rows(local + placement.local, stacked)
        return self._interleaved(placement, local + placement.local, name, index, count)

    def _columns(self, local: str, name: str, first: int, width: int) -> Buffer:
        """Return columns [first, +width) of matrix `name`; those beyond it are padding."""
        rows, columns = self.tensors[name].shape
        real = min(columns - first, width)
        # The last ranks of a padded size may have only padding.
        shards = (Shard(name, (0, first), (rows, real), local, (0, 0)),) if real > 0 else ()
        return Buffer(local, (rows, width), shards)

    def _rows(self, local: str, stacked: Sequence[tuple[str, int, int, int | None]]) -> Buffer:
        """Return a buffer that stacks rows [first, +rows) of each (tensor, first, rows, end); rows beyond the end, which is
        the tensor's if None, are padding. A bias is a matrix without columns."""
        tail = self.tensors[stacked[0][0]].shape[1:]
        zeros = (0,) * len(tail)
        shards, position = [], 0
        for name, first, rows, end in stacked:
            real = min((self.tensors[name].shape[0] if end is None else end) - first, rows)
            if real > 0:
                shards.append(Shard(name, (first, *zeros), (real, *tail), local, (position, *zeros)))
            position += rows
        return Buffer(local, (position, *tail), tuple(shards))

    def _interleaved(self, placement: Interleaved, local: str, name: str, index: int, count: int) -> Buffer:
        tail = self.tensors[name + placement.unit[0].name].shape[1:]
        zeros = (0,) * len(tail)
        num_rows = placement.units * sum(part.block for part in placement.unit) // count
        mine = Slice((index * num_rows,), (num_rows,))
        shards, position = [], 0
        for unit in range(placement.units):
            for part in placement.unit:
                # The cut may go through a unit, so a rank can hold any of its rows.
                common = intersect(mine, Slice((position,), (part.block,)))
                if common is not None:
                    offset, size = common.offset[0], common.shape[0]
                    source = (part.start + unit * (part.stride or part.block) + offset - position, *zeros)
                    place = (offset - mine.offset[0], *zeros)
                    shards.append(Shard(name + part.name, source, (size, *tail), local, place))
                position += part.block
        return Buffer(local, (num_rows, *tail), tuple(shards))


def collect_buffers(buffers: Iterable[tuple[Buffer, torch.dtype]]) -> RankContents:
    shards: list[Shard] = []
    specs: dict[str, TensorSpec] = {}
    for buffer, dtype in buffers:
        shards += buffer.shards
        specs[buffer.name] = TensorSpec(buffer.shape, dtype)
    return RankContents(tuple(shards), specs)
