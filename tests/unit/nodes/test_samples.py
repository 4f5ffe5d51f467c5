"""Samples of nodes on one clock."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_dapo.nodes.samples import METRICS, PUBLISHED_ORDER, NodeMetric, NodeSample, NodeSeries, align

CPU = NodeMetric("cpu_usage", "share", 0.05)


def series(node: int, times: list[float], role: str = "train", phase: str = "train") -> NodeSeries:
    samples = [NodeSample(time, {"cpu_usage": time / 100}, phase) for time in times]
    return NodeSeries(node, f"node{node}", role, samples)


def test_seconds_of_all_nodes_are_columns() -> None:
    found = align([series(0, [10.2, 11.9, 12.0]), series(1, [10.9, 12.4])], [CPU], 3)
    assert found.start == 10 and found.values.shape == (2, 3, 1)
    assert np.allclose(found.values[0, :, 0], [0.102, 0.119, 0.12])
    assert np.isnan(found.values[1, 1, 0]) and found.values[1, 2, 0] == pytest.approx(0.124)
    assert found.phases.tolist() == [[0, 0, 0], [0, -1, 0]]


def test_the_newest_sample_of_a_second_counts_and_older_ones_than_the_window_do_not() -> None:
    found = align([series(0, [1.0, 10.1, 10.8])], [CPU], 2)
    assert np.isnan(found.values[0, 0, 0]) and found.values[0, 1, 0] == pytest.approx(0.108)


def test_a_metric_that_a_node_lacks_is_a_gap() -> None:
    found = align([series(0, [10.0])], [CPU, NodeMetric("gpu_power", "W", 1.0)], 1)
    assert np.isnan(found.values[0, 0, 1])


def test_an_end_in_the_past_leaves_newer_samples_out() -> None:
    found = align([series(0, [10.0, 11.0, 12.0])], [CPU], 2, end=11.5)
    assert found.values[0, :, 0].tolist() == pytest.approx([0.1, 0.11])


def test_bad_input_is_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match="none of 1 nodes has a sample"):
        align([series(0, [])], [CPU], 3)
    with pytest.raises(ValueError, match="0 seconds"):
        align([series(0, [1.0])], [CPU], 0)


def test_metrics_are_in_the_published_order() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names) and tuple(name for name in names if name in PUBLISHED_ORDER) == PUBLISHED_ORDER
