"""A worker that fails ends, whatever its records do."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from megatron_dapo.config.schema import RunConfig
from megatron_dapo.run import worker
from megatron_dapo.watch.verdict import WatchLimits

RECIPE = """
[model]
path = "{directory}/no_model"
[data]
train_paths = ["{directory}/no_data.jsonl"]
[run]
output_dir = "{directory}/run"
"""


def run_worker(directory: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    recipe = directory / "recipe.toml"
    recipe.write_text(RECIPE.format(directory=directory))
    command = [sys.executable, "-m", "megatron_dapo.run.worker", str(recipe)]
    environment = {**os.environ, **variables}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_a_failure_is_one_line_and_its_traceback_is_on_record(tmp_path: Path) -> None:
    done = run_worker(tmp_path)
    [first] = [line for line in done.stderr.splitlines() if line.startswith("first failure")]
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "attempt 1, rank 0 (" in first and "no_model" in first
    [entry] = json.loads((tmp_path / "run" / "failure.json").read_text())["entries"]
    assert entry["cause"] == "exception" and "no_model" in entry["message"] and "Traceback" in entry["detail"]


def test_a_rendezvous_port_in_use_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        done = run_worker(tmp_path, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    [first] = [line for line in done.stderr.splitlines() if line.startswith("first failure")]
    assert done.returncode == 75 and "Traceback" not in done.stderr, done.stderr
    assert f"MASTER_PORT is {port}, which rank 0 cannot open on 127.0.0.1 (Address already in use)" in first


def test_a_failure_whose_record_cannot_be_written_ends_the_process(tmp_path: Path) -> None:
    """A FIFO without a reader stands in for a hung file system: opening it to write blocks."""
    (tmp_path / "run").mkdir()
    os.mkfifo(tmp_path / "run" / "failure_node_0.tmp")
    done = run_worker(tmp_path)
    assert done.returncode == 1 and "first failure: attempt 1, rank 0" in done.stderr and "no_model" in done.stderr
    assert "the record could not be written" in done.stderr
    assert not (tmp_path / "run" / "failure.json").exists()


def test_the_watcher_has_the_limits_of_the_configuration() -> None:
    run = RunConfig(hang_timeout_seconds=60.0, node_timeout_seconds=45.0, stopped_timeout_seconds=20.0)
    limits = worker.watch_limits(run)
    assert (limits.stalled_s, limits.node_s, limits.stopped_s) == (60.0, 45.0, 20.0)
    assert worker.watch_limits(RunConfig()) == WatchLimits(), "defaults are said twice"


def test_the_address_of_a_gpu_is_that_of_sysfs() -> None:
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x9D, pci_device_id=0)
    assert worker.pci_address(properties) == "0000:9d:00.0"
    assert worker.pci_address(SimpleNamespace(name="of an older torch")) == ""
