"""Pieces of a saved state that a rank reads straight into its own buffers."""

from __future__ import annotations

import torch

from megatron_dapo.megatron.model_state import transfers_in_place
from megatron_dapo.reshard.layout import Shard
from megatron_dapo.reshard.planner import Transfer
from megatron_dapo.reshard.slices import Slice


def _transfer(rows: tuple[int, int], of: tuple[int, int], source: int, local: str) -> Transfer:
    """Rows of a 4 x 2 tensor from a piece that has rows `of`, into a buffer of all four."""
    bounds = Slice((rows[0], 0), (rows[1] - rows[0], 2))
    piece = Shard("w", (of[0], 0), (of[1] - of[0], 2), f"{of}", (0,))
    return Transfer("w", bounds, source, 0, piece, Shard("w", (0, 0), (4, 2), local, (0, 0)))


def test_a_whole_piece_of_the_rank_itself_is_read_in_place_once():
    first = _transfer((0, 2), (0, 2), 0, "a")
    again = _transfer((0, 2), (0, 2), 0, "b")
    buffers = {name: torch.zeros(4, 2) for name in "ab"}
    assert transfers_in_place([first, again], 0, buffers, torch.float32) == {"(0, 2)": first}


def test_parts_and_pieces_of_others_and_other_memory_are_not_read_in_place():
    part, other = _transfer((0, 1), (0, 2), 0, "a"), _transfer((2, 4), (2, 4), 1, "a")
    strided, half = _transfer((0, 2), (0, 2), 0, "strided"), _transfer((2, 4), (2, 4), 0, "half")
    buffers = {
        "a": torch.zeros(4, 2),
        "strided": torch.zeros(4, 4)[:, :2],
        "half": torch.zeros(4, 2, dtype=torch.bfloat16),
    }
    assert transfers_in_place([part, other, strided, half], 0, buffers, torch.float32) == {}
