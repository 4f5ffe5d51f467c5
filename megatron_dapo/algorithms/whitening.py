"""Whitens advantages over the trained tokens of a whole rollout batch (mean 0, variance 1), from sums of its parts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_dapo.algorithms.advantages import STD_CONVENTIONS


@dataclass(frozen=True)
class Moments:
    """Sums over a part of a batch, which add up over parts: float64 scalars."""

    num_tokens: torch.Tensor
    total: torch.Tensor
    square_total: torch.Tensor

    def combine(self, other: Moments) -> Moments:
        """Return the moments of both batches together."""
        return Moments(
            self.num_tokens + other.num_tokens, self.total + other.total, self.square_total + other.square_total
        )

    def mean(self) -> float:
        """0 if there is no token."""
        return float(self.total) / max(float(self.num_tokens), 1.0)

    def variance(self, std: str = "biased") -> float:
        """Divide by n for `std` "biased", by n - 1 for "unbiased"; return 0 if the divisor would be 0 or less."""
        freedom = float(self.num_tokens) - STD_CONVENTIONS[std]
        squares = float(self.square_total) - float(self.total) * self.mean()
        return max(squares / freedom, 0.0) if freedom > 0 else 0.0


def moments(values: torch.Tensor, loss_mask: torch.Tensor) -> Moments:
    """Return the moments of the entries of `values` with mask 1; both tensors have the same shape, which may be any."""
    counted = values.detach()[loss_mask > 0].to(torch.float64)
    return Moments(torch.ones_like(counted).sum(), counted.sum(), counted.square().sum())


def whiten(
    values: torch.Tensor, loss_mask: torch.Tensor, mean: float, variance: float, eps: float = 1e-8
) -> torch.Tensor:
    """Return (values - mean) / sqrt(variance) over the rollout batch, 0 where masked; shape and dtype of `values`.

    If the variance is at most `eps` (a single token, or one value everywhere), the values are returned unchanged;
    otherwise every advantage of such a batch would be lost or blown up.
    """
    if variance <= eps:
        return torch.where(loss_mask > 0, values, 0.0)
    return torch.where(loss_mask > 0, (values - mean) / variance**0.5, 0.0)


def limited(values: torch.Tensor, limit: float = 10.0) -> torch.Tensor:
    """Clamp `values` to [-limit, limit]; T-PPO's code clamps whitened advantages with limit 10."""
    if not limit > 0:
        raise ValueError(f"advantage limit {limit} must be above 0, e.g. 10")
    return values.clamp(-limit, limit)
