"""Learning-rate schedules over steps that trained; generation steps never move them (DAPO counts warm-up in rollout steps)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class LearningRateSchedule:
    """Linear warm-up to `peak`, then `shape` down to `minimum` at `total_steps`. Steps count from 0; all in one unit."""

    peak: float
    warmup_steps: int
    total_steps: int
    shape: str = "constant"
    minimum: float = 0.0

    def __post_init__(self) -> None:
        if self.shape not in _SHAPES:
            raise ValueError(f"learning-rate schedule {self.shape!r} does not exist; choose from {sorted(_SHAPES)}")

    def at(self, step: int) -> float:
        """The rate of step number `step`; the first warm-up step already moves, with peak / warmup_steps."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        span = max(1, self.total_steps - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / span)
        return self.minimum + (self.peak - self.minimum) * _SHAPES[self.shape](progress)


def _constant(progress: float) -> float:
    return 1.0


def _linear(progress: float) -> float:
    return 1.0 - progress


def _cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


_SHAPES: dict[str, Callable[[float], float]] = {"constant": _constant, "linear": _linear, "cosine": _cosine}
