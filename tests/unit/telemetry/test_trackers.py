"""Weights & Biases and MLflow, the real packages without a network: metrics, settings, and a resumed run that is the same run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dapo.files.durable import HERE
from megatron_dapo.telemetry.trackers import open_trackers

# In a separate process: the packages are in a directory next to the environment, and wandb starts a service.
PROGRAM = """
import json, sys
from pathlib import Path
from megatron_dapo.files.durable import HERE
from megatron_dapo.telemetry.trackers import open_trackers
run, name, first, last = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
(writer,) = open_trackers((name,), run, "made", {"optimizer.learning_rate": 1e-6, "run.name": "made"}, HERE)
for step in range(first, last + 1):
    writer.write(step, {"actor/loss": 100.0 * first + step, "reward/mean": float("nan")})
writer.close()
print(json.loads((run / "trackers.json").read_text())[name])
"""


def track(repository: Path, run: Path, name: str, first: int, last: int) -> str:
    """Write steps `first` to `last` as one start of a run does; return the run's name at the tracker."""
    packages = repository / ".venv-trackers"
    if not (packages / name).is_dir():
        pytest.skip(f"no {name} at {packages}: run make .venv-trackers")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(packages), str(repository)]),
        "WANDB_MODE": "offline",
        "WANDB_ERROR_REPORTING": "false",
        "MLFLOW_TRACKING_URI": "",
    }
    command = [sys.executable, "-c", PROGRAM, str(run), name, str(first), str(last)]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1]


def test_mlflow_continues_its_run(repository: Path, tmp_path: Path) -> None:
    identity = track(repository, tmp_path, "mlflow", 1, 3)
    assert track(repository, tmp_path, "mlflow", 3, 4) == identity
    (run,) = [path.parent for path in tmp_path.glob("mlruns/*/*/meta.yaml")]
    assert run.name == identity
    points = [line.split() for line in (run / "metrics" / "actor" / "loss").read_text().splitlines()]
    assert [(int(step), float(value)) for _, value, step in points] == [
        (1, 101.0),
        (2, 102.0),
        (3, 103.0),
        (3, 303.0),
        (4, 304.0),
    ]
    assert (run / "params" / "optimizer.learning_rate").read_text() == "1e-06"
    assert not (run / "metrics" / "reward").exists(), "a value that is not finite is left out"


def test_wandb_continues_its_run(repository: Path, tmp_path: Path) -> None:
    identity = track(repository, tmp_path, "wandb", 1, 3)
    assert track(repository, tmp_path, "wandb", 3, 4) == identity
    # Two records of one run, which `wandb sync` joins.
    assert len(list(tmp_path.glob(f"wandb/offline-run-*-{identity}"))) == 2
    content = b"".join(path.read_bytes() for path in sorted(tmp_path.glob(f"wandb/offline-run-*-{identity}/*.wandb")))
    assert b"actor/loss" in content and b"optimizer.learning_rate" in content


def test_a_missing_package_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"telemetry.trackers has 'wandb'.*pip install 'megatron-dapo\[wandb\]'"):
        open_trackers(("wandb",), tmp_path, "x", {}, HERE)
    assert open_trackers((), tmp_path, "x", {}, HERE) == []
    assert not (tmp_path / "trackers.json").exists()


def test_an_unreadable_record_begins_a_new_run(tmp_path: Path) -> None:
    from megatron_dapo.telemetry.trackers import _known_runs

    (tmp_path / "trackers.json").write_text("[")
    assert _known_runs(tmp_path) == {}
    (tmp_path / "trackers.json").write_text(json.dumps({"wandb": "abc"}))
    assert _known_runs(tmp_path) == {"wandb": "abc"}
