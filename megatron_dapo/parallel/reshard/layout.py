"""Layouts: which box of which global tensor lives where on which rank.

Everything that moves tensors (weight sync, converters, checkpoints, critic initialization) is a pair of layouts, the
plan between them (planner) and a transport (executors). A layout is arithmetic: rank 731 of 1024 is computed on a
laptop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, Protocol

import torch

from megatron_dapo.parallel.reshard.boxes import Box, Coordinates, flat_range_boxes, uncovered, whole


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


class Piece(NamedTuple):
    """Box [global_offset, +shape) of global tensor `tensor` is held in the local buffer `local`.

    Where `local_offset` has as many numbers as the box has dimensions, the piece is the box [local_offset, +shape) of
    the buffer. Where it has more, the first are indices into a buffer of more dimensions (one expert of a stack of
    them). Where it has one number and the box has more dimensions, the piece lies contiguous in row-major order from
    that element of the flat buffer on (ZeRO ranges).
    """

    tensor: str
    global_offset: Coordinates
    shape: Coordinates
    local: str
    local_offset: Coordinates

    @property
    def box(self) -> Box:
        return Box(self.global_offset, self.shape)


class Layout(Protocol):
    """Where every element of some global tensors lives. Ranks that hold the same should share one tuple of pieces."""

    @property
    def num_ranks(self) -> int: ...

    @property
    def tensors(self) -> Mapping[str, TensorSpec]: ...

    def pieces(self, rank: int) -> tuple[Piece, ...]: ...

    def buffer_names(self, rank: int) -> frozenset[str]:
        """Local buffers of a rank, those that are padding only included."""


@dataclass(frozen=True)
class ExplicitLayout:
    """A layout written out: one tuple of pieces a rank."""

    tensors: Mapping[str, TensorSpec]
    pieces_of: tuple[tuple[Piece, ...], ...]

    @property
    def num_ranks(self) -> int:
        return len(self.pieces_of)

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        return self.pieces_of[rank]

    def buffer_names(self, rank: int) -> frozenset[str]:
        return frozenset(piece.local for piece in self.pieces_of[rank])


class ReplicatedLayout:
    """Every rank holds every tensor whole, in a buffer of the tensor's name."""

    def __init__(self, tensors: Mapping[str, TensorSpec], num_ranks: int) -> None:
        self.tensors = dict(tensors)
        self.num_ranks = num_ranks
        self._pieces = _whole_pieces(tensors)

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        assert 0 <= rank < self.num_ranks, f"rank {rank} outside {self.num_ranks}"
        return self._pieces

    def buffer_names(self, rank: int) -> frozenset[str]:
        return frozenset(self.tensors)


class SingleHolderLayout:
    """One rank of `num_ranks` holds every tensor whole: a folder of files, or the rank that writes one."""

    def __init__(self, tensors: Mapping[str, TensorSpec], num_ranks: int = 1, holder: int = 0) -> None:
        assert 0 <= holder < num_ranks, f"holder {holder} outside {num_ranks} ranks"
        self.tensors = dict(tensors)
        self.num_ranks = num_ranks
        self.holder = holder
        self._pieces = _whole_pieces(tensors)

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        assert 0 <= rank < self.num_ranks, f"rank {rank} outside {self.num_ranks}"
        return self._pieces if rank == self.holder else ()

    def buffer_names(self, rank: int) -> frozenset[str]:
        return frozenset(self.tensors if rank == self.holder else ())


class ShiftedLayout:
    """Rank r of `layout` is rank r + `offset` of this one, lower ranks hold nothing: engines beside the trainer."""

    def __init__(self, layout: Layout, offset: int) -> None:
        assert offset >= 0, f"offset {offset} is negative"
        self.layout = layout
        self.offset = offset
        self.tensors = layout.tensors

    @property
    def num_ranks(self) -> int:
        return self.offset + self.layout.num_ranks

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        return self.layout.pieces(rank - self.offset) if rank >= self.offset else ()

    def buffer_names(self, rank: int) -> frozenset[str]:
        return self.layout.buffer_names(rank - self.offset) if rank >= self.offset else frozenset()


def _whole_pieces(tensors: Mapping[str, TensorSpec]) -> tuple[Piece, ...]:
    return tuple(
        Piece(name, (0,) * len(spec.shape), tuple(spec.shape), name, (0,) * len(spec.shape))
        for name, spec in tensors.items()
    )


def flat_range_pieces(
    tensor: str, shape: Coordinates, start: int, stop: int, local: str, local_start: int
) -> tuple[Piece, ...]:
    """Elements [start, stop) of the flattened tensor that lie at [local_start, ...) of the flat buffer `local`."""
    pieces, position = [], local_start
    for box in flat_range_boxes(shape, start, stop):
        pieces.append(Piece(tensor, box.offset, box.shape, local, (position,)))
        position += box.volume
    return tuple(pieces)


def check_layout(layout: Layout) -> None:
    """ValueError unless every piece is inside its tensor and every element of every tensor lives on some rank."""
    boxes: dict[str, dict[Box, None]] = {name: {} for name in layout.tensors}
    for rank in range(layout.num_ranks):
        for piece in layout.pieces(rank):
            _check_piece(piece, layout.tensors, rank)
            boxes[piece.tensor][piece.box] = None
    for name, spec in layout.tensors.items():
        holes = uncovered(whole(spec.shape), boxes[name])
        if holes:
            raise ValueError(
                f"layout: {sum(h.volume for h in holes)} of {spec.num_elements} elements of {name!r} "
                f"{tuple(spec.shape)} live on no rank, first hole {holes[0]}"
            )


def _check_piece(piece: Piece, tensors: Mapping[str, TensorSpec], rank: int) -> None:
    if piece.tensor not in tensors:
        raise ValueError(f"layout: rank {rank} holds a piece of {piece.tensor!r}, which is not a tensor of this layout")
    shape = tensors[piece.tensor].shape
    same_dims = len(piece.shape) == len(piece.global_offset) == len(shape)
    if not same_dims or any(o < 0 or o + n > size for o, n, size in zip(piece.global_offset, piece.shape, shape)):
        raise ValueError(f"layout: piece {piece.box} of rank {rank} is not inside {piece.tensor!r} {tuple(shape)}")


def _is_flat(piece: Piece) -> bool:
    return len(piece.local_offset) == 1 < len(piece.shape)


def local_box(piece: Piece, box: Box | None = None) -> Box:
    """Box of the local buffer that holds `piece`, or only its global box `box`. Not for flat pieces."""
    assert not _is_flat(piece), f"{piece} is a flat range, not a box of its buffer"
    inner = piece.box if box is None else box
    lead = len(piece.local_offset) - len(piece.shape)
    place = piece.local_offset[lead:]
    offset = tuple(at + start - base for at, start, base in zip(place, inner.offset, piece.global_offset))
    return Box((*piece.local_offset[:lead], *offset), ((1,) * lead + tuple(inner.shape)))


def piece_view(buffer: torch.Tensor, piece: Piece, box: Box | None = None) -> torch.Tensor:
    """View of the part of local `buffer` that holds `piece`, or only of the piece's global box `box`."""
    region = _flat_view(buffer, piece) if _is_flat(piece) else _box_view(buffer, piece)
    if box is None:
        return region
    for dim, (start, size, base) in enumerate(zip(box.offset, box.shape, piece.global_offset)):
        region = region.narrow(dim, start - base, size)
    return region


def _flat_view(buffer: torch.Tensor, piece: Piece) -> torch.Tensor:
    start, size = piece.local_offset[0], prod(piece.shape)
    assert start + size <= buffer.numel(), f"{piece} ends at {start + size}, its buffer has {buffer.numel()} elements"
    return buffer.detach().view(-1).narrow(0, start, size).view(piece.shape)


def _box_view(buffer: torch.Tensor, piece: Piece) -> torch.Tensor:
    offset, shape = local_box(piece)
    fits = len(buffer.shape) == len(shape) and all(o + n <= size for o, n, size in zip(offset, shape, buffer.shape))
    assert fits, f"{piece} does not fit its buffer of shape {tuple(buffer.shape)}"
    region = buffer.detach()
    for dim, (start, size) in enumerate(zip(offset, shape)):
        region = region.narrow(dim, start, size)
    return region.view(piece.shape) if len(shape) > len(piece.shape) else region


def local_holes(pieces: Sequence[Piece], shapes: Mapping[str, Coordinates]) -> dict[str, tuple[Box, ...]]:
    """Boxes of every local buffer that no piece fills (padding). Raises ValueError where two pieces fill one element.

    Only for pieces that are boxes of their buffer, not for flat ranges.
    """
    boxes: dict[str, list[Box]] = {name: [] for name in shapes}
    for piece in pieces:
        boxes[piece.local].append(local_box(piece))
    holes = {name: uncovered(whole(shape), boxes[name]) for name, shape in shapes.items()}
    for name, shape in shapes.items():
        filled = sum(box.volume for box in boxes[name])
        padding = sum(hole.volume for hole in holes[name])
        if filled + padding != prod(shape):
            raise ValueError(
                f"layout: pieces fill {filled} elements of buffer {name!r} {tuple(shape)}, "
                f"but {prod(shape) - padding} different ones"
            )
    return holes
