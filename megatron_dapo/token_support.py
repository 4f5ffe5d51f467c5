"""The supports of sampled tokens: the ids that each was drawn from under top-p and top-k, as one flat array.

The ids of one token follow those of the token before it. The last id of a token is stored as its complement (~id, negative), so
the array needs no bounds: responses are concatenated and sent like any other numbers. A token that was drawn from the
whole vocabulary is the single number WHOLE.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

WHOLE = np.iinfo(np.int32).min
FILLER = -1  # an empty place of a table


def join_supports(sizes: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return the flat array [M] int32 of tokens with `sizes` [R] ids each, of which `ids` has all; a size of 0: the
    whole vocabulary."""
    ends = np.cumsum(sizes)
    assert len(ids) == (ends[-1] if len(ends) else 0), f"{len(ids)} ids for sizes that add up to {sizes.sum()}"
    flat = ids.astype(np.int32)
    last = ends[sizes > 0] - 1
    flat[last] = ~flat[last]
    return np.insert(flat, ends[sizes == 0], WHOLE) if (sizes == 0).any() else flat


def followed_by(
    first: np.ndarray | None, num_first: int, second: np.ndarray | None, num_second: int
) -> np.ndarray | None:
    """Return the supports of `num_first` and then `num_second` tokens. None: drawn from the whole vocabulary."""
    if first is None and second is None:
        return None
    parts = [
        np.full(number, WHOLE, np.int32) if flat is None else flat
        for flat, number in ((first, num_first), (second, num_second))
    ]
    return np.concatenate(parts)


def supports_between(flat: np.ndarray | None, start: int, end: int) -> np.ndarray | None:
    """Return the supports of tokens [start, end); None of None."""
    if flat is None:
        return None
    bounds = np.concatenate(([0], np.flatnonzero(flat < 0) + 1))
    return flat[bounds[start] : bounds[end]]


def num_supports(flat: np.ndarray | torch.Tensor) -> int:
    """Return the number of tokens of a flat array."""
    return int((flat < 0).sum())


def support_table(flat: torch.Tensor) -> torch.Tensor:
    """Return [R, K] int32: each token's ids, then FILLER up to the largest support; only FILLER for the whole
    vocabulary."""
    import torch  # Takes 1.3 s, and the process that keeps servers needs none of it.

    is_last = flat < 0
    ends = is_last.nonzero()[:, 0]
    starts = torch.cat((ends.new_zeros(1), ends[:-1] + 1))[: len(ends)]
    row = is_last.cumsum(0) - is_last.long()
    column = torch.arange(len(flat)) - starts[row]
    ids = torch.where(is_last, flat.bitwise_not(), flat)
    table = torch.full((len(ends), int(column.max()) + 1 if len(flat) else 1), FILLER, dtype=torch.int32)
    table[row, column] = ids.masked_fill(flat == WHOLE, FILLER)
    return table
