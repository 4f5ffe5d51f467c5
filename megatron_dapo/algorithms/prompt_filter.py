"""A model that predicts whether a prompt's next group will disagree, from the policy's earlier results on it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

MEMORY = 4096  # newest visits to fit the model to, and newest predictions to measure its quality on
_RIDGE = 1.0
_NEWTON_STEPS = 8
_MIN_VISITS = 64  # minimum of each kind
_BINS = 10


class UsefulnessModel:
    """Logistic regression of "this group disagrees" on facts about the prompt's earlier visits.

    The model is refitted to all visits so far before each collection. Each prediction is compared with its outcome, so
    precision, recall and calibration describe predictions made before the outcome was known. Prompts that the model
    would leave out are still tried now and then: only those visits show how often it is wrong about them.

    Args:
        features: names of the facts, in their order.
    """

    def __init__(self, features: Sequence[str]) -> None:
        self._features = tuple(features)
        self._visits: deque[tuple[list[float], bool]] = deque(maxlen=MEMORY)
        self._outcomes: deque[tuple[float, bool, bool]] = deque(maxlen=MEMORY)  # P(useful), flagged, was useful
        self._weights: np.ndarray | None = None

    def add(self, features: Sequence[float], useful: bool) -> None:
        """Add a visit; the first of its features is 1."""
        assert len(features) == len(self._features), f"{len(features)} features, expected {len(self._features)}"
        self._visits.append((list(features), useful))

    def fit(self) -> None:
        """Fit the visits by Newton's method with a ridge penalty; no model until both kinds have enough visits."""
        num_useful = sum(useful for _, useful in self._visits)
        if min(num_useful, len(self._visits) - num_useful) < _MIN_VISITS:
            return
        inputs = np.array([features for features, _ in self._visits])
        targets = np.array([useful for _, useful in self._visits], dtype=float)
        weights = np.zeros(inputs.shape[1])
        penalty = _RIDGE * np.eye(inputs.shape[1])
        penalty[0, 0] = 1e-6  # do not shrink the share of useful visits
        for _ in range(_NEWTON_STEPS):
            predicted = _logistic(inputs @ weights)
            gradient = inputs.T @ (predicted - targets) + penalty @ weights
            curvature = (inputs * (predicted * (1 - predicted))[:, None]).T @ inputs + penalty
            weights = weights - np.linalg.solve(curvature, gradient)
        self._weights = weights

    def predict(self, features: Sequence[float]) -> float | None:
        """Return P(the next group disagrees); None before the first fit."""
        if self._weights is None:
            return None
        return float(_logistic(np.asarray(features) @ self._weights))

    def observe(self, predicted: float, flagged: bool, useful: bool) -> None:
        """Record a prediction and its outcome. `flagged`: the filter would have left the prompt out."""
        self._outcomes.append((predicted, flagged, useful))

    def quality(self, audit_share: float = 1.0) -> dict[str, float]:
        """Return precision and recall of "useless" and the calibration error, over the prompts that were tried.

        precision: share of flagged prompts that were indeed useless (0 if none was tried).
        recall: share of useless prompts that were flagged; a flagged prompt is tried with probability `audit_share` and
        counts as 1 / audit_share prompts.
        calibration_error: mean |predicted - observed| share of useful groups, in ten bins of the prediction.
        flagged_tried and flagged_useful: the flagged prompts that were tried and, of those, the ones flagged wrongly;
        precision is computed from these counts.
        """
        flagged = [not useful for _, flag, useful in self._outcomes if flag]
        num_found = sum(flagged) / audit_share
        num_missed = sum(not flag and not useful for _, flag, useful in self._outcomes)
        bins: dict[int, list[tuple[float, bool]]] = {}
        for predicted, _, useful in self._outcomes:
            bins.setdefault(min(int(predicted * _BINS), _BINS - 1), []).append((predicted, useful))
        gaps = [abs(sum(p - useful for p, useful in entries)) for entries in bins.values()]
        return {
            "filter_precision": sum(flagged) / max(1, len(flagged)),
            "filter_recall": num_found / max(1.0, num_found + num_missed),
            "calibration_error": sum(gaps) / max(1, len(self._outcomes)),
            "flagged_tried": len(flagged),
            "flagged_useful": len(flagged) - sum(flagged),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the JSON-serializable state."""
        return {
            "features": list(self._features),
            "visits": [[features, useful] for features, useful in self._visits],
            "outcomes": [list(entry) for entry in self._outcomes],
            "weights": None if self._weights is None else self._weights.tolist(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`. Raise ValueError, changing nothing, if it is for other features."""
        names = tuple(state["features"])
        if names != self._features:
            raise ValueError(
                f"the checkpoint's prompt filter is fitted to {len(names)} features ({', '.join(names)}), this release's to "
                f"{len(self._features)} ({', '.join(self._features)}): resume with the release that wrote it, or set "
                'rollout.prompt_filter.name = "none"'
            )
        self._visits = deque(((list(features), useful) for features, useful in state["visits"]), maxlen=MEMORY)
        self._outcomes = deque(((p, flag, useful) for p, flag, useful in state["outcomes"]), maxlen=MEMORY)
        self._weights = None if state["weights"] is None else np.array(state["weights"])


def _logistic(values: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-np.clip(values, -30, 30)))
