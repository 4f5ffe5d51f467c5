"""Reads of stored pieces by many ranks: each piece is read once, by one rank, and sent to all ranks that need it.

Pure and deterministic: every rank computes the same readers and rounds from the same pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from megatron_dapo.reshard.assignment import Candidate, worst_fit
from megatron_dapo.reshard.layout import Shard
from megatron_dapo.reshard.planner import Transfer
from megatron_dapo.reshard.slices import Slice, intersect

Needs = Mapping[str, Sequence[tuple[Sequence[int], Shard]]]  # tensor -> (ranks, the shard that they all want to fill)


class StoredPiece(NamedTuple):
    """A box of a tensor and the file that has it."""

    tensor: str
    bounds: Slice
    file: str


class ReadPlan:
    """The reader of every piece, and rounds of pieces that are in memory together.

    A piece is read by one of the ranks that need part of it, by worst fit, so that little is sent between ranks. Raise
    ValueError if no rank needs a piece.
    """

    def __init__(self, pieces: Sequence[StoredPiece], needs: Needs, num_ranks: int, round_elements: int) -> None:
        """`round_elements`: most elements that one rank has in memory at a time, unless a single piece is larger."""
        self.pieces = pieces
        candidates = [Candidate(piece.bounds.volume, _needing(piece, needs)) for piece in pieces]
        self.readers = worst_fit(candidates)
        self.rounds = list(_rounds(pieces, self.readers, num_ranks, round_elements))

    def source(self, index: int) -> Shard:
        """Return a piece as a shard of the flat buffer of its name, its index."""
        piece = self.pieces[index]
        return Shard(piece.tensor, piece.bounds.offset, piece.bounds.shape, str(index), (0,))

    def read_by(self, rank: int, pieces: Iterable[int]) -> list[int]:
        """Return the pieces that a rank reads."""
        return [index for index in pieces if self.readers[index] == rank]

    def receives(self, rank: int, pieces: Iterable[int], mine: Mapping[str, Sequence[Shard]]) -> list[Transfer]:
        """Return the transfers of `pieces` into a rank. `mine`: the shards that it fills, by tensor."""
        return [
            Transfer(piece.tensor, common, self.readers[index], rank, self.source(index), shard)
            for index, piece in ((index, self.pieces[index]) for index in pieces)
            for shard in mine.get(piece.tensor, ())
            if (common := intersect(piece.bounds, shard.bounds)) is not None
        ]

    def sends(self, rank: int, pieces: Iterable[int], needs: Needs) -> list[Transfer]:
        """Return the transfers of those of `pieces` that a rank reads; to each rank in the order of its `receives`."""
        return [
            Transfer(piece.tensor, common, rank, destination, self.source(index), shard)
            for index, piece in ((index, self.pieces[index]) for index in self.read_by(rank, pieces))
            for ranks, shard in needs.get(piece.tensor, ())
            if (common := intersect(piece.bounds, shard.bounds)) is not None
            for destination in ranks
        ]


def _needing(piece: StoredPiece, needs: Needs) -> list[int]:
    found = {
        rank
        for ranks, shard in needs.get(piece.tensor, ())
        if intersect(piece.bounds, shard.bounds) is not None
        for rank in ranks
    }
    return sorted(found)


def _rounds(
    pieces: Sequence[StoredPiece], readers: Sequence[int], num_ranks: int, round_elements: int
) -> Iterator[list[int]]:
    """Cut the pieces, in order, into runs in which no rank reads more than `round_elements`."""
    run: list[int] = []
    loads = [0] * num_ranks
    for index, piece in enumerate(pieces):
        size, reader = piece.bounds.volume, readers[index]
        if run and loads[reader] + size > round_elements:
            yield run
            run, loads = [], [0] * num_ranks
        run.append(index)
        loads[reader] += size
    if run:
        yield run
