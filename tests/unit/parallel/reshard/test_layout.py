"""Pieces as views of buffers, and padding as what no piece covers."""

from __future__ import annotations

import pytest
import torch

from megatron_dapo.parallel.reshard.boxes import Box
from megatron_dapo.parallel.reshard.layout import (
    Piece,
    SingleHolderLayout,
    TensorSpec,
    flat_range_pieces,
    local_holes,
    piece_view,
)


def test_box_piece_is_a_view_of_its_region():
    buffer = torch.zeros(4, 5)
    piece = Piece("w", (10, 20), (2, 3), "b", (1, 2))
    piece_view(buffer, piece, Box((11, 20), (1, 2))).fill_(1)
    assert buffer.nonzero().tolist() == [[2, 2], [2, 3]]


def test_flat_piece_takes_part_of_a_flat_buffer():
    shape = (3, 4)
    values = torch.arange(12).view(shape)
    buffer = torch.full((14,), -1)
    pieces = flat_range_pieces("w", shape, 2, 11, "b", 4)
    for piece in pieces:
        box = piece.box
        piece_view(buffer, piece).copy_(values[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape))])
    assert buffer.tolist() == [-1] * 4 + list(range(2, 11)) + [-1]
    middle = next(p for p in pieces if p.global_offset == (1, 0))
    assert piece_view(buffer, middle, Box((1, 1), (1, 2))).tolist() == [[5, 6]]


def test_piece_that_does_not_fit_its_buffer_is_refused():
    with pytest.raises(AssertionError, match="does not fit its buffer of shape"):
        piece_view(torch.zeros(2, 2), Piece("w", (0, 0), (2, 3), "b", (0, 0)))


def test_local_holes_are_the_padding_and_overlap_is_refused():
    top, bottom = Piece("w", (0, 0), (2, 3), "b", (0, 0)), Piece("v", (0, 0), (1, 3), "b", (1, 0))
    assert local_holes([top], {"b": (5, 3), "c": (2,)}) == {"b": (Box((2, 0), (3, 3)),), "c": (Box((0,), (2,)),)}
    with pytest.raises(ValueError, match=r"fill 9 elements of buffer 'b' \(5, 3\), but 6 different"):
        local_holes([top, bottom], {"b": (5, 3)})


def test_single_holder():
    layout = SingleHolderLayout({"w": TensorSpec((2, 3), torch.float32)}, num_ranks=3, holder=1)
    assert [len(layout.pieces(rank)) for rank in range(3)] == [0, 1, 0]
