"""Trackers besides TensorBoard: Weights & Biases and MLflow. A resumed run continues its run there.

Both write where their environment variables say (WANDB_MODE=offline, WANDB_BASE_URL, MLFLOW_TRACKING_URI, ...); MLflow
without one writes to the run's directory. trackers.json in the run's directory has the run's name there.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_dapo.files.durable import Files

_RUNS = "trackers.json"
_MAX_PARAMETER = 500  # characters of a value; the limit of MLflow's file store


class WandbWriter:
    """Writes metrics to a run of Weights & Biases, by `train_step` as their axis."""

    def __init__(self, run_directory: Path, name: str, settings: Mapping[str, Any], files: Files) -> None:
        import wandb

        known = _known_runs(run_directory)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "megatron-dapo"),
            name=name,
            id=known.get("wandb"),
            resume="allow",
            dir=str(run_directory),
            config=dict(settings),
            # Leave the run's log and display unchanged.
            settings=wandb.Settings(console="off", silent=True),
        )
        # With its default step counter it would reject steps that a resumed run repeats.
        self._run.define_metric("train_step")
        self._run.define_metric("*", step_metric="train_step")
        _remember(run_directory, known | {"wandb": self._run.id}, files)

    def write(self, train_step: int, values: Mapping[str, float]) -> None:
        self._run.log({"train_step": train_step, **_finite(values)})

    def close(self) -> None:
        """Finish the run there; a later start of this run continues it."""
        self._run.finish()


class MlflowWriter:
    """Writes metrics and settings to a run of MLflow."""

    def __init__(self, run_directory: Path, name: str, settings: Mapping[str, Any], files: Files) -> None:
        import mlflow
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            # MLflow 3 asks for consent to its file store; the user gives it by not naming a server.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = (run_directory / "mlruns").absolute().as_uri()
        self._client = mlflow.MlflowClient(uri)
        known = _known_runs(run_directory)
        if "mlflow" in known:
            self._id = known["mlflow"]
            self._client.update_run(self._id, status="RUNNING")
            return
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", "megatron-dapo")
        found = self._client.get_experiment_by_name(experiment)
        try:
            place = found.experiment_id if found is not None else self._client.create_experiment(experiment)
        except MlflowException:  # another run has just made it
            place = self._client.get_experiment_by_name(experiment).experiment_id
        self._id = self._client.create_run(place, run_name=name).info.run_id
        parameters = [Param(key, str(value)[:_MAX_PARAMETER]) for key, value in settings.items()]
        self._client.log_batch(self._id, params=parameters)
        _remember(run_directory, known | {"mlflow": self._id}, files)

    def write(self, train_step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = round(1000 * time.time())
        metrics = [Metric(name, value, now, train_step) for name, value in _finite(values).items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        """Mark the run there as finished; a later start of this run continues it."""
        self._client.set_terminated(self._id)


def open_trackers(
    names: tuple[str, ...], run_directory: Path, name: str, settings: Mapping[str, Any], files: Files
) -> list[WandbWriter | MlflowWriter]:
    """Open trackers by name. Raises ValueError if a package is missing, with the command that installs it."""
    files.make_directory(run_directory)
    kinds: dict[str, type[WandbWriter] | type[MlflowWriter]] = {"wandb": WandbWriter, "mlflow": MlflowWriter}
    opened: list[WandbWriter | MlflowWriter] = []
    for each in names:
        try:
            opened.append(kinds[each](run_directory, name, settings, files))
        except ModuleNotFoundError as error:
            raise ValueError(
                f"telemetry.trackers has {each!r}: {error}; pip install 'megatron-dapo[{each}]', or take it out"
            ) from error
    return opened


def _finite(values: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if math.isfinite(value)}


def _known_runs(run_directory: Path) -> dict[str, str]:
    try:
        return json.loads((run_directory / _RUNS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _remember(run_directory: Path, runs: Mapping[str, str], files: Files) -> None:
    files.replace(run_directory / _RUNS, json.dumps(runs) + "\n")
