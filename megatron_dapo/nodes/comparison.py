"""Arithmetic of the comparison between nodes: gaps, min-max, windows, pairwise distances, z-scores.

Minder (arXiv 2411.01791, section 4): in each window the sum of a node's distances to all others, normalized over the nodes,
measures how much it deviates. The paper states no threshold. One outlier among n nodes has a z-score of at most
sqrt(n - 1), so a fixed threshold of 2 could never be passed on 4 nodes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

NORMS = {"euclidean": 2.0, "manhattan": 1.0, "chebyshev": math.inf}
# Above this, distances are to this many nodes, by a matrix product that is accurate to a few thousandths.
_EXACT_NODES = 256


def fill_gaps(values: np.ndarray) -> np.ndarray:
    """Return `values` [..., num_seconds] with each NaN replaced by the nearest sample, the earlier one of two.

    A row without any sample stays NaN. Values without any NaN are returned unchanged, not copied.
    """
    has_gap = np.isnan(values).any(-1)
    if not has_gap.any():
        return values
    filled, gaps = values.copy(), values[has_gap]
    num_seconds = values.shape[-1]
    places = np.arange(num_seconds, dtype=np.int32)
    there = ~np.isnan(gaps)
    before = np.maximum.accumulate(np.where(there, places, np.int32(-1)), axis=-1)
    after = np.minimum.accumulate(np.where(there, places, np.int32(2 * num_seconds))[..., ::-1], axis=-1)[..., ::-1]
    has_before, has_after = before >= 0, after < num_seconds
    is_nearer = ~has_after | (has_before & (places - before <= after - places))
    nearest = np.where(is_nearer, before, after)
    found = np.take_along_axis(gaps, np.clip(nearest, 0, num_seconds - 1), axis=-1)
    filled[has_gap] = np.where(has_before | has_after, found, np.nan)
    return filled


def min_max(values: np.ndarray) -> tuple[np.ndarray, float]:
    """Return one metric of all nodes scaled to [0, 1], and the range that became 1. Equal values all become 0.

    NaN stays NaN. Minder normalizes this way over all machines and seconds of a call.
    """
    low, high = (float(bound) for bound in (np.nanmin(values), np.nanmax(values)))
    spread = high - low
    return (values - low) / (spread or 1.0), spread


def windows(values: torch.Tensor, size: int, starts: Sequence[int]) -> torch.Tensor:
    """Return the windows of [num_nodes, num_seconds] that begin at `starts`, as [num_windows, num_nodes, size]."""
    return values.unfold(1, size, 1)[:, list(starts)].transpose(0, 1)


def mean_distances(vectors: torch.Tensor, distance: str = "euclidean") -> torch.Tensor:
    """Return the mean distance of each node to the others, [num_windows, num_nodes].

    vectors: [num_windows, num_nodes, size]. Among more than _EXACT_NODES nodes the mean is over about that many of the
    others, evenly spread. Raises ValueError for an unknown `distance`.
    """
    if distance not in NORMS:
        raise ValueError(f"distance {distance!r}: choose one of {', '.join(NORMS)}")
    num_nodes = vectors.shape[1]
    mode = "donot_use_mm_for_euclid_dist" if num_nodes <= _EXACT_NODES else "use_mm_for_euclid_dist"
    others = _others(num_nodes)
    counts = torch.full((num_nodes,), len(others), dtype=vectors.dtype)
    counts[others] -= 1  # a node is not compared with itself
    centered = vectors - vectors.mean(1, keepdim=True)  # small numbers lose the least precision in a matrix product
    sums = [torch.cdist(one, one[others], NORMS[distance], compute_mode=mode).sum(1) for one in centered]
    return torch.stack(sums) / counts


def _others(num_nodes: int) -> torch.Tensor:
    """Return the nodes that each node is compared with, besides itself."""
    return torch.arange(0, num_nodes, math.ceil(num_nodes / _EXACT_NODES))


def mean_distances_in_phase(
    vectors: torch.Tensor, phases: torch.Tensor, distance: str = "euclidean"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean distances over the seconds in which two nodes are in the same phase, and which nodes have any.

    vectors, phases: [num_windows, num_nodes, size]; a negative phase equals no other. A pair with m of size seconds in
    common has its distance scaled as if it had all of them: a sum by size / m, a sum of squares likewise, a largest one not
    at all. Among many nodes the mean is over some of the others, as in `mean_distances`. Both results are
    [num_windows, num_nodes], the second one booleans.
    """
    norm, size = NORMS[distance], vectors.shape[2]
    others = _others(vectors.shape[1])
    is_other = torch.arange(vectors.shape[1])[:, None] != others
    means, are_compared = [], []
    for values, phase in zip(vectors, phases, strict=True):
        common = (phase[:, None] == phase[others]) & (phase >= 0)[:, None]  # [num_nodes, num_others, size]
        common &= is_other[:, :, None]
        gaps = (values[:, None] - values[others]).abs() * common
        seconds = common.sum(2)
        if norm == math.inf:
            pairs = gaps.amax(2)
        else:
            pairs = (gaps.pow(norm).sum(2) * size / seconds.clamp(min=1)).pow(1 / norm)
        num_compared = (seconds > 0).sum(1)
        means.append(pairs.sum(1) / num_compared.clamp(min=1))
        are_compared.append(num_compared > 0)
    return torch.stack(means), torch.stack(are_compared)


def z_scores(values: torch.Tensor, counts: torch.Tensor | None = None) -> torch.Tensor:
    """Return z-scores over the last axis, by the population's standard deviation; all 0 if that is 0.

    counts: booleans of the same shape; the others are excluded and score 0.
    """
    counts = torch.ones_like(values, dtype=torch.bool) if counts is None else counts
    number = counts.sum(-1, keepdim=True).clamp(min=1)
    deviations = torch.where(counts, values - (values * counts).sum(-1, keepdim=True) / number, 0.0)
    spread = (deviations.square().sum(-1, keepdim=True) / number).sqrt()
    level = (values.abs() * counts).amax(-1, keepdim=True)
    is_alike = spread <= 1e-6 * level  # only rounding
    return torch.where(is_alike, 0.0, deviations / torch.where(is_alike, 1.0, spread))
