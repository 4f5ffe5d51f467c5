"""Entropy bonus (arXiv 1707.06347, Eq 9, c2 S): DAPO uses none, the entropy is measured all the same."""

from __future__ import annotations

import torch


def entropy_loss(
    entropy: torch.Tensor, loss_mask: torch.Tensor, coefficient: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """-coefficient * H_t per token [P] (0 where masked), and the sum of H over trained tokens.

    The sum is there for any coefficient, 0 included: a collapse has to be seen by those who do not fight it.
    """
    entropy = torch.where(loss_mask > 0, entropy, 0.0)
    return -coefficient * entropy, {"entropy_sum": entropy.detach().sum()}
