"""The watch over nodes: what it reads, who is slow, what it tells rank 0, and what that does."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_dapo.nodes.records import read_alerts
from megatron_dapo.nodes.samples import NodeSample
from megatron_dapo.nodes.watch import NodeFile, NodeWatch, RunWatch, WatchSettings, find_stragglers
from megatron_dapo.telemetry.metrics import STEP_METRICS
from megatron_dapo.trainer.metrics import node_metrics
from megatron_dapo.watch.attempts import ATTEMPTS, begin_attempt, excluded_nodes
from tests.node_lines import header_line, sample_line

METRICS = ("cpu_throttled", "cpu_usage")
PHASES = ("generate", "train")


def settings(
    directory: Path, num_nodes: int = 4, action: str = "warn", phases: Sequence[str] = PHASES, has_detector: bool = True
) -> WatchSettings:
    return WatchSettings(str(directory), 1, num_nodes, 5.0, 30.0, 2.0, action, phases, has_detector)


def write_node(
    directory: Path, node: int, start: float, throttled: Sequence[float], name: str = "", mode: str = "w"
) -> None:
    """Write a second of samples for each value; nodes are otherwise alike."""
    (directory / "nodes").mkdir(exist_ok=True)
    with open(directory / "nodes" / f"node_{node}.jsonl", mode) as stream:
        stream.write(header_line(node, name or f"node{node}", "policy", METRICS))
        for second, value in enumerate(throttled):
            values = {"cpu_throttled": value, "cpu_usage": 0.3 + 0.01 * ((second + node) % 3)}
            stream.write(sample_line(NodeSample(start + second, values, "train", second), METRICS))


def test_the_slowest_rank_of_each_phase_and_how_much_it_is_over_the_median() -> None:
    worked = {
        0: {"generate": 3.0, "train": 1.0},
        1: {"generate": 1.0, "train": 1.0},
        2: {"generate": 1.0, "train": 2.5},
        3: {"train": 1.0, "other": 9.0},
    }
    found = find_stragglers(worked, {rank: f"node{rank}" for rank in worked}, ("generate", "train", "offload"), 10.0)
    assert [(each.phase, each.rank, each.node) for each in found] == [("generate", 0, "node0"), ("train", 2, "node2")]
    assert [each.over_median for each in found] == [2.0, 1.5]


def test_phases_that_are_short_or_of_one_rank_are_not_compared() -> None:
    assert find_stragglers({0: {"train": 9.0}}, {0: "a"}, PHASES, 10.0) == []
    assert find_stragglers({0: {"train": 0.05}, 1: {"train": 0.01}}, {0: "a", 1: "b"}, PHASES, 10.0) == []


def test_a_throttled_node_is_named_once(tmp_path: Path) -> None:
    start = float(int(time.time()))  # samples have milliseconds
    for node in range(4):
        write_node(tmp_path, node, start, [0.8 if node == 2 and second > 20 else 0.0 for second in range(70)])
    watch = RunWatch(settings(tmp_path), start)
    watch.read(start + 60)
    told = watch.look(start + 70)
    assert [(alert["node"], alert["metric"]) for alert in told["alerts"]] == [("node2", "cpu_throttled")]
    assert told["exclude"] == "" and watch.look(start + 71)["alerts"] == [], "an alert that lasts is no news"
    (alert,) = read_alerts(tmp_path / "nodes")
    assert alert.node == "node2" and 10 <= alert.since - start <= 25 and alert.score > 0.9
    (record,) = [json.loads(line) for line in (tmp_path / ATTEMPTS).read_text().splitlines() if line]
    assert (record["alert"]["node"], record["excluded"]) == ("node2", "")


def test_nodes_that_are_alike_and_fewer_than_four_have_no_alert(tmp_path: Path) -> None:
    start = float(int(time.time()))
    for node in range(4):
        write_node(tmp_path, node, start, [0.0] * 70)
    assert RunWatch(settings(tmp_path), start).look(start + 70)["alerts"] == []
    write_node(tmp_path, 2, start, [0.9] * 70)
    assert RunWatch(settings(tmp_path, 3), start).look(start + 70)["alerts"] == []


def test_stragglers_and_the_detector_are_separate_switches(tmp_path: Path) -> None:
    start = float(int(time.time()))
    for node in range(4):
        write_node(tmp_path, node, start, [0.8 * (node == 1)] * 70)
        with open(tmp_path / "nodes" / f"node_{node}.jsonl", "a") as stream:
            line = {"t": start, "seconds_of_ranks": {str(node): {"train": [9.0, 1.0 + (node == 3)]}}}
            stream.write(json.dumps(line) + "\n")
    ranks = RunWatch(settings(tmp_path, has_detector=False), start).look(start + 70)
    nodes = RunWatch(settings(tmp_path, phases=()), start).look(start + 70)
    assert ([each["rank"] for each in ranks["stragglers"]], ranks["alerts"]) == ([3], [])
    assert (nodes["stragglers"], [each["node"] for each in nodes["alerts"]]) == ([], ["node1"])


def test_a_node_to_be_left_out_is_on_record_for_its_job(tmp_path: Path) -> None:
    start = float(int(time.time()))
    begin_attempt(tmp_path, 1, "17")
    for node in range(4):
        write_node(tmp_path, node, start, [0.8 * (node == 1)] * 70)
    assert RunWatch(settings(tmp_path, action="exclude"), start).look(start + 70)["exclude"] == "node1"
    assert excluded_nodes(tmp_path, "17") == ["node1"] and excluded_nodes(tmp_path, "18") == []


def test_a_file_is_read_as_it_grows_and_after_it_was_replaced(tmp_path: Path) -> None:
    start = float(int(time.time()))
    path = tmp_path / "nodes" / "node_0.jsonl"
    file = NodeFile(path, start)
    file.read(start)
    assert not file.series.samples
    write_node(tmp_path, 0, start - 2, [0.0] * 4)  # two are of an attempt before
    with open(path, "a") as stream:
        stream.write('{"t": 1, "torn')
    file.read(start)
    assert [sample.time for sample in file.series.samples] == pytest.approx([start, start + 1], abs=0.01)
    with open(path, "a") as stream:
        stream.write("\n" + json.dumps({"t": start + 2, "seconds_of_ranks": {"5": {"train": [2.0, 1.0]}}}) + "\n")
    file.read(start)
    assert len(file.series.samples) == 2 and file.seconds == {5: {"train": [2.0, 1.0]}}
    path.replace(path.with_name("node_0.jsonl.1"))
    write_node(tmp_path, 0, start + 3, [0.0] * 3)
    file.read(start + 1)
    assert len(file.series.samples) == 3, "a header begins anew"


def test_the_report_covers_the_time_since_the_last_look(tmp_path: Path) -> None:
    start = float(int(time.time()))
    for look, seconds in enumerate(((2.0, 2.0), (3.0, 5.0))):
        for node, worked in enumerate(seconds):
            write_node(tmp_path, node, start, [0.0], mode="a")
            line = {"t": start + look, "seconds_of_ranks": {str(node): {"train": [9.0, worked]}}}
            with open(tmp_path / "nodes" / f"node_{node}.jsonl", "a") as stream:
                stream.write(json.dumps(line) + "\n")
        if look == 0:
            watch = RunWatch(settings(tmp_path, 2), start)
        told = watch.look(start + look)
    (straggler,) = told["stragglers"]
    assert (straggler["phase"], straggler["rank"], straggler["seconds"], straggler["median"]) == ("train", 1, 3.0, 2.0)
    assert json.loads((tmp_path / "nodes" / "stragglers.json").read_text()) == told["stragglers"]


def test_metrics_of_the_report_are_those_of_the_schema() -> None:
    names = {name for name in STEP_METRICS if name.startswith("nodes/")}
    found = node_metrics(2, [{"phase": "train", "rank": 7, "over_median": 0.25}])
    assert set(found) == names == set(node_metrics())
    assert (found["nodes/alerts"], found["nodes/train_slowest_rank"], found["nodes/train_over_median"]) == (2, 7, 0.25)
    assert (found["nodes/generate_slowest_rank"], found["nodes/generate_over_median"]) == (-1, 0.0)


def test_rank_0_hears_of_an_alert_and_stops_where_a_node_is_to_be_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[int, int]] = []
    watch = NodeWatch(settings(tmp_path))
    try:
        pid = watch._process.pid
        monkeypatch.setattr(os, "kill", lambda *arguments: sent.append(arguments))
        watch.hear({"alerts": [{"text": "node3: cpu_usage 1"}], "stragglers": [], "exclude": ""})
        assert watch.num_alerts == 1 and sent == [] and "faulty node: node3: cpu_usage 1" in caplog.text
        watch.hear({"alerts": [{"text": "node3: cpu_usage 1"}], "stragglers": [], "exclude": "node3"})
        assert sent == [(os.getpid(), signal.SIGTERM)] and "node3 is to be left out" in caplog.text
        watch.hear({"problem": "the disk is full"})
        assert "the disk is full" in caplog.text and Path(f"/proc/{pid}").exists()
    finally:
        monkeypatch.undo()
        watch.close()
    assert not Path(f"/proc/{pid}").exists()
