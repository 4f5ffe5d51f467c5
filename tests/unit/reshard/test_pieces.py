"""Pieces cover a list in order, keep to the limit, and are as few as an order allows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron_dapo.reshard.pieces import pieces


@given(st.lists(st.integers(0, 20)), st.integers(0, 30))
def test_pieces_cover_the_list_and_keep_to_the_limit(sizes: list[int], limit: int) -> None:
    found = [sizes[piece] for piece in pieces(sizes, limit)]
    assert [size for piece in found for size in piece] == sizes
    assert all(piece and (len(piece) == 1 or sum(piece) <= limit) for piece in found)
    # None could have taken the first item of the next.
    assert all(sum(piece) + following[0] > limit for piece, following in zip(found, found[1:]))
