"""The order of metrics by a decision tree."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.node_faults.prioritization import largest_scores, prioritize
from megatron_dapo.nodes.samples import NodeMetric, NodeSamples


def test_the_metric_that_tells_most_faults_comes_first() -> None:
    rng = np.random.default_rng(0)
    is_faulty = np.arange(400) < 200
    scores = rng.uniform(1, 2, (400, 4))
    scores[:170, 2] += 5  # shows in most faults
    scores[170:200, 0] += 5  # in the rest of them
    assert prioritize(scores, is_faulty)[:2] == [2, 0]
    assert sorted(prioritize(scores, is_faulty)) == [0, 1, 2, 3]


def test_metrics_without_any_use_keep_their_order() -> None:
    scores = np.ones((20, 3))
    assert prioritize(scores, np.arange(20) < 10) == [0, 1, 2]


def test_windows_of_one_kind_are_refused() -> None:
    with pytest.raises(ValueError, match="0 of 5 windows have a fault"):
        prioritize(np.ones((5, 2)), np.zeros(5, bool))


def test_largest_scores_are_those_of_the_outlier() -> None:
    values = np.zeros((5, 24, 2), np.float32)
    values[3, 8:16, 1] = 1
    metrics = (NodeMetric("one", "", 0.0), NodeMetric("two", "", 0.0))
    nodes = tuple("abcde")
    found = largest_scores(NodeSamples(nodes, ("train",) * 5, metrics, values, np.zeros((5, 24), int)), 8)
    np.testing.assert_allclose(found, [[0, 0], [0, 2], [0, 0]], atol=1e-6)  # sqrt(n - 1)
