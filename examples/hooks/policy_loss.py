"""A policy loss: the clipped ratio in log space, whose gradient is bounded on both sides. algorithm.loss = "policy_loss.py:loss"."""

import torch

from megatron_dapo import PolicyLossInputs

LOW, HIGH = 0.2, 0.28


def loss(inputs: PolicyLossInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return losses [P] and the tokens [P] that are clipped below and above; averages and other ranks are the trainer's business."""
    advantages, log_ratio = inputs.trained_advantages(), inputs.log_ratio()
    below = (advantages < 0) & (log_ratio < torch.tensor(1 - LOW).log())
    above = (advantages > 0) & (log_ratio > torch.tensor(1 + HIGH).log())
    # A clipped token has no gradient; the others have that of the likelihood, weighted by the advantage.
    bounded = torch.where(below | above, log_ratio.detach(), log_ratio)
    return -advantages * bounded, below, above
