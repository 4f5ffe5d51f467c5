"""Arithmetic of the comparison between nodes: golden values, bounds, and brute force."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_dapo.nodes.comparison import (
    NORMS,
    fill_gaps,
    mean_distances,
    mean_distances_in_phase,
    min_max,
    windows,
    z_scores,
)
from megatron_dapo.nodes.denoiser import WINDOW
from megatron_dapo.nodes.detection import DetectorSettings, Distances, find_outlier

NAN = math.nan


def of_windows(means: torch.Tensor) -> Callable[[Sequence[int]], Distances]:
    """Return the distances of a detector whose windows have these means, [num_windows, num_nodes]."""

    def distances(starts: Sequence[int]) -> Distances:
        part = means[[start // WINDOW for start in starts]]
        return Distances(part, torch.ones_like(part, dtype=torch.bool))

    return distances


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    path = Path(__file__).parents[2] / "golden/golden.json"
    return json.loads(path.read_text(encoding="utf-8"))["systems"]["minder"]


def test_golden_distances_and_scores(golden: dict[str, Any]) -> None:
    vectors = torch.tensor(golden["embeddings"], dtype=torch.float64)[None]
    means = mean_distances(vectors)
    assert (means * 4)[0].tolist() == pytest.approx(golden["sum_dist"], rel=1e-9)
    scores = z_scores(means)[0]
    assert scores.tolist() == pytest.approx(golden["zscore_population"], rel=1e-9)
    assert int(scores.argmax()) == golden["argmax"]


def test_golden_min_max(golden: dict[str, Any]) -> None:
    scaled, spread = min_max(np.array(golden["minmax"]["x"]))
    assert scaled.tolist() == golden["minmax"]["global_metric_minmax"] and spread == 2


@pytest.mark.parametrize("need", [3, 4, 5])
def test_golden_continuity(golden: dict[str, Any], need: int) -> None:
    node, last = golden["continuity"][f"need{need}"]
    windows = golden["continuity"]["candidates_per_window"]
    means = torch.tensor([[float(node == candidate) for node in range(8)] for candidate in windows])
    found = find_outlier(of_windows(means), WINDOW * len(windows), DetectorSettings(WINDOW * need, group_s=0))
    assert (found and (found.node, found.last // WINDOW)) == (None if node is None else (node, last))


def test_no_outlier_scores_more_than_the_bound(golden: dict[str, Any]) -> None:
    for count, bound in golden["max_possible_z"].items():
        num_nodes = int(count)
        vectors = torch.zeros(1, num_nodes, 3, dtype=torch.float64)
        vectors[0, 0] = 1
        largest = float(z_scores(mean_distances(vectors)).max())
        assert largest == pytest.approx(bound if num_nodes > 2 else 0)  # two are as far from each other
        assert bound == pytest.approx(math.sqrt(num_nodes - 1))


def test_golden_identical_nodes_score_nothing(golden: dict[str, Any]) -> None:
    vectors = torch.full((1, 4, 8), 0.3)
    assert z_scores(mean_distances(vectors))[0].tolist() == golden["identical_machines"]


@pytest.mark.parametrize("distance", list(NORMS))
def test_distances_equal_brute_force(distance: str) -> None:
    rng = np.random.default_rng(3)
    vectors, phases = rng.random((2, 7, 5)), rng.integers(-1, 2, (2, 7, 5))
    norm = NORMS[distance]
    found = mean_distances(torch.from_numpy(vectors), distance)
    in_phase, are_compared = mean_distances_in_phase(torch.from_numpy(vectors), torch.from_numpy(phases), distance)
    for window in range(2):
        for node in range(7):
            plain, masked = [], []
            for other in range(7):
                if other == node:
                    continue
                gaps = abs(vectors[window, node] - vectors[window, other])
                plain.append(np.linalg.norm(gaps, norm))
                common = (phases[window, node] == phases[window, other]) & (phases[window, node] >= 0)
                if common.any():
                    share = 1 if norm == math.inf else (common.sum() / 5) ** (1 / norm)
                    masked.append(np.linalg.norm(gaps[common], norm) / share)
            assert float(found[window, node]) == pytest.approx(np.mean(plain))
            assert bool(are_compared[window, node]) == bool(masked)
            assert float(in_phase[window, node]) == pytest.approx(np.mean(masked) if masked else 0)


def test_one_phase_of_all_changes_nothing() -> None:
    vectors = torch.rand(3, 6, 8, generator=torch.Generator().manual_seed(0))
    found, are_compared = mean_distances_in_phase(vectors, torch.ones(3, 6, 8, dtype=torch.int))
    assert torch.allclose(found, mean_distances(vectors), atol=1e-6) and bool(are_compared.all())


def test_many_nodes_are_compared_with_some_of_the_others() -> None:
    vectors = torch.rand(1, 700, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    vectors[0, 3] += 1  # one that is compared with others, but others not with it
    vectors[0, 6] -= 1
    pairs = torch.linalg.vector_norm(vectors[0, :, None] - vectors[0][None], dim=2)
    others = pairs[:, ::3]
    exact = [others[node].sum() / (234 - (node % 3 == 0)) for node in range(700)]
    found = mean_distances(vectors)
    assert torch.allclose(found[0], torch.stack(exact), atol=2e-3)
    whole = z_scores(pairs.sum(1) / 699)
    assert torch.allclose(z_scores(found)[0][[3, 6]], whole[[3, 6]], rtol=0.1)
    assert set(found[0].topk(2).indices.tolist()) == {3, 6}


def test_an_unknown_distance_is_refused() -> None:
    with pytest.raises(ValueError, match="distance 'cosine': choose one of euclidean, manhattan, chebyshev"):
        mean_distances(torch.zeros(1, 3, 2), "cosine")


def test_gaps_take_the_nearest_sample() -> None:
    values = np.array([[NAN, 1, NAN, NAN, 4, NAN], [NAN] * 6, [0, NAN, 2, 3, 4, 5.0], [1, NAN, NAN, NAN, NAN, 6]])
    expected = [[1, 1, 1, 4, 4, 4], [NAN] * 6, [0, 0, 2, 3, 4, 5], [1, 1, 1, 6, 6, 6]]
    np.testing.assert_array_equal(fill_gaps(values), expected)


def test_min_max_keeps_gaps_and_makes_equal_values_zero() -> None:
    scaled, _ = min_max(np.array([[1.0, NAN], [3.0, 2.0]]))
    np.testing.assert_array_equal(scaled, [[0, NAN], [1, 0.5]])
    assert min_max(np.full((2, 3), 7.0)) == (pytest.approx(np.zeros((2, 3))), 0)


def test_windows_are_cut_at_their_starts() -> None:
    values = torch.arange(10.0).reshape(2, 5)
    assert windows(values, 3, [0, 2]).tolist() == [[[0, 1, 2], [5, 6, 7]], [[2, 3, 4], [7, 8, 9]]]


def test_nodes_that_are_not_compared_score_nothing() -> None:
    values, counts = torch.tensor([[1.0, 2, 3, 99]]), torch.tensor([[True, True, True, False]])
    assert z_scores(values, counts)[0].tolist() == pytest.approx([-(1.5**0.5), 0, 1.5**0.5, 0])
