"""Advantages of mean 0 and variance 1 over the trained tokens of a whole rollout batch, from sums of its parts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_dapo.algorithms.advantages import STD_CONVENTIONS
from megatron_dapo.algorithms.tables import lookup


@dataclass(frozen=True)
class Moments:
    """Sums that add up over parts of a batch: float64 scalars."""

    num_tokens: torch.Tensor
    total: torch.Tensor
    square_total: torch.Tensor

    def combine(self, other: Moments) -> Moments:
        """The moments of both batches together."""
        return Moments(
            self.num_tokens + other.num_tokens, self.total + other.total, self.square_total + other.square_total
        )

    def mean(self) -> float:
        """0 where there is no token."""
        return float(self.total) / max(float(self.num_tokens), 1.0)

    def variance(self, std: str = "biased") -> float:
        """`std` "biased" divides by n, "unbiased" by n - 1; 0 where nothing is left to divide by."""
        freedom = float(self.num_tokens) - lookup(STD_CONVENTIONS, "standard deviation convention", std)
        squares = float(self.square_total) - float(self.total) * self.mean()
        return max(squares / freedom, 0.0) if freedom > 0 else 0.0


def moments(values: torch.Tensor, loss_mask: torch.Tensor) -> Moments:
    """Moments of the entries of `values` with mask 1; any shape, the same for both."""
    counted = values.detach()[loss_mask > 0].to(torch.float64)
    return Moments(torch.ones_like(counted).sum(), counted.sum(), counted.square().sum())


def whiten(
    values: torch.Tensor, loss_mask: torch.Tensor, mean: float, variance: float, eps: float = 1e-8
) -> torch.Tensor:
    """(values - mean) / sqrt(variance) of the whole rollout batch, 0 where masked; shape and dtype of `values`.

    A variance of at most `eps` is no spread to divide by (one token, one value everywhere): there the values come back
    as they are, or every advantage of such a batch would be lost or blown up.
    """
    if variance <= eps:
        return torch.where(loss_mask > 0, values, 0.0)
    return torch.where(loss_mask > 0, (values - mean) / variance**0.5, 0.0)


def limited(values: torch.Tensor, limit: float = 10.0) -> torch.Tensor:
    """`values` held in [-limit, limit]; T-PPO's code does so to whitened advantages, with 10."""
    if not limit > 0:
        raise ValueError(f"advantage limit {limit} must be above 0, e.g. 10")
    return values.clamp(-limit, limit)
