"""REINFORCE++ with one response per prompt: an advantage per token (arXiv 2501.03262, k = 1)."""

from __future__ import annotations

import torch


def reinforce_pp_returns(
    rewards: torch.Tensor, logprobs: torch.Tensor, ref_logprobs: torch.Tensor, loss_mask: torch.Tensor, beta: float
) -> torch.Tensor:
    """Return to go R - beta * sum_{i >= t} (log pi_i - log pi_ref,i), float64 [S, R], 0 where masked.

    `rewards` [S] arrive at the last token; `logprobs`, `ref_logprobs`, `loss_mask` are [S, R], padded anywhere.
    """
    mask = loss_mask.to(torch.bool)
    divergence = torch.where(mask, (logprobs - ref_logprobs).to(torch.float64), 0.0)
    to_go = divergence.flip(-1).cumsum(-1).flip(-1)
    return torch.where(mask, rewards.to(torch.float64)[:, None] - beta * to_go, 0.0)


def whiten(values: torch.Tensor, loss_mask: torch.Tensor, eps: float = 1e-8) -> torch.Tensor:
    """(values - mean) / sqrt(max(variance, eps)) over the tokens with mask 1, biased variance; 0 where masked.

    The whole rollout batch has to be here. One token, or no spread: the values come back as they are.
    """
    mask = loss_mask.to(torch.bool)
    counted = values[mask].to(torch.float64)
    if counted.numel() == 0 or bool(counted.min() == counted.max()):
        return torch.where(mask, values, 0.0)
    variance = counted.var(correction=0).clamp(min=eps)
    return torch.where(mask, (values - counted.mean()) * variance.rsqrt(), 0.0)


def reinforce_pp_advantages(
    rewards: torch.Tensor, logprobs: torch.Tensor, ref_logprobs: torch.Tensor, loss_mask: torch.Tensor, beta: float
) -> torch.Tensor:
    """Returns to go, normalized over all trained tokens of the batch: float64 [S, R]."""
    return whiten(reinforce_pp_returns(rewards, logprobs, ref_logprobs, loss_mask, beta), loss_mask)
