"""Detectors that Minder is compared with in its paper: Mahalanobis distance of moments, and all metrics in one distance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from megatron_dapo.nodes.comparison import fill_gaps, mean_distances, min_max, windows
from megatron_dapo.nodes.denoiser import WINDOW, Denoiser
from megatron_dapo.nodes.detection import DetectorSettings, Distances, Outlier, find_outlier
from megatron_dapo.nodes.samples import NodeSamples

_KEPT_VARIANCE = 0.95  # share of the variance in the kept principal components


def detect_by_mahalanobis(samples: NodeSamples, settings: DetectorSettings) -> Outlier | None:
    """Return the outlier by pairwise Mahalanobis distances of the moments of all metrics, reduced by principal components.

    In each window a node has mean, variance, skewness and kurtosis of every metric. Nodes are of one role and phase.
    """
    series = _scaled(samples)

    def distances(starts: Sequence[int]) -> Distances:
        features = torch.cat(
            [_moments(windows(one, WINDOW, starts).double()) for one in series], 2
        )  # [num_windows, num_nodes, 4 * num_metrics]
        return _compared(mean_distances(_whitened(features), settings.distance))

    return find_outlier(distances, samples.num_seconds, settings)


def detect_concatenated(
    samples: NodeSamples, settings: DetectorSettings, denoisers: Mapping[str, Denoiser] | None = None
) -> Outlier | None:
    """Return the outlier by one distance over the windows of all metrics, side by side. Nodes are of one role and phase."""
    series = _scaled(samples)

    def distances(starts: Sequence[int]) -> Distances:
        parts = [windows(one, WINDOW, starts) for one in series]
        if denoisers is not None:
            parts = [denoisers[metric.name].denoise(part) for metric, part in zip(samples.metrics, parts, strict=True)]
        return _compared(mean_distances(torch.cat(parts, 2), settings.distance))

    return find_outlier(distances, samples.num_seconds, settings)


def _scaled(samples: NodeSamples) -> list[torch.Tensor]:
    """Return each metric scaled to [0, 1] and without gaps, [num_nodes, num_seconds]."""
    values = np.moveaxis(samples.values, 2, 0)
    return [torch.from_numpy(fill_gaps(min_max(one)[0]).astype(np.float32)) for one in values]


def _moments(vectors: torch.Tensor) -> torch.Tensor:
    """Return mean, variance, skewness and kurtosis over the last axis, [num_windows, num_nodes, 4]."""
    mean = vectors.mean(2, keepdim=True)
    deviations = vectors - mean
    variance = deviations.square().mean(2)
    spread = variance.clamp(min=1e-12).sqrt()
    powers = [deviations.pow(order).mean(2) / spread**order for order in (3, 4)]
    return torch.stack([mean[:, :, 0], variance, *powers], 2)


def _whitened(features: torch.Tensor) -> torch.Tensor:
    """Return principal components of unit variance: Euclidean distances between them are Mahalanobis distances.

    features: [num_windows, num_nodes, num_features], in double precision. Each is standardized first, as their units differ.
    """
    centered = features - features.mean(1, keepdim=True)
    centered = centered / centered.square().mean(1, keepdim=True).sqrt().clamp(min=1e-9)
    variances, directions = torch.linalg.eigh(centered.transpose(1, 2) @ centered / features.shape[1])
    # Directions come in ascending order of variance; those that hold the rest of it are left out.
    shares = variances.clamp(min=0).cumsum(1) / variances.clamp(min=1e-12).sum(1, keepdim=True)
    scales = torch.where(shares > 1 - _KEPT_VARIANCE, variances.clamp(min=1e-9).rsqrt(), 0.0)
    return (centered @ directions * scales[:, None]).float()


def _compared(means: torch.Tensor) -> Distances:
    return Distances(means, torch.ones_like(means, dtype=torch.bool))
