"""Assigns each piece of work to one capable rank: who writes what replicas hold, who reads what all need.

Pure and deterministic: every rank computes the same result from the same arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple


class Candidate(NamedTuple):
    """A piece of work and the ranks that could do it."""

    size: int  # elements or bytes, in one unit for all
    holders: Sequence[int]


def worst_fit(candidates: Sequence[Candidate], loads: Mapping[int, int] | None = None) -> list[int]:
    """Return the rank for each candidate: in order of falling size, each goes to its least loaded holder.

    `loads`: work that ranks already have, in the same unit. Ties in size keep the order, ties in load go to the lowest
    rank. This is ByteCheckpoint's rule (arXiv 2407.20143). Raise ValueError if a candidate has no holder.
    """
    total = dict(loads or {})
    chosen = [0] * len(candidates)
    for index in sorted(range(len(candidates)), key=lambda index: -candidates[index].size):
        size, holders = candidates[index]
        if not holders:
            raise ValueError(f"assignment: candidate {index} of size {size} has no rank that could take it")
        rank = min(holders, key=lambda rank: (total.get(rank, 0), rank))
        total[rank] = total.get(rank, 0) + size
        chosen[index] = rank
    return chosen


def balance(loads: Iterable[int]) -> float:
    """Return the largest load over the mean; 1 if there is no work."""
    found = list(loads)
    return max(found) * len(found) / sum(found) if sum(found) else 1.0
