"""Detection of a faulty node (Minder, arXiv 2411.01791): denoise, compare, wait for continuity, one metric after another.

A metric is scaled to [0, 1] over all nodes and seconds; its denoiser reconstructs the windows of every node. A node whose
window is far from the others', by its z-score, is a candidate. One that is a candidate in consecutive windows for long
enough, and became one by itself, raises an alert; otherwise the next metric is tried.

Differences from the paper: nodes are compared only within their role and in seconds of the same phase; every node above
the threshold is a candidate, not only the farthest one, so that a disturbance elsewhere does not end a candidate's
continuity; nodes that become candidates together are victims of a fault and not its place (the paper's group effect); the
threshold is reachable on few nodes; a candidate differs by more than its metric's resolution; windows do not overlap.
"""

from __future__ import annotations

import math
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
    windows,
    z_scores,
)
from megatron_dapo.nodes.denoiser import ANY_METRIC, WINDOW, Denoiser
from megatron_dapo.nodes.samples import NodeAlert, NodeSamples

_CHUNK = 16  # windows compared at once
_PROBES = 3  # windows of a run that are compared before the others
_MAX_TOGETHER = 2  # candidates as a run begins: its node, and one that is disturbed by chance


@dataclass(frozen=True)
class DetectorSettings:
    """Settings of the comparison of nodes, calibrated on simulated tasks (docs/nodes.md)."""

    continuity_s: int = 120  # seconds of consecutive windows in which a node must be a candidate
    threshold: float = 2.0  # z-score of a candidate, at most half of what an outlier among these nodes can have
    # First seconds of a run of candidate windows, in which its node has to deviate by itself. 0: nodes may deviate together.
    group_s: int = 40
    distance: str = "euclidean"  # euclidean, manhattan or chebyshev

    @property
    def num_windows(self) -> int:
        """Consecutive windows of a continuity."""
        return max(1, math.ceil(self.continuity_s / WINDOW))

    @property
    def seconds_needed(self) -> int:
        """Seconds of samples without which no node can be found."""
        return self.num_windows * WINDOW


@dataclass(frozen=True)
class Distances:
    """Mean distances of nodes to the others in some windows, [num_windows, num_nodes]."""

    means: torch.Tensor
    are_compared: torch.Tensor  # booleans; False: there is nothing to compare the node by
    resolution: float = 0.0  # minimum distance of a candidate


@dataclass(frozen=True)
class Outlier:
    """A node that is a candidate in the windows that begin from second `first` to second `last`."""

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
    if samples.num_seconds < settings.seconds_needed:
        return None
    for place, metric in enumerate(samples.metrics):
        denoiser = None if denoisers is None else denoisers.get(metric.name, denoisers.get(ANY_METRIC))
        for rows in rows_by_role(samples, place):
            distances = metric_distances(samples, place, rows, settings, denoiser)
            outlier = None if distances is None else find_outlier(distances, samples.num_seconds, settings)
            if outlier is not None:
                return _alert(samples, place, rows, outlier, settings)
    return None


def rows_by_role(samples: NodeSamples, place: int) -> list[np.ndarray]:
    """Return the nodes of each role with samples of metric number `place`, if there are enough to compare."""
    has_samples = ~np.isnan(samples.values[:, :, place]).all(1)
    roles = np.array(samples.roles)
    groups = [np.flatnonzero((roles == role) & has_samples) for role in dict.fromkeys(samples.roles)]
    return [rows for rows in groups if len(rows) >= MIN_NODES]


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
    distances: Callable[[Sequence[int]], Distances], num_seconds: int, settings: DetectorSettings
) -> Outlier | None:
    """Return the node that first completes a run of `settings.num_windows` consecutive windows as a candidate.

    A run is left out if more than _MAX_TOGETHER nodes are candidates in half of its first windows, those of
    `settings.group_s`. `num_seconds`: of the samples.
    """
    starts, need = range(0, num_seconds - WINDOW + 1, WINDOW), settings.num_windows
    scores = _scores_of_runs(distances, starts, settings)
    is_candidate = scores > 0
    is_run = is_candidate.unfold(0, need, 1).all(-1)  # [num_runs, num_nodes], `need` windows from this one on
    is_run[1:] &= ~is_candidate[: len(is_run) - 1]  # keep the first run
    if num_first := min(need, settings.group_s // WINDOW):
        shares = is_candidate.float().unfold(0, num_first, 1).mean(-1)[: len(is_run)]
        is_run &= ((shares >= 0.5).sum(1) <= _MAX_TOGETHER)[:, None]
    runs = is_run.nonzero()  # earliest first
    if not len(runs):
        return None
    first, node = runs[0].tolist()
    return Outlier(node, starts[first], starts[first + need - 1], float(scores[first : first + need, node].mean()))


def _scores_of_runs(
    distances: Callable[[Sequence[int]], Distances], starts: Sequence[int], settings: DetectorSettings
) -> torch.Tensor:
    """Return the candidates' scores, [num_windows, num_nodes], 0 in windows that no run of `num_windows` can reach.

    Denoising and comparing a window is most of the cost, and few candidates last. Every `stride`th window is therefore
    compared first: a run covers num_windows // stride of those in a row. The windows between them, and up to the next
    one on either side, are compared only if a node is a candidate in that many in a row.
    """
    need = settings.num_windows
    stride = max(1, need // _PROBES)
    probes, num_covered = range(stride - 1, len(starts), stride), need // stride

    def compare(places: Sequence[int]) -> torch.Tensor:
        parts = [[starts[place] for place in places[first : first + _CHUNK]] for first in range(0, len(places), _CHUNK)]
        return torch.cat([_candidate_scores(distances(part), settings) for part in parts])

    of_probes = compare(probes)
    scores = of_probes.new_zeros(len(starts), of_probes.shape[1])
    scores[list(probes)] = of_probes
    firsts = (of_probes > 0).unfold(0, num_covered, 1).all(-1).any(1).nonzero()[:, 0].tolist()
    reachable = {
        place
        for first in firsts
        for place in range(probes[first] - stride + 1, min(probes[first + num_covered - 1] + stride, len(starts)))
    }
    if between := sorted(reachable.difference(probes)):
        scores[between] = compare(between)
    return scores


def _candidate_scores(distances: Distances, settings: DetectorSettings) -> torch.Tensor:
    """Return the candidates' scores, z / sqrt(n - 1), [num_windows, num_nodes]; 0: no candidate."""
    scores = z_scores(distances.means, distances.are_compared)
    numbers = distances.are_compared.sum(1, keepdim=True)
    largest = (numbers.clamp(min=2) - 1).sqrt()  # largest distance of one outlier among so many nodes
    is_candidate = scores > (0.5 * largest).clamp(max=settings.threshold)
    is_candidate &= (distances.means >= distances.resolution) & (numbers >= MIN_NODES)
    return torch.where(is_candidate, scores / largest, 0.0)


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
