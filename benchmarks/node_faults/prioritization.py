"""Order of metrics by sensitivity to faults: those nearest the root of a decision tree come first (Minder, section 4.3).

The tree divides windows with a fault from those without by the largest z-score of any node in each metric.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from megatron_dapo.nodes.comparison import fill_gaps, min_max
from megatron_dapo.nodes.samples import NodeSamples

_MAX_DEPTH = 6
_MIN_ROWS = 4  # of a leaf


def largest_scores(samples: NodeSamples, window_s: int) -> np.ndarray:
    """Return the largest z-score of any node in each window and metric, [num_windows, num_metrics]; windows side by side.

    A node's value in a window is its mean. Nodes are of one role and phase.
    """
    num_windows = samples.num_seconds // window_s
    columns = []
    for place in range(len(samples.metrics)):
        scaled = fill_gaps(min_max(samples.values[:, : num_windows * window_s, place])[0])
        means = scaled.reshape(len(scaled), num_windows, window_s).mean(2)
        spread = means.std(0)
        deviations = np.abs(means - means.mean(0)) / np.where(spread > 0, spread, 1.0)
        columns.append(deviations.max(0))
    return np.stack(columns, 1)


def prioritize(scores: np.ndarray, is_faulty: np.ndarray) -> list[int]:
    """Return the columns of `scores` in the order in which a decision tree divides by them, the root's first.

    scores: [num_rows, num_metrics]; is_faulty: [num_rows] booleans. Of columns at one depth the one that makes the rows purer
    comes first; columns that the tree has no use for come last, in their order. Raises ValueError unless both kinds of rows
    are there.
    """
    if is_faulty.all() or not is_faulty.any():
        raise ValueError(
            f"{int(is_faulty.sum())} of {len(is_faulty)} windows have a fault: needs some with and without"
        )
    gains: dict[tuple[int, int], float] = {}  # (depth, column) -> decrease of impurity, weighted by rows
    queue = deque([(0, np.arange(len(scores)))])
    while queue:
        depth, rows = queue.popleft()
        split = _best_split(scores[rows], is_faulty[rows])
        if split is None or depth == _MAX_DEPTH:
            continue
        column, bound, gain = split
        gains[depth, column] = gains.get((depth, column), 0.0) + gain * len(rows)
        is_above = scores[rows, column] > bound
        queue += [(depth + 1, rows[is_above]), (depth + 1, rows[~is_above])]
    order = [column for _, column in sorted(gains, key=lambda key: (key[0], -gains[key]))]
    return list(dict.fromkeys([*order, *range(scores.shape[1])]))


def _best_split(scores: np.ndarray, is_faulty: np.ndarray) -> tuple[int, float, float] | None:
    """Return the column, the bound and the decrease of Gini impurity of the best split; None if there is none."""
    num_rows, best = len(scores), None
    whole = _gini(is_faulty.mean()) if num_rows else 0.0
    counts = np.arange(1, num_rows)
    for column in range(scores.shape[1]):
        order = np.argsort(scores[:, column], kind="stable")
        values, found = scores[order, column], np.cumsum(is_faulty[order])
        below, above = found[:-1] / counts, (found[-1:] - found[:-1]) / (num_rows - counts)
        gains = whole - (counts * _gini(below) + (num_rows - counts) * _gini(above)) / num_rows
        is_allowed = (values[1:] > values[:-1]) & (counts >= _MIN_ROWS) & (num_rows - counts >= _MIN_ROWS)
        gains = np.where(is_allowed, gains, 0.0)
        place = int(gains.argmax()) if len(gains) else -1
        if place >= 0 and gains[place] > max(1e-9, best[2] if best else 0.0):
            best = column, float((values[place] + values[place + 1]) / 2), float(gains[place])
    return best


def _gini(share: np.ndarray | float) -> np.ndarray | float:
    return 2 * share * (1 - share)
