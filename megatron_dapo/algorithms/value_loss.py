"""Losses of the critic: per-token losses [P] and metric sums, from values and returns.

A loss never averages: multiply by the token weights of `aggregation` ("token_mean" for a token-level loss,
"sample_mean" for a sample-level one), whose denominators are those of the whole optimizer mini-batch, and sum.
Metrics are sums over the trained tokens of the call.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_dapo.config.algorithm_schema import CriticConfig

Metrics = dict[str, torch.Tensor]


@dataclass(frozen=True)
class ValueLossInputs:
    """Tokens of one packed micro-batch (or of this rank's share of it)."""

    values: torch.Tensor  # [P], the only one that carries gradients
    old_values: torch.Tensor  # [P] from the critic that estimated the advantages
    returns: torch.Tensor  # [P] targets
    loss_mask: torch.Tensor  # [P] 0 or 1

    @property
    def trained(self) -> torch.Tensor:
        """[P] bool."""
        return self.loss_mask > 0


def squared(inputs: ValueLossInputs, section: CriticConfig) -> tuple[torch.Tensor, Metrics]:
    """l_t = (V_t - G_t)^2 / 2, without a bound."""
    token_loss = 0.5 * _error(inputs, inputs.values).square()
    nothing = torch.zeros_like(inputs.trained)
    return token_loss, _metrics(inputs, token_loss, nothing, nothing)


def clipped(inputs: ValueLossInputs, section: CriticConfig) -> tuple[torch.Tensor, Metrics]:
    """l_t = max((V_t - G_t)^2, (clip(V_t, V_old - low, V_old + high) - G_t)^2) / 2, as in PPO's public code.

    A value outside its bounds is trained only if it is further from its target than the bound is. The gradient passes
    at a bound. The bounds are in units of the return; T-PPO uses 0.5 and 0.6.
    """
    old_values = inputs.old_values.detach()
    # Detached: a clipped value has the bound's loss and no gradient.
    bounded = inputs.values.detach().clamp(old_values - section.clip_value_low, old_values + section.clip_value_high)
    error, bounded_error = _error(inputs, inputs.values), _error(inputs, bounded)
    held = bounded_error.abs() > error.detach().abs()
    token_loss = 0.5 * torch.where(held, bounded_error, error).square()
    moved_up = inputs.values.detach() > old_values
    return token_loss, _metrics(inputs, token_loss, held & ~moved_up, held & moved_up)


VALUE_LOSSES = {"squared": squared, "clipped": clipped}


def value_loss(section: CriticConfig, inputs: ValueLossInputs) -> tuple[torch.Tensor, Metrics]:
    """Return the token losses [P] that critic.loss names, and their sums over trained tokens."""
    return VALUE_LOSSES[section.loss](inputs, section)


def _error(inputs: ValueLossInputs, values: torch.Tensor) -> torch.Tensor:
    """Return V - G [P], 0 where masked, even over NaN."""
    return torch.where(inputs.trained, values - inputs.returns.detach(), 0.0)


def _metrics(inputs: ValueLossInputs, token_loss: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> Metrics:
    def summed(per_token: torch.Tensor) -> torch.Tensor:
        return torch.where(inputs.trained, per_token.detach(), 0.0).sum(dtype=torch.float64)

    return {
        "num_value_tokens": inputs.trained.sum().to(torch.float64),
        "value_loss_sum": summed(token_loss),
        "value_sum": summed(inputs.values),
        "return_sum": summed(inputs.returns),
        "value_clip_low_sum": low.sum().to(torch.float64),
        "value_clip_high_sum": high.sum().to(torch.float64),
    }
