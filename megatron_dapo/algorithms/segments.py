"""Sums over the values of a packed batch that share an index, and sums over parts of a batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MetricSums:
    """Partial metrics, float64 scalars: across micro-batches and ranks, add `sums` and take the maximum of `maxima`."""

    sums: dict[str, torch.Tensor]
    maxima: dict[str, torch.Tensor]

    def combine(self, other: MetricSums) -> MetricSums:
        """Return the sums and maxima over both batches."""
        return MetricSums(
            {key: value + other.sums[key] for key, value in self.sums.items()},
            {key: torch.maximum(value, other.maxima[key]) for key, value in self.maxima.items()},
        )


def segment_sum(values: torch.Tensor, index: torch.Tensor, num_segments: int) -> torch.Tensor:
    """Sum `values` [..., n] by `index` [n] into float64 [..., num_segments].

    float64, because a response may have tens of thousands of tokens and a bound 3e-4 wide is compared with its mean.
    """
    sums = torch.zeros(*values.shape[:-1], num_segments, dtype=torch.float64, device=values.device)
    return sums.index_add_(-1, index, values.to(torch.float64))


def group_positions(group_index: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Renumber arbitrary group indices [S] as 0..num_groups-1 (sorted order): (positions [S], num_groups)."""
    groups, positions = torch.unique(group_index, return_inverse=True)
    return positions, int(groups.numel())


def identity(sums: torch.Tensor) -> torch.Tensor:
    """Return `sums` unchanged: the reduction for a batch that is whole on this rank."""
    return sums
