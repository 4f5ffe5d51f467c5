"""The end of a run: summary.json for programs, a table for people."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from megatron_dapo.telemetry.progress import duration

if TYPE_CHECKING:
    from megatron_dapo.files.durable import Files

EXPLAINED = "explained_variance"  # a key of `extra` if a critic was pretrained


@dataclass(frozen=True)
class RunSummary:
    """Results of a run and the locations of its output."""

    name: str
    layout: str  # e.g. "TP2 PP1 CP1 DP1"
    stopped: str  # why it ended: "finished", "signal SIGTERM", "data exhausted", ...
    train_steps: int
    optimizer_steps: int
    accuracy_before: float | None  # held-out avg@k of the initial policy; None: not evaluated
    accuracy_after: float | None
    train_seconds: float  # of the train steps, without evaluation and start-up
    total_seconds: float
    samples_per_s: float  # trained responses / train_seconds
    generated_tokens_per_s: float
    # Location by content, e.g. {"tensorboard": ..., "samples": ..., "huggingface": ...}.
    directories: Mapping[str, str] = field(default_factory=dict)
    # JSON-serializable: intervals, truncation rate, losses of samples.
    extra: Mapping[str, Any] = field(default_factory=dict)


def write_summary(path: Path, summary: RunSummary, files: Files) -> None:
    files.make_directory(path.parent)
    files.replace(path, json.dumps(asdict(summary), indent=2) + "\n")


def read_summary(path: Path) -> RunSummary:
    return RunSummary(**json.loads(path.read_text(encoding="utf-8")))


def summary_table(summary: RunSummary) -> Table:
    table = Table(title=f"{summary.name}: {summary.stopped}", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    rows = {
        "layout": summary.layout,
        "train steps": f"{summary.train_steps} ({summary.optimizer_steps} optimizer steps)",
        "accuracy before": _accuracy(summary.accuracy_before),
        "accuracy after": _accuracy(summary.accuracy_after),
        **_trained_problems(summary),
        "training time": f"{duration(summary.train_seconds)} (whole run {duration(summary.total_seconds)})",
        "speed": f"{summary.samples_per_s:.1f} samples/s, {summary.generated_tokens_per_s:,.0f} generated tokens/s",
        **({"explained variance": f"{summary.extra[EXPLAINED]:.3f}"} if EXPLAINED in summary.extra else {}),
        **summary.directories,
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _trained_problems(summary: RunSummary) -> dict[str, str]:
    evaluations = summary.extra.get("evaluations", {}).values()
    count = max((row.get("eval/trained_problems", 0) for row in evaluations), default=0)
    return {"held-out data": f"{count:.0f} of its problems are also trained on"} if count else {}


def _accuracy(value: float | None) -> str:
    return "not evaluated" if value is None else f"{value:.3f}"
