"""Detection of a faulty node (Minder, arXiv 2411.01791): denoise, compare, wait for continuity, one metric after another.

A metric is scaled to [0, 1] over all nodes and seconds; its denoiser reconstructs every window of every node; the node whose
windows are farthest from the others' is the window's candidate if its z-score is above the threshold. The same candidate in
consecutive windows for long enough raises an alert; otherwise the next metric is tried.

Differences from the paper: nodes are compared only within their role and in seconds of the same phase; the threshold
scales with the number of nodes; a candidate must differ by more than its metric's resolution.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_dapo.nodes import MIN_NODES
from megatron_dapo.nodes.comparison import (
    NORMS,
    fill_gaps,
    mean_distances,
    mean_distances_in_phase,
    min_max,
    threshold,
    windows,
    z_scores,
)
from megatron_dapo.nodes.denoiser import ANY_METRIC, WINDOW, Denoiser
from megatron_dapo.nodes.samples import NodeAlert, NodeSamples

_CHUNK = 16  # windows compared at once; 9 MB each with 1,500 nodes


@dataclass(frozen=True)
class DetectorSettings:
    """Settings of the comparison of nodes. Defaults are the paper's if it states a value."""

    continuity_s: int = 240  # seconds of consecutive windows in which one node must be the candidate
    noise_chance: float = 1e-3  # probability of a candidate in a window of healthy nodes, if their noise is Gaussian
    distance: str = "euclidean"  # or manhattan, chebyshev
    # Every node above the threshold is a candidate, not only the farthest one as in the paper, so that a disturbance on
    # another node does not end a candidate's continuity.
    all_candidates: bool = False

    @property
    def seconds_needed(self) -> int:
        """Seconds of samples without which no node can be found."""
        return self.continuity_s + WINDOW - 1


@dataclass(frozen=True)
class Distances:
    """Mean distances of nodes to the others in some windows, [num_windows, num_nodes]."""

    means: torch.Tensor
    are_compared: torch.Tensor  # booleans; False: there is nothing to compare the node by
    resolution: float = 0.0  # minimum distance of a candidate


@dataclass(frozen=True)
class Outlier:
    """A node that is a candidate from window `first` to window `last`."""

    node: int
    first: int
    last: int
    score: float  # mean z-score over sqrt(n - 1)


def detect(
    samples: NodeSamples, settings: DetectorSettings, denoisers: Mapping[str, Denoiser] | None = None
) -> NodeAlert | None:
    """Return an alert for the first metric, in the order of `samples.metrics`, in which a node has been an outlier for
    long.

    denoisers: by metric, with ANY_METRIC for the others; samples without a denoiser, or with None, are compared
    unchanged. Samples shorter than `settings.seconds_needed` and roles of fewer than MIN_NODES raise no alert.
    """
    num_windows = samples.num_seconds - WINDOW + 1
    if num_windows < settings.continuity_s:
        return None
    for place, metric in enumerate(samples.metrics):
        denoiser = None if denoisers is None else denoisers.get(metric.name, denoisers.get(ANY_METRIC))
        for rows in rows_by_role(samples, place):
            distances = metric_distances(samples, place, rows, settings, denoiser)
            outlier = None if distances is None else find_outlier(distances, num_windows, settings)
            if outlier is not None:
                return _alert(samples, place, rows, outlier, settings)
    return None


def rows_by_role(samples: NodeSamples, place: int) -> list[np.ndarray]:
    """Return the nodes of each role with samples of metric number `place`, if there are enough to compare."""
    has_samples = ~np.isnan(samples.values[:, :, place]).all(1)
    roles = np.array(samples.roles)
    found = [np.flatnonzero((roles == role) & has_samples) for role in dict.fromkeys(samples.roles)]
    return [rows for rows in found if len(rows) >= MIN_NODES]


def metric_distances(
    samples: NodeSamples, place: int, rows: np.ndarray, settings: DetectorSettings, denoiser: Denoiser | None
) -> Callable[[Sequence[int]], Distances] | None:
    """Return a function from the starts of windows to distances of `rows` in one metric; None if all nodes are
    alike."""
    values, metric = samples.values[rows, :, place], samples.metrics[place]
    scaled, spread = min_max(values)
    if spread <= metric.resolution:
        return None
    series = torch.from_numpy(fill_gaps(scaled).astype(np.float32))
    has_sample = torch.from_numpy(~np.isnan(values))
    phases = torch.from_numpy(samples.phases[rows])
    norm = NORMS[settings.distance]
    resolution = metric.resolution / spread * WINDOW ** (1 / norm)

    def distances(starts: Sequence[int]) -> Distances:
        vectors = windows(series, WINDOW, starts)
        vectors = vectors if denoiser is None else denoiser.denoise(vectors)
        phase = windows(phases, WINDOW, starts)
        has_any = windows(has_sample, WINDOW, starts).any(2)
        if bool(has_any.all()) and bool((phase == phase[:, :1]).all()) and bool((phase >= 0).all()):
            return Distances(mean_distances(vectors, settings.distance), has_any, resolution)
        phase = torch.where(has_any[:, :, None], phase, -1)
        return Distances(*mean_distances_in_phase(vectors, phase, settings.distance), resolution)

    return distances


def find_outlier(
    distances: Callable[[Sequence[int]], Distances], num_windows: int, settings: DetectorSettings
) -> Outlier | None:
    """Return the node that is first a candidate in `settings.continuity_s` consecutive windows of `num_windows`.

    That many consecutive windows contain a known number of every k-th window. Those are compared first, and the ones
    between them only for nodes that are candidates in all of these: the same result from a small part of the windows.
    """
    need = settings.continuity_s
    stride = max(1, need // 4)
    coarse = range(0, num_windows, stride)
    scores = _Scores(distances, settings, num_windows)
    for place in range(len(coarse) - need // stride + 1):
        points = coarse[place : place + need // stride]
        found = scores.at(points)
        is_candidate = (found > 0).all(0)
        nodes = [int(node) for node in is_candidate.nonzero()]
        for node in sorted(nodes, key=lambda node: -float(found[:, node].mean())):
            first = last = points[0]
            while first > 0 and scores.is_candidate(first - 1, node):
                first -= 1
            while (
                last - first + 1 < need and last + 1 < num_windows and scores.is_candidate(last + 1, node, ahead=True)
            ):
                last += 1
            if last - first + 1 >= need:
                return Outlier(node, first, last, float(scores.at(range(first, last + 1))[:, node].mean()))
    return None


class _Scores:
    """Scores of the candidates of windows, z / sqrt(n - 1), computed when they are requested; 0: no candidate."""

    def __init__(
        self, distances: Callable[[Sequence[int]], Distances], settings: DetectorSettings, num_windows: int
    ) -> None:
        self._distances, self._settings, self._num_windows = distances, settings, num_windows
        self._known: dict[int, torch.Tensor] = {}

    def at(self, starts: Sequence[int]) -> torch.Tensor:
        """Return the scores of the windows that begin at `starts`, [num_windows, num_nodes]."""
        missing = [start for start in starts if start not in self._known]
        for first in range(0, len(missing), _CHUNK):
            part = missing[first : first + _CHUNK]
            self._known.update(zip(part, _candidate_scores(self._distances(part), self._settings), strict=True))
        return torch.stack([self._known[start] for start in starts])

    def is_candidate(self, start: int, node: int, ahead: bool = False) -> bool:
        """Return whether `node` is a candidate of the window at `start`; its neighbors are computed along with it, as
        they come next."""
        if start not in self._known:
            after = range(start, min(start + _CHUNK, self._num_windows))
            self.at(after if ahead else range(max(0, start - _CHUNK + 1), start + 1))
        return bool(self._known[start][node] > 0)


def _candidate_scores(found: Distances, settings: DetectorSettings) -> torch.Tensor:
    scores = z_scores(found.means, found.are_compared)
    numbers = found.are_compared.sum(1)
    bounds = torch.tensor(
        [threshold(max(MIN_NODES, int(number)), settings.noise_chance) for number in numbers]
    )
    is_candidate = (scores > bounds[:, None]) & (found.means >= found.resolution) & (numbers >= MIN_NODES)[:, None]
    if not settings.all_candidates:
        is_candidate &= scores == scores.amax(1, keepdim=True)
    return torch.where(is_candidate, scores / (numbers.clamp(min=2) - 1).sqrt()[:, None], 0.0)


def _alert(
    samples: NodeSamples, place: int, rows: np.ndarray, outlier: Outlier, settings: DetectorSettings
) -> NodeAlert:
    part = samples.values[rows, outlier.first : outlier.last + WINDOW, place]
    is_sampled = ~np.isnan(part)
    means = np.where(is_sampled, part, 0).sum(1) / np.maximum(1, is_sampled.sum(1))
    others = np.delete(means, outlier.node)[np.delete(is_sampled.any(1), outlier.node)]
    return NodeAlert(
        samples.nodes[rows[outlier.node]],
        samples.metrics[place].name,
        samples.start + outlier.first,
        float(outlier.last - outlier.first + WINDOW),
        outlier.score,
        float(means[outlier.node]),
        float(np.median(others)),
    )
