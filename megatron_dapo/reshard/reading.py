"""Reads of stored slices by many ranks: each slice is read once, by one rank, and sent to all ranks that need it.

Pure and deterministic: every rank computes the same readers and rounds from the same slices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from megatron_dapo.reshard.assignment import Candidate, worst_fit
from megatron_dapo.reshard.layout import Shard
from megatron_dapo.reshard.planner import Transfer
from megatron_dapo.reshard.slices import Slice, intersect

Needs = Mapping[str, Sequence[tuple[Sequence[int], Shard]]]  # tensor -> (ranks, the shard that they all want to fill)


class StoredSlice(NamedTuple):
    """A slice of a tensor and the file that has it."""

    tensor: str
    bounds: Slice
    file: str


class ReadPlan:
    """The reader of every slice, and rounds of slices that are in memory together.

    A slice is read by one of the ranks that need part of it, by worst fit, so that little is sent between ranks. Raise
    ValueError if no rank needs a slice.
    """

    def __init__(self, slices: Sequence[StoredSlice], needs: Needs, num_ranks: int, round_elements: int) -> None:
        """`round_elements`: most elements that one rank has in memory at a time, unless a single slice is larger."""
        self.slices = slices
        candidates = [Candidate(stored.bounds.volume, _needing(stored, needs)) for stored in slices]
        self.readers = worst_fit(candidates)
        self.rounds = list(_rounds(slices, self.readers, num_ranks, round_elements))

    def source(self, index: int) -> Shard:
        """Return a slice as a shard of the flat buffer of its name, its index."""
        stored = self.slices[index]
        return Shard(stored.tensor, stored.bounds.offset, stored.bounds.shape, str(index), (0,))

    def read_by(self, rank: int, slices: Iterable[int]) -> list[int]:
        """Return the slices that a rank reads."""
        return [index for index in slices if self.readers[index] == rank]

    def receives(self, rank: int, slices: Iterable[int], mine: Mapping[str, Sequence[Shard]]) -> list[Transfer]:
        """Return the transfers of `slices` into a rank. `mine`: the shards that it fills, by tensor."""
        return [
            Transfer(stored.tensor, common, self.readers[index], rank, self.source(index), shard)
            for index, stored in ((index, self.slices[index]) for index in slices)
            for shard in mine.get(stored.tensor, ())
            if (common := intersect(stored.bounds, shard.bounds)) is not None
        ]

    def sends(self, rank: int, slices: Iterable[int], needs: Needs) -> list[Transfer]:
        """Return the transfers of those of `slices` that a rank reads; to each rank in the order of its `receives`."""
        return [
            Transfer(stored.tensor, common, rank, destination, self.source(index), shard)
            for index, stored in ((index, self.slices[index]) for index in self.read_by(rank, slices))
            for ranks, shard in needs.get(stored.tensor, ())
            if (common := intersect(stored.bounds, shard.bounds)) is not None
            for destination in ranks
        ]


def _needing(stored: StoredSlice, needs: Needs) -> list[int]:
    found = {
        rank
        for ranks, shard in needs.get(stored.tensor, ())
        if intersect(stored.bounds, shard.bounds) is not None
        for rank in ranks
    }
    return sorted(found)


def _rounds(
    slices: Sequence[StoredSlice], readers: Sequence[int], num_ranks: int, round_elements: int
) -> Iterator[list[int]]:
    """Cut the slices, in order, into runs in which no rank reads more than `round_elements`."""
    run: list[int] = []
    loads = [0] * num_ranks
    for index, stored in enumerate(slices):
        size, reader = stored.bounds.volume, readers[index]
        if run and loads[reader] + size > round_elements:
            yield run
            run, loads = [], [0] * num_ranks
        run.append(index)
        loads[reader] += size
    if run:
        yield run
