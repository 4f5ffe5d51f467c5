"""Callbacks: a log of what happens in a separate file. run.callbacks = ["callbacks.py:EventLog"]."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_dapo import Callback


class EventLog(Callback):
    """Appends a line an event to events.jsonl in the run's directory."""

    def on_run_start(self, config: Mapping[str, Any]) -> None:
        self._file = Path(config["run"]["output_dir"]) / "events.jsonl"
        self._write("start", name=config["run"]["name"])

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        self._write("step", step=step, accuracy=metrics["rollout/accuracy_generated"])

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._write("evaluation", step=step, accuracy=metrics["eval/avg_at_k"])

    def on_checkpoint(self, step: int, directory: Path) -> None:
        self._write("checkpoint", step=step, directory=directory.name)

    def _write(self, event: str, **values: Any) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, **values}) + "\n")
