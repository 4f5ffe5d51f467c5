"""The detector: finds the node, the metric and the time; keeps quiet when it must; equals a search of every window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_dapo.nodes.denoiser import reference_denoisers
from megatron_dapo.nodes.detection import DetectorSettings, Distances, detect, find_outlier
from megatron_dapo.nodes.samples import NodeMetric, NodeSamples

CPU, DISK = NodeMetric("cpu_usage", "share", 0.05), NodeMetric("disk_rate", "bytes/s", 1.0)
SHORT = DetectorSettings(continuity_s=30)


def healthy(num_nodes: int = 6, num_seconds: int = 120, num_metrics: int = 1, seed: int = 0) -> NodeSamples:
    noise = np.random.default_rng(seed).normal(0, 0.02, (num_nodes, num_seconds, num_metrics))
    pattern = 0.1 * np.sin(np.arange(num_seconds) / 3)[None, :, None]
    return NodeSamples(
        tuple(f"node{node}" for node in range(num_nodes)),
        ("train",) * num_nodes,
        (CPU, DISK)[:num_metrics],
        (0.6 + pattern + noise).astype(np.float32),
        np.zeros((num_nodes, num_seconds), np.int32),
        start=1000.0,
    )


@pytest.mark.parametrize("distance", ["euclidean", "manhattan", "chebyshev"])
@pytest.mark.parametrize("num_nodes", [4, 16, 300])
def test_the_faulty_node_is_named(num_nodes: int, distance: str) -> None:
    samples = healthy(num_nodes)
    samples.values[1, 50:100] = 0.1
    found = detect(samples, DetectorSettings(continuity_s=30, distance=distance), reference_denoisers())
    assert found is not None and (found.node, found.metric) == ("node1", "cpu_usage")
    assert 1000 + 50 - 8 <= found.since <= 1000 + 56 and found.seconds == 32
    assert 0.5 < found.score <= 1 and found.value < 0.3 and found.others == pytest.approx(0.6, abs=0.05)


def test_a_fault_shorter_than_the_continuity_is_none() -> None:
    samples = healthy()
    samples.values[1, 50:70] = 0.1
    assert detect(samples, SHORT) is None


def test_continuity_starts_again_after_an_interruption() -> None:
    samples = healthy(num_seconds=150)
    samples.values[1, 40:60] = samples.values[1, 75:95] = 0.1
    assert detect(samples, SHORT) is None
    samples.values[1, 75:110] = 0.1
    found = detect(samples, SHORT)
    assert found is not None and 1000 + 67 <= found.since <= 1000 + 76


def test_a_disturbance_elsewhere_does_not_end_continuity() -> None:
    samples = healthy(20)
    samples.values[1, 40:80] -= 0.3
    samples.values[7, 55:60] -= 0.45
    assert getattr(detect(samples, SHORT), "node", None) == "node1"


def test_nodes_that_deviate_together_are_victims_and_the_first_one_is_the_cause() -> None:
    samples = healthy(60, 200)
    samples.values[10:14, 90:160] = 0.3
    assert detect(samples, SHORT) is None
    assert getattr(detect(samples, replace(SHORT, group_s=0)), "node", None) == "node10"
    samples.values[1, 40:160] = 0.3
    assert getattr(detect(samples, SHORT), "node", None) == "node1"
    samples.values[1] = samples.values[2]
    samples.values[1, 160:] = 0.3  # long after the others
    assert getattr(detect(samples, SHORT), "node", None) == "node1"


def test_metrics_are_tried_in_their_order() -> None:
    samples = healthy(num_metrics=2)
    samples.values[2, 40:90, 1] = 9.0
    assert getattr(detect(samples, SHORT), "metric", None) == "disk_rate"
    samples.values[3, 40:90, 0] = 0.0
    assert getattr(detect(samples, SHORT), "node", None) == "node3"


def test_identical_nodes_and_differences_below_the_resolution_are_none() -> None:
    samples = healthy()
    samples.values[:] = samples.values[:1]
    assert detect(samples, SHORT) is None and detect(samples, SHORT, reference_denoisers()) is None
    samples.values[1] += 0.01
    assert detect(samples, SHORT) is None
    samples.values[1] += 0.2
    assert detect(samples, SHORT) is not None


def test_healthy_nodes_are_none() -> None:
    denoisers = reference_denoisers()
    for seed in range(10):
        assert detect(healthy(4, 200, seed=seed), SHORT, denoisers) is None


@pytest.mark.parametrize("num_nodes", [1, 2, 3])
def test_too_few_nodes_are_none(num_nodes: int) -> None:
    samples = healthy(num_nodes)
    samples.values[0] = 0
    assert detect(samples, SHORT) is None


def test_less_than_the_continuity_is_none() -> None:
    samples = healthy(num_seconds=SHORT.seconds_needed - 1)
    samples.values[1] = 0
    assert detect(samples, SHORT) is None
    samples = healthy(num_seconds=SHORT.seconds_needed)
    samples.values[1] = 0
    assert detect(samples, SHORT) is not None


def test_gaps_and_nodes_without_samples() -> None:
    samples = healthy(8)
    samples.values[1, 50:100] = 0.1
    samples.values[np.random.default_rng(0).random(samples.values.shape) < 0.2] = np.nan
    samples.values[5] = np.nan
    found = detect(samples, SHORT, reference_denoisers())
    assert found is not None and found.node == "node1"
    samples.values[:] = np.nan
    assert detect(samples, SHORT) is None


def test_a_node_whose_samples_end_is_not_compared_any_more() -> None:
    samples = healthy(8, 200)
    samples.values[3, 45:50] = 0.1
    samples.values[3, 50:] = np.nan  # filled only with its last sample, it would be an outlier for ever
    assert detect(samples, SHORT) is None


def test_nodes_of_other_roles_are_not_compared() -> None:
    samples = healthy(8)
    samples.values[:3] = 0.1 + 0.2 * samples.values[:3]
    roles = ("rollout",) * 3 + ("train",) * 5
    divided = NodeSamples(samples.nodes, roles, samples.metrics, samples.values, samples.phases)
    assert detect(divided, SHORT) is None
    samples.values[6, 40:90] = 0.1
    assert getattr(detect(divided, SHORT), "node", None) == "node6"
    alone = NodeSamples(samples.nodes, ("rollout", *["train"] * 7), samples.metrics, samples.values, samples.phases)
    assert getattr(detect(alone, SHORT), "node", None) != "node0"


def test_seconds_in_other_phases_are_not_compared() -> None:
    """A node that is idle because it waits in another phase is healthy; the same in the same phase is a fault."""
    samples = healthy(6)
    samples.values[2, 40:90] = 0.1
    samples.phases[2, 40:90] = 1
    assert detect(samples, SHORT) is None
    samples.phases[:, 40:90] = 1
    assert getattr(detect(samples, SHORT), "node", None) == "node2"
    samples.phases[:] = -1
    assert detect(samples, SHORT) is None


@pytest.mark.parametrize("need", [1, 3, 7, 20])
@pytest.mark.parametrize("group_s", [0, 8, 40])
def test_the_search_equals_one_node_after_another(need: int, group_s: int) -> None:
    settings = DetectorSettings(continuity_s=8 * need, threshold=9.0, group_s=group_s)
    num_found = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        means = torch.full((60, 12), 0.1)
        for _ in range(6):  # stretches in which a node is far away
            node, first, length = rng.integers(12), rng.integers(60), rng.integers(1, 30)
            means[first : first + length, node] = float(rng.uniform(1, 3))
        far, spread = means.mean(1, keepdim=True), means.std(1, keepdim=True, correction=0)
        is_candidate = ((means - far) / spread > 0.5 * 11**0.5).tolist()
        expected = first_alone(is_candidate, need, min(need, group_s // 8))
        found = find_outlier(lambda starts, means=means: at(means, starts), 60 * 8 + 7, settings)
        assert (found and (found.first // 8, found.node)) == expected
        assert found is None or found.last == found.first + 8 * (need - 1)
        num_found += found is not None
    assert num_found > 5


def test_windows_that_no_run_reaches_are_not_compared() -> None:
    """One window in five is compared, and all of them only around a node that lasts."""
    compared: list[int] = []

    def distances(starts: Sequence[int]) -> Distances:
        compared.extend(start // 8 for start in starts)
        return at(means, starts)

    means = torch.full((112, 12), 0.1)
    means[::7, 4] = means[30:43, 5] = 3.0  # often, and two windows short of a run
    assert find_outlier(distances, 112 * 8, DetectorSettings()) is None
    assert sorted(compared) == [*range(4, 112, 5)]
    compared.clear()
    means[60:75, 6] = 3.0
    found = find_outlier(distances, 112 * 8, DetectorSettings())
    assert found is not None and (found.node, found.first // 8) == (6, 60)
    assert sorted(compared) == sorted({*range(4, 112, 5), *range(60, 79)})


def at(means: torch.Tensor, starts: Sequence[int]) -> Distances:
    part = means[[start // 8 for start in starts]]
    return Distances(part, part > 0)


def first_alone(is_candidate: list[list[bool]], need: int, num_first: int) -> tuple[int, int] | None:
    """Return the first run of `need` candidates, as (window, node), that begins with at most one other node's."""
    for end in range(need, len(is_candidate) + 1):
        for node in range(12):
            run = [window[node] for window in is_candidate[end - need : end]]
            begins = end == need or not is_candidate[end - need - 1][node]
            early = is_candidate[end - need : end - need + num_first]
            others = [sum(window[other] for window in early) >= num_first / 2 for other in range(12) if other != node]
            if all(run) and begins and (not num_first or sum(others) <= 1):
                return end - need, node
    return None
