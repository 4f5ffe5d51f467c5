"""An alarm on the trend of a metric that should stay level, such as the gap between trainer and engine.

Slow growth can ruin a run long before it reaches any fixed bound. Two exponential means of the metric are kept: the
short one is the current level, and the minimum of the long one over the last steps is the earlier level. The alarm is
raised when their ratio stays above a factor for several steps in a row; a single outlier is not a trend.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


# Of the means for the current and for the earlier level; a mean over N steps has weight 2 / (N + 1).
_SHORT_STEPS, _LONG_STEPS = 10, 40
_WINDOW = 100  # steps to look back for the earlier level
_PATIENCE = 3  # steps in a row


@dataclass(frozen=True)
class TrendWarning:
    """The metric has grown from `before` to `now`, both smoothed, within the last `num_steps` observations."""

    before: float
    now: float
    num_steps: int


class TrendAlarm:
    """Observes one value per step. After an alarm the current level is the new baseline: the next alarm is raised when
    it has grown by the factor again.
    """

    def __init__(self, factor: float, floor: float) -> None:
        """factor: current level over the lowest of the window, above 1. Levels up to `floor` are never an alarm."""
        self._factor, self._floor = factor, floor
        self._num_seen = 0
        self._means = {"short": 0.0, "long": 0.0}  # not yet corrected for their start at 0
        self._levels: deque[float] = deque(maxlen=_WINDOW)  # long means
        self._num_high = 0

    def observe(self, value: float) -> TrendWarning | None:
        """Take one value; return a warning in the step in which the growth becomes an alarm.

        A value that is not finite is an alarm at once and is not averaged.
        """
        if not math.isfinite(value):
            return TrendWarning(min(self._levels, default=0.0), value, len(self._levels))
        self._num_seen += 1
        now, long_mean = (
            self._average(name, value, steps)
            for name, steps in (("short", _SHORT_STEPS), ("long", _LONG_STEPS))
        )
        if self._num_seen < _SHORT_STEPS:  # a mean of a few values says little about the level
            return None
        self._levels.append(long_mean)
        before = min(self._levels)
        self._num_high = self._num_high + 1 if now > max(self._factor * before, self._floor) else 0
        if self._num_high < _PATIENCE:
            return None
        warning = TrendWarning(before, now, len(self._levels))
        # The raw means need different corrections, so the long one takes over the level, not the raw value.
        scale = self._correction(_LONG_STEPS) / self._correction(_SHORT_STEPS)
        self._means["long"] = self._means["short"] * scale
        self._levels.clear()
        self._num_high = 0
        return warning

    def _average(self, name: str, value: float, num_steps: int) -> float:
        weight = 2 / (num_steps + 1)
        self._means[name] += weight * (value - self._means[name])
        return self._means[name] / self._correction(num_steps)

    def _correction(self, num_steps: int) -> float:
        """Return the value of a mean that started at 0 and averaged a constant 1 (Adam's bias correction)."""
        return 1 - (1 - 2 / (num_steps + 1)) ** self._num_seen

    def state_dict(self) -> dict[str, Any]:
        return {
            "num_seen": self._num_seen,
            "means": dict(self._means),
            "levels": list(self._levels),
            "num_high": self._num_high,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        self._num_seen, self._num_high = state["num_seen"], state["num_high"]
        self._means = dict(state["means"])
        self._levels = deque(state["levels"], maxlen=_WINDOW)
