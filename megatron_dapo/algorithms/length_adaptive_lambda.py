"""Lambda of each response: the same for all, or growing with the response's length.

VAPO (arXiv 2504.05118, Eq 5) asks that the sum of the weights lambda^k be a fraction alpha of the length l:

    sum_k lambda^k = 1 / (1 - lambda) = alpha l     =>     lambda = 1 - 1 / (alpha l)

This is 0 at l = 1 / alpha and negative below, so it needs a floor. The paper gives none; ours is 0. The code of T-PPO's
authors uses 0.95, which at alpha 0.05 takes effect up to l = 400. T-PPO counts the tokens of all windows of the
response, plus half a window if it continues, for the length it may still reach.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

VAPO_FLOOR = 0.0
TPPO_FLOOR = 0.95


class LambdaRule(Protocol):
    """Maps the tokens generated so far [S] int64 and whether the response is finished [S] bool to float64 [S]."""

    def __call__(self, lengths: torch.Tensor, is_finished: torch.Tensor) -> torch.Tensor: ...


def raw_lambda(lengths: torch.Tensor, alpha: float) -> torch.Tensor:
    """Return 1 - 1 / (alpha l), float64, without a floor: negative below l = 1 / alpha, -inf at 0."""
    return 1.0 - 1.0 / (alpha * lengths.to(torch.float64))


def prospective_lengths(lengths: torch.Tensor, is_finished: torch.Tensor, window: int) -> torch.Tensor:
    """Return T-PPO's length [S]: tokens of all windows so far, plus window // 2 if the response continues."""
    return lengths + torch.where(is_finished.to(torch.bool), 0, window // 2)


@dataclass(frozen=True)
class FixedLambda:
    """The same lambda for every response: 0.95 in PPO, 1 (Monte-Carlo) for the critic of VC-PPO, VAPO and T-PPO."""

    value: float = 0.95

    def __post_init__(self) -> None:
        if not 0.0 <= self.value <= 1.0:
            raise ValueError(f"lambda {self.value} must lie in [0, 1], e.g. 0.95 or 1.0")

    def __call__(self, lengths: torch.Tensor, is_finished: torch.Tensor) -> torch.Tensor:
        return torch.full_like(lengths, self.value, dtype=torch.float64)


@dataclass(frozen=True)
class LengthAdaptiveLambda:
    """VAPO, Eq 5, applied to the response's length: max(floor, 1 - 1 / (alpha l)), always below 1."""

    alpha: float = 0.05
    floor: float = VAPO_FLOOR

    def __post_init__(self) -> None:
        if not (self.alpha > 0.0 and 0.0 <= self.floor < 1.0):
            raise ValueError(
                f"length-adaptive lambda with alpha {self.alpha}, floor {self.floor}: need alpha > 0 and 0 <= floor < 1"
            )

    def __call__(self, lengths: torch.Tensor, is_finished: torch.Tensor) -> torch.Tensor:
        return raw_lambda(lengths, self.alpha).clamp(min=self.floor)


@dataclass(frozen=True)
class WindowLambda(LengthAdaptiveLambda):
    """T-PPO: the same rule applied to the prospective length. `window` is the number of tokens one step generates."""

    floor: float = TPPO_FLOOR
    window: int = 8192

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < 1:
            raise ValueError(f"window {self.window} must be at least 1 token")

    def __call__(self, lengths: torch.Tensor, is_finished: torch.Tensor) -> torch.Tensor:
        return super().__call__(prospective_lengths(lengths, is_finished, self.window), is_finished)


LAMBDA_RULES: dict[str, type[LambdaRule]] = {
    "fixed": FixedLambda,
    "length_adaptive": LengthAdaptiveLambda,
    "window": WindowLambda,
}
