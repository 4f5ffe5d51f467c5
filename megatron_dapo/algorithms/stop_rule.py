"""Decide when to stop value pretraining: VC-PPO (arXiv 2503.01491) stops on explained variance and value loss.

The paper gives no rule. Ours fits a line through the newest steps of both: pretraining ends when explained variance
rises by less than a bound over them and the loss no longer falls. Too much pretraining overfits to the fixed policy, so
there is also a maximum number of steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StopRule:
    """Looks at the newest `num_steps` train steps; at least that many are made."""

    num_steps: int = 20
    explained_variance_slope: float = 0.005  # rise over those steps
    loss_slope: float = 0.05  # fall over those steps, as a share of their mean

    def has_converged(self, history: Sequence[Sequence[float]]) -> bool:
        """Return True if pretraining may stop.

        `history`: (explained variance, value loss) of the newest train steps, oldest first.
        """
        if len(history) < self.num_steps:
            return False
        explained, losses = zip(*history[-self.num_steps :], strict=True)
        mean_loss = sum(losses) / len(losses)
        return rise(explained) < self.explained_variance_slope and -rise(losses) <= self.loss_slope * mean_loss


def rise(series: Sequence[float]) -> float:
    """Return the rise of the least-squares line through `series`, from its first point to its last."""
    count = len(series)
    center, mean = (count - 1) / 2, sum(series) / count
    spread = sum((place - center) ** 2 for place in range(count))
    slope = sum((place - center) * (value - mean) for place, value in enumerate(series)) / max(spread, 1e-12)
    return slope * (count - 1)
