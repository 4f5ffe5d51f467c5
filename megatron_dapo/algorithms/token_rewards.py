"""Token rewards of packed responses: the outcome on the last token, and KL towards the reference on every token."""

from __future__ import annotations

import torch

from megatron_dapo.algorithms.gae import trained_tokens
from megatron_dapo.algorithms.kl import KL_ESTIMATORS


def outcome_rewards(rewards: torch.Tensor, loss_mask: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return [P]: `rewards` [S], each on the last TRAINED token of its sequence, and 0 on all others.

    `loss_mask` [P] and `lengths` [S] as in `gae.ValueInputs`. The reward of a sequence without a trained token is lost.
    """
    tokens = trained_tokens(loss_mask, lengths)
    placed = rewards.new_zeros(int(tokens.lengths.sum()))
    placed[tokens.last[tokens.present]] = rewards[tokens.present]
    return tokens.put(placed)


def turn_rewards(
    rewards: torch.Tensor, ends: torch.Tensor, loss_mask: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """Return [P]: the rewards [V] of turns whose last tokens are `ends` [V] int64 in [0, P), and 0 on all others.

    One of a turn that is not trained goes to the trained token before it in its sequence, and is lost if there is none.
    """
    placed = torch.zeros_like(loss_mask, dtype=torch.float32)
    if not len(ends):
        return placed
    position = torch.arange(len(loss_mask), device=loss_mask.device)
    last = torch.where(loss_mask > 0, position, -1).cummax(0).values[ends]
    first = (lengths.cumsum(0) - lengths)[torch.searchsorted(lengths.cumsum(0), ends, right=True)]
    is_there = last >= first
    return placed.index_add_(0, last[is_there], rewards.to(torch.float32)[is_there])


def kl_shaped_rewards(
    token_rewards: torch.Tensor, divergence: torch.Tensor, loss_mask: torch.Tensor, beta: float
) -> torch.Tensor:
    """Return r_t - beta KL_t [P], 0 where masked: KL in the reward, as in PPO for RLHF (arXiv 2203.02155, Eq 2).

    `divergence` [P] is `token_divergence` of the policy that generated; no gradient flows through it.
    """
    if not 0.0 <= beta < float("inf"):
        raise ValueError(f"KL coefficient {beta} must be a finite number of at least 0")
    return torch.where(loss_mask > 0, token_rewards - beta * divergence.detach(), 0.0)


def token_divergence(
    name: str, logprobs: torch.Tensor, ref_logprobs: torch.Tensor, loss_mask: torch.Tensor
) -> torch.Tensor:
    """Estimate [P] of KL(pi || pi_ref) by estimator k1, k2 or k3, without gradient, 0 where masked.

    With k1 the sum of the rewards is the regularized objective; in a reward only the VALUE matters.
    """
    trained = loss_mask > 0
    difference = [torch.where(trained, each.detach(), 0.0) for each in (logprobs, ref_logprobs)]
    return KL_ESTIMATORS[name](*difference)
