"""Files of a run's nodes: what is written is read again, and damaged lines are left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_dapo.nodes.records import (
    ALERTS,
    alert_line,
    parse_lines,
    read_alerts,
    read_nodes,
)
from megatron_dapo.nodes.samples import NodeAlert, NodeSample
from tests.node_lines import header_line, sample_line

NAMES = ("cpu_usage", "gpu_power")
SAMPLE = NodeSample(1763924000.25, {"cpu_usage": 0.5}, "train", 3)


def test_a_sample_comes_back_as_it_was_written() -> None:
    found = parse_lines([header_line(2, "host", "train", NAMES), sample_line(SAMPLE, NAMES)])
    assert (found.node, found.name, found.role, list(found.samples)) == (2, "host", "train", [SAMPLE])


def test_lines_cut_short_and_lines_of_other_kinds_are_left_out() -> None:
    line = sample_line(SAMPLE, NAMES)
    lines = [header_line(0, "host", "train", NAMES), line[:20], "[1]", "", '{"v": [1]}', line]
    assert list(parse_lines(lines).samples) == [SAMPLE]


def test_a_second_header_changes_the_order() -> None:
    swapped = NAMES[::-1]
    lines = [header_line(0, "host", "train", NAMES), sample_line(SAMPLE, NAMES)]
    lines += [header_line(0, "host", "train", swapped), sample_line(SAMPLE, swapped)]
    assert list(parse_lines(lines).samples) == [SAMPLE, SAMPLE]


def test_a_directory_with_rotated_files(tmp_path: Path) -> None:
    header = header_line(10, "late", "train", NAMES)
    (tmp_path / "node_10.jsonl").write_text(header + sample_line(NodeSample(9.0, {}), NAMES))
    (tmp_path / "node_10.jsonl.1").write_text(header + sample_line(NodeSample(8.0, {}), NAMES))
    (tmp_path / "node_2.jsonl").write_text(header_line(2, "early", "train", NAMES))
    found = read_nodes(tmp_path)
    assert [(one.name, [sample.time for sample in one.samples]) for one in found] == [("early", []), ("late", [8, 9])]


def test_alerts_come_back(tmp_path: Path) -> None:
    alert = NodeAlert("node1", "cpu_usage", 100.0, 30.0, 0.9, 0.2, 0.8)
    assert read_alerts(tmp_path) == []
    (tmp_path / ALERTS).write_text(alert_line(alert) + "{cut")
    assert read_alerts(tmp_path) == [alert]
    assert str(alert) == "node1: cpu_usage 0.2 where the others have 0.8, for 30 s, score 0.90"
    (tmp_path / ALERTS).write_text('{"another": 1}')
    with pytest.raises(ValueError, match="not alerts of this version"):
        read_alerts(tmp_path)


def test_a_directory_without_samples_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no node_K.jsonl"):
        read_nodes(tmp_path)
    with pytest.raises(ValueError, match="no header line"):
        parse_lines([sample_line(SAMPLE, NAMES)])
