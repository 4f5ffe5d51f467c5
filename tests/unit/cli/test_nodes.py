"""`megatron-dapo nodes` on the files of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from megatron_dapo.cli.main import app
from megatron_dapo.nodes.records import ALERTS, alert_line
from megatron_dapo.nodes.samples import NodeAlert, NodeSample
from tests.node_lines import header_line, sample_line

NAMES = ("cpu_usage", "own_metric")


def write_run(run: Path, num_seconds: int, slow: int = -1, num_nodes: int = 4) -> Path:
    (run / "nodes").mkdir(parents=True)
    for node in range(num_nodes):
        lines = [header_line(node, f"host{node}", "train", NAMES)]
        for second in range(num_seconds):
            usage = (0.1 if node == slow else 0.6) + 0.001 * ((second * (node + 3)) % 7)
            values = {"cpu_usage": usage, "own_metric": 1.0}
            lines.append(sample_line(NodeSample(1000.0 + second, values, "train", 1), NAMES))
        (run / "nodes" / f"node_{node}.jsonl").write_text("".join(lines))
    return run


def nodes(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["nodes", *map(str, arguments)])


def test_a_run_of_one_node_has_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    found = nodes(tmp_path)
    assert found.exit_code == 2 and "runs of one node have none" in " ".join(found.output.split())


def test_a_healthy_run(tmp_path: Path) -> None:
    found = nodes(write_run(tmp_path / "run", 300))
    assert found.exit_code == 0 and "no node stands out" in found.output and "host3 |" in found.output
    assert (tmp_path / "run/nodes/timeline.svg").read_text().startswith("<svg")


def test_a_run_in_which_a_node_stands_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 100, slow=2)
    found = nodes(run, "--continuity", "30", "--svg", tmp_path / "picture.svg", "--json")
    assert found.exit_code == 1
    (alert,) = json.loads(found.output)["alerts"]
    assert (alert["node"], alert["metric"], alert["since"]) == ("host2", "cpu_usage", 1000.0)
    assert "host2: cpu_usage" in (tmp_path / "picture.svg").read_text()
    shown = nodes(run, "--continuity", "30").output
    assert "(not recorded by the run; found now)" in shown and "!!!" in shown


def test_alerts_that_the_run_recorded_are_shown(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 100)
    (run / "nodes" / ALERTS).write_text(alert_line(NodeAlert("host1", "cpu_usage", 1050.0, 20.0, 0.8, 0.1, 0.6)))
    found = nodes(run)
    assert found.exit_code == 1 and "host1: cpu_usage 0.1 where the others have 0.6, for 20 s" in found.output


def test_a_short_run_says_so(tmp_path: Path) -> None:
    found = nodes(write_run(tmp_path / "run", 5))
    assert found.exit_code == 0
    assert "5 s of samples: too short to look for a faulty node, which needs 120 s" in found.output


def test_another_metric(tmp_path: Path) -> None:
    found = nodes(write_run(tmp_path / "run", 20), "--metric", "own_metric")
    assert found.exit_code == 0 and found.output.startswith("own_metric ()")


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 0)
    empty = tmp_path / "empty"
    empty.mkdir()
    full = write_run(tmp_path / "full", 5)
    for arguments, message in (
        ((empty,), "has no node_K.jsonl"),
        ((run,), "4 nodes have no sample yet"),
        ((full, "--metric", "x"), "metric 'x' has no samples: choose one of cpu_usage, own_metric"),
        ((full, "--svg", tmp_path / "none/picture.svg"), "No such file or directory"),
    ):
        found = nodes(*arguments)
        assert found.exit_code == 2 and message in found.output and found.output.count("\n") == 1


@pytest.mark.parametrize("line", ["", "{}", '{"metrics": 3}'])
def test_damaged_files_are_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "nodes").mkdir()
    (tmp_path / "nodes" / "node_0.jsonl").write_text(line + "\n")
    found = nodes(tmp_path)
    assert found.exit_code == 2 and "node_0.jsonl" in found.output and found.output.count("\n") == 1
