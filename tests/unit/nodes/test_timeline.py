"""The picture of a run's nodes."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from megatron_dapo.nodes.samples import NodeAlert, NodeMetric, NodeSamples
from megatron_dapo.nodes.timeline import NodeTimeline, timeline, to_lines, to_svg

CPU, DISK = NodeMetric("cpu_usage", "share", 0.05), NodeMetric("disk_rate", "bytes/s", 100.0)
ALERT = NodeAlert("node2", "cpu_usage", 140.0, 30.0, 0.9, 0.1, 0.6)


def samples(num_nodes: int = 4, num_seconds: int = 120) -> NodeSamples:
    values = np.full((num_nodes, num_seconds, 2), 0.6, np.float32)
    values[2:3, 40:70, 0] = 0.1
    nodes = tuple(f"node{node}" for node in range(num_nodes))
    phases = np.zeros((num_nodes, num_seconds), int)
    return NodeSamples(nodes, ("train",) * num_nodes, (DISK, CPU)[::-1], values, phases, 100.0)


def elements(found: NodeTimeline, tag: str) -> list[ElementTree.Element]:
    return [element for element in ElementTree.fromstring(to_svg(found)).iter() if element.tag.endswith(tag)]


def test_the_metric_is_the_alerts_or_the_one_in_which_a_node_differs_most() -> None:
    assert timeline(samples()).metric == "cpu_usage"
    assert timeline(samples(), [NodeAlert("node1", "disk_rate", 0, 1, 1, 0, 0)]).metric == "disk_rate"
    assert timeline(samples(), [ALERT], "disk_rate").metric == "disk_rate"


def test_the_node_of_an_alert_is_marked() -> None:
    found = timeline(samples(), [ALERT], num_points=60)
    assert (found.seconds_per_point, found.seconds, found.values.shape) == (2, 120, (4, 60))
    curves = elements(found, "polyline")
    assert [curve.get("stroke") == "#cf222e" for curve in curves] == [False, False, True, False]
    marks = [each for each in elements(found, "rect") if each.get("fill-opacity")]
    assert len(marks) == 1 and float(marks[0].get("width", 0)) == pytest.approx(30 / 120 * 720)
    lines = to_lines(found)
    assert lines[3] == "node2 |" + " " * 20 + "!" * 15 + " " * 25 + "| mean 0.475"
    assert lines[1] == "node0 |" + " " * 60 + "| mean 0.6"


def test_a_deviation_without_an_alert_is_dense() -> None:
    assert to_lines(timeline(samples(), num_points=60))[3].count("#") == 15


def test_gaps_cut_curves() -> None:
    found = samples(num_seconds=20)
    found.values[1, 5:10] = np.nan
    found.values[1, 12:20] = np.nan
    found.values[3] = np.nan
    drawn = timeline(found, metric="cpu_usage")
    assert len(elements(drawn, "polyline")) == 4  # two pieces of node1, none of node3
    assert to_lines(drawn)[4].endswith("|" + "?" * 20 + "| mean nan")


def test_of_many_nodes_those_farthest_away_are_shown() -> None:
    found = samples(100)
    found.values[90, :, 0] = 0.2
    drawn = timeline(found, [NodeAlert("node70", "cpu_usage", 100, 10, 1, 0, 0)])
    assert len(drawn.nodes) == 48 and {"node2", "node70", "node90"} < set(drawn.nodes)
    assert to_lines(drawn)[-1] == "52 nodes nearer to the others are not shown"


def test_one_node_and_one_second() -> None:
    drawn = timeline(samples(1, 1))
    assert len(elements(drawn, "circle")) == 1 and len(to_lines(drawn)) == 2


def test_a_metric_without_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="metric 'gpu_power' has no samples: choose one of cpu_usage, disk_rate"):
        timeline(samples(), metric="gpu_power")
    found = samples()
    found.values[:] = np.nan
    with pytest.raises(ValueError, match="4 nodes in 120 s have no value of any metric"):
        timeline(found)
