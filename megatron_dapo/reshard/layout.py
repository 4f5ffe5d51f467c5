"""Layouts: which slice of which global tensor lives where on which rank.

Everything that moves tensors (weight sync, converters, checkpoints, critic initialization) combines a pair of
layouts, the plan between them (planner) and a transport (executors). A layout is arithmetic: a laptop can compute rank
731 of 1024.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import NamedTuple, Protocol

import torch

from megatron_dapo.reshard.slices import Coordinates, Slice, uncovered, whole


class TensorSpec(NamedTuple):
    """Shape and element type of a global tensor or of a local buffer."""

    shape: Coordinates
    dtype: torch.dtype

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class Shard(NamedTuple):
    """Slice [global_offset, +shape) of global tensor `tensor` is held in the local buffer `local`.

    If `local_offset` has as many numbers as the slice has dimensions, the shard is the slice [local_offset, +shape) of
    the buffer. If it has more, the first ones index a buffer with more dimensions (one expert of a stack). If it has
    one number and the slice has more dimensions, the shard is contiguous in row-major order, starting at that element
    of the flat buffer (ZeRO ranges).
    """

    tensor: str
    global_offset: Coordinates
    shape: Coordinates
    local: str
    local_offset: Coordinates

    @property
    def bounds(self) -> Slice:
        """The slice of the global tensor."""
        return Slice(self.global_offset, self.shape)


class Layout(Protocol):
    """Location of every element of some global tensors. Ranks with equal contents should share one tuple of shards."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks, including those that hold nothing."""

    @property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """The global tensors by name."""

    def shards(self, rank: int) -> tuple[Shard, ...]:
        """Return the shards that a rank holds."""

    def buffer_names(self, rank: int) -> frozenset[str]:
        """Return the local buffers of a rank, including those with only padding."""


class ReplicatedLayout:
    """Every rank holds every tensor whole, in a buffer of the tensor's name."""

    def __init__(self, tensors: Mapping[str, TensorSpec], num_ranks: int) -> None:
        self.tensors = dict(tensors)
        self.num_ranks = num_ranks
        self._shards = _whole_shards(tensors)

    def shards(self, rank: int) -> tuple[Shard, ...]:
        assert 0 <= rank < self.num_ranks, f"rank {rank} outside {self.num_ranks}"
        return self._shards

    def buffer_names(self, rank: int) -> frozenset[str]:
        return frozenset(self.tensors)


class SingleHolderLayout:
    """One rank of `num_ranks` holds every tensor whole: a checkpoint directory, or the rank that writes one."""

    def __init__(self, tensors: Mapping[str, TensorSpec], num_ranks: int = 1, holder: int = 0) -> None:
        assert 0 <= holder < num_ranks, f"holder {holder} outside {num_ranks} ranks"
        self.tensors = dict(tensors)
        self.num_ranks = num_ranks
        self.holder = holder
        self._shards = _whole_shards(tensors)

    def shards(self, rank: int) -> tuple[Shard, ...]:
        assert 0 <= rank < self.num_ranks, f"rank {rank} outside {self.num_ranks}"
        return self._shards if rank == self.holder else ()

    def buffer_names(self, rank: int) -> frozenset[str]:
        return frozenset(self.tensors if rank == self.holder else ())


class ShiftedLayout:
    """Rank r of `layout` is rank r + `offset` of this one, lower ranks hold nothing: engines next to the trainer."""

    def __init__(self, layout: Layout, offset: int) -> None:
        assert offset >= 0, f"offset {offset} is negative"
        self.layout = layout
        self.offset = offset
        self.tensors = layout.tensors

    @property
    def num_ranks(self) -> int:
        return self.offset + self.layout.num_ranks

    def shards(self, rank: int) -> tuple[Shard, ...]:
        return self.layout.shards(rank - self.offset) if rank >= self.offset else ()

    def buffer_names(self, rank: int) -> frozenset[str]:
        return self.layout.buffer_names(rank - self.offset) if rank >= self.offset else frozenset()


class PartialLayout:
    """`layout` with only some ranks filled: the others hold nothing here and are filled in another way."""

    def __init__(self, layout: Layout, ranks: Collection[int]) -> None:
        self.layout = layout
        self.ranks = ranks
        self.tensors = layout.tensors
        self.num_ranks = layout.num_ranks

    def shards(self, rank: int) -> tuple[Shard, ...]:
        return self.layout.shards(rank) if rank in self.ranks else ()

    def buffer_names(self, rank: int) -> frozenset[str]:
        return self.layout.buffer_names(rank) if rank in self.ranks else frozenset()


def _whole_shards(tensors: Mapping[str, TensorSpec]) -> tuple[Shard, ...]:
    return tuple(
        Shard(name, (0,) * len(spec.shape), tuple(spec.shape), name, (0,) * len(spec.shape))
        for name, spec in tensors.items()
    )


def check_layout(layout: Layout) -> None:
    """Raise ValueError unless every shard is inside its tensor and every element of every tensor is on some rank."""
    slices: dict[str, dict[Slice, None]] = {name: {} for name in layout.tensors}
    for rank in range(layout.num_ranks):
        for shard in layout.shards(rank):
            _check_piece(shard, layout.tensors, rank)
            slices[shard.tensor][shard.bounds] = None
    for name, spec in layout.tensors.items():
        holes = uncovered(whole(spec.shape), slices[name])
        if holes:
            raise ValueError(
                f"layout: {sum(h.volume for h in holes)} of {spec.num_elements} elements of {name!r} "
                f"{tuple(spec.shape)} live on no rank, first hole {holes[0]}"
            )


def _check_piece(shard: Shard, tensors: Mapping[str, TensorSpec], rank: int) -> None:
    if shard.tensor not in tensors:
        raise ValueError(f"layout: rank {rank} holds a shard of {shard.tensor!r}, which is not a tensor of this layout")
    shape = tensors[shard.tensor].shape
    same_dims = len(shard.shape) == len(shard.global_offset) == len(shape)
    if not same_dims or any(o < 0 or o + n > size for o, n, size in zip(shard.global_offset, shard.shape, shape)):
        raise ValueError(f"layout: shard {shard.bounds} of rank {rank} is not inside {shard.tensor!r} {tuple(shape)}")


def _is_flat(shard: Shard) -> bool:
    return len(shard.local_offset) == 1 < len(shard.shape)


def local_slice(shard: Shard, bounds: Slice | None = None) -> Slice:
    """Return the slice of the local buffer with `shard`, or only with its global slice `bounds`. Not for flat
    shards."""
    assert not _is_flat(shard), f"{shard} is a flat range, not a slice of its buffer"
    inner = shard.bounds if bounds is None else bounds
    lead = len(shard.local_offset) - len(shard.shape)
    place = shard.local_offset[lead:]
    offset = tuple(at + start - base for at, start, base in zip(place, inner.offset, shard.global_offset))
    return Slice((*shard.local_offset[:lead], *offset), ((1,) * lead + tuple(inner.shape)))


def shard_view(buffer: torch.Tensor, shard: Shard, bounds: Slice | None = None) -> torch.Tensor:
    """Return a view of the part of local `buffer` that holds `shard`, or only of the shard's global slice `bounds`."""
    view = _flat_view(buffer, shard) if _is_flat(shard) else _slice_of_buffer(buffer, shard)
    if bounds is None:
        return view
    relative = tuple(start - base for start, base in zip(bounds.offset, shard.global_offset))
    return slice_view(view, Slice(relative, bounds.shape))


class ComputedBuffers(Mapping[str, torch.Tensor]):
    """Local buffers by name whose values are computed when they are read, e.g. quantized ones."""

    @abstractmethod
    def chunk(self, shard: Shard, bounds: Slice) -> torch.Tensor:
        """Return global slice `bounds` of `shard`, without building the whole buffer."""


def read_shard(buffers: Mapping[str, torch.Tensor], shard: Shard, bounds: Slice) -> torch.Tensor:
    """Return global slice `bounds` of `shard`; a view of its buffer if that holds the values."""
    if isinstance(buffers, ComputedBuffers):
        return buffers.chunk(shard, bounds)
    return shard_view(buffers[shard.local], shard, bounds)


def slice_view(tensor: torch.Tensor, bounds: Slice) -> torch.Tensor:
    """Return a view of a slice of a tensor."""
    for dim, (start, size) in enumerate(zip(bounds.offset, bounds.shape)):
        tensor = tensor.narrow(dim, start, size)
    return tensor


def _flat_view(buffer: torch.Tensor, shard: Shard) -> torch.Tensor:
    start, size = shard.local_offset[0], prod(shard.shape)
    assert start + size <= buffer.numel(), f"{shard} ends at {start + size}, its buffer has {buffer.numel()} elements"
    # Detached, so that autograd does not record a copy into a view of a parameter.
    return buffer.detach().view(-1).narrow(0, start, size).view(shard.shape)


def _slice_of_buffer(buffer: torch.Tensor, shard: Shard) -> torch.Tensor:
    offset, shape = local_slice(shard)
    fits = len(buffer.shape) == len(shape) and all(o + n <= size for o, n, size in zip(offset, shape, buffer.shape))
    assert fits, f"{shard} does not fit its buffer of shape {tuple(buffer.shape)}"
    view = slice_view(buffer.detach(), Slice(offset, shape))
    return view.view(shard.shape) if len(shape) > len(shard.shape) else view


def local_holes(shards: Sequence[Shard], shapes: Mapping[str, Coordinates]) -> dict[str, tuple[Slice, ...]]:
    """Return the slices of every local buffer that no shard fills (padding).

    Raise ValueError if two shards fill the same element. Only for shards that are slices of their buffer, not flat
    ranges.
    """
    slices: dict[str, list[Slice]] = {name: [] for name in shapes}
    for shard in shards:
        slices[shard.local].append(local_slice(shard))
    holes = {name: uncovered(whole(shape), slices[name]) for name, shape in shapes.items()}
    for name, shape in shapes.items():
        # Overlapping shards are counted twice, so that the sums disagree.
        filled = sum(bounds.volume for bounds in slices[name])
        padding = sum(hole.volume for hole in holes[name])
        if filled + padding != prod(shape):
            raise ValueError(
                f"layout: shards fill {filled} elements of buffer {name!r} {tuple(shape)}, "
                f"but {prod(shape) - padding} different ones"
            )
    return holes
