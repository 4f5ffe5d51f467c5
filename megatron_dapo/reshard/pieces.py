"""Cuts a list into pieces of bounded size: buckets, batches of tensors, samples that travel together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def pieces(sizes: Sequence[int], limit: int) -> Iterator[slice]:
    """Yield slices of a list, in order and without gaps, whose sizes add up to at most `limit`; a larger item
    gets its own slice."""
    start = total = 0
    for index, size in enumerate(sizes):
        if index > start and total + size > limit:
            yield slice(start, index)
            start, total = index, 0
        total += size
    if start < len(sizes):
        yield slice(start, len(sizes))
