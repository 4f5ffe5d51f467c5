"""Losses of the critic: per-token losses [P] and metric sums, from values and returns.

A loss never averages: multiply by the token weights of `aggregation` ("token_mean" for a token-level loss,
"sample_mean" for a sample-level one), whose denominators are those of the whole optimizer mini-batch, and add up.
Metrics are sums over the trained tokens of the call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megatron_dapo.algorithms.tables import build

Metrics = dict[str, torch.Tensor]


@dataclass(frozen=True)
class ValueLossInputs:
    """Tokens of one packed micro-batch (or of this rank's share of it)."""

    values: torch.Tensor  # [P], the only one that carries gradients
    old_values: torch.Tensor  # [P] of the critic that estimated the advantages
    returns: torch.Tensor  # [P] targets
    loss_mask: torch.Tensor  # [P] 0 or 1

    @property
    def trained(self) -> torch.Tensor:
        """[P] bool."""
        return self.loss_mask > 0


class ValueLoss(Protocol):
    """Maps inputs to (token losses [P], sums over trained tokens)."""

    def __call__(self, inputs: ValueLossInputs) -> tuple[torch.Tensor, Metrics]: ...


@dataclass(frozen=True)
class SquaredError:
    """l_t = (V_t - G_t)^2 / 2, without a bound."""

    def __call__(self, inputs: ValueLossInputs) -> tuple[torch.Tensor, Metrics]:
        token_loss = 0.5 * _error(inputs, inputs.values).square()
        nothing = torch.zeros_like(inputs.trained)
        return token_loss, _metrics(inputs, token_loss, nothing, nothing)


@dataclass(frozen=True)
class ClippedSquaredError:
    """l_t = max((V_t - G_t)^2, (clip(V_t, V_old - low, V_old + high) - G_t)^2) / 2; as PPO's public code has it.

    A value that has left its bounds is trained only where it is further from its target than the bound is. The gradient
    passes at a bound. The bounds are in units of the return; T-PPO's are 0.5 and 0.6.
    """

    clip_value_low: float = 0.5
    clip_value_high: float = 0.5

    def __post_init__(self) -> None:
        if not (self.clip_value_low > 0.0 and self.clip_value_high > 0.0):
            raise ValueError(
                f"value clip low {self.clip_value_low} / high {self.clip_value_high}: both must be above 0, e.g. 0.5"
            )

    def __call__(self, inputs: ValueLossInputs) -> tuple[torch.Tensor, Metrics]:
        old_values = inputs.old_values.detach()
        bounded = inputs.values.detach().clamp(old_values - self.clip_value_low, old_values + self.clip_value_high)
        error, bounded_error = _error(inputs, inputs.values), _error(inputs, bounded)
        held = bounded_error.abs() > error.detach().abs()
        token_loss = 0.5 * torch.where(held, bounded_error, error).square()
        moved_up = inputs.values.detach() > old_values
        return token_loss, _metrics(inputs, token_loss, held & ~moved_up, held & moved_up)


VALUE_LOSSES: dict[str, type[ValueLoss]] = {"squared": SquaredError, "clipped": ClippedSquaredError}


def build_value_loss(name: str, settings: Mapping[str, Any] | None = None) -> ValueLoss:
    """The loss called `name` with `settings` (its dataclass fields); ValueError for an unknown one."""
    return build(VALUE_LOSSES, "value loss", name, settings or {})


def _error(inputs: ValueLossInputs, values: torch.Tensor) -> torch.Tensor:
    """[P] V - G, 0 where masked (whatever stands there, NaN included)."""
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
