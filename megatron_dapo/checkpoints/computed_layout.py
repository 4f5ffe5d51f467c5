"""The shell of a layout that is arithmetic: a rank's pieces and buffers, computed when somebody asks, kept by place.

Ranks of one place in a model (replicas) hold the same and share one tuple of pieces, as planners want.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping
from typing import NamedTuple

import torch

from megatron_dapo.reshard.layout import Shard, TensorSpec


class Buffer(NamedTuple):
    """One local buffer, and the pieces of global tensors in it. What no piece fills is padding."""

    name: str
    shape: tuple[int, ...]
    shards: tuple[Shard, ...]


class Held(NamedTuple):
    """What a rank holds: pieces of global tensors, and its local buffers in model order."""

    shards: tuple[Shard, ...]
    specs: Mapping[str, TensorSpec]


class ComputedLayout(ABC):
    """A `Layout` with the shape and type of every local buffer. A layout says how many ranks it has (`num_ranks`), what
    is the same among them (`_place`) and what a rank of such a place holds (`_hold`)."""

    def __init__(self, tensors: Mapping[str, TensorSpec]) -> None:
        self.tensors = tensors
        self._held: dict[Hashable, Held] = {}

    @property
    @abstractmethod
    def num_ranks(self) -> int: ...

    @abstractmethod
    def _place(self, rank: int) -> Hashable:
        """Equal for ranks that hold the same."""

    @abstractmethod
    def _hold(self, rank: int) -> Held: ...

    def shards(self, rank: int) -> tuple[Shard, ...]:
        return self._at(rank).shards

    def buffer_names(self, rank: int) -> frozenset[str]:
        return frozenset(self.local_specs(rank))

    def local_specs(self, rank: int) -> Mapping[str, TensorSpec]:
        """Shape and dtype of every local buffer of a rank, in model order."""
        return self._at(rank).specs

    def local_shapes(self, rank: int) -> dict[str, tuple[int, ...]]:
        return {name: spec.shape for name, spec in self.local_specs(rank).items()}

    def _at(self, rank: int) -> Held:
        assert 0 <= rank < self.num_ranks, f"rank {rank} outside {self.num_ranks}"
        place = self._place(rank)
        if place not in self._held:
            self._held[place] = self._hold(rank)
        return self._held[place]


def whole_tensor(name: str, shape: tuple[int, ...], local: str) -> Buffer:
    """A buffer that is one tensor."""
    zeros = (0,) * len(shape)
    return Buffer(local, shape, (Shard(name, zeros, shape, local, zeros),))


def held(buffers: Iterable[tuple[Buffer, torch.dtype]]) -> Held:
    """Of buffers and their types."""
    pieces: list[Shard] = []
    specs: dict[str, TensorSpec] = {}
    for buffer, dtype in buffers:
        pieces += buffer.shards
        specs[buffer.name] = TensorSpec(buffer.shape, dtype)
    return Held(tuple(pieces), specs)
