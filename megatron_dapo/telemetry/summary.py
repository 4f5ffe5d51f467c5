"""The end of a run: summary.json for programs, a table for people."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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
    stopped: str  # end of the run: "finished", "signal SIGTERM", "data exhausted", ...
    train_steps: int
    optimizer_steps: int
    accuracy_before: float | None  # held-out avg@k of the initial policy; None: not evaluated
    accuracy_after: float | None
    train_seconds: float  # train steps only: no evaluation, no start-up
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


def summary_table(summary: RunSummary, directory: Path | None = None) -> Table:
    """Return the results of a run as a table. `directory`: of the run, for figures that its records of metrics have."""
    table = Table(title=f"{summary.name}: {summary.stopped}", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    rows = {
        "layout": summary.layout,
        "train steps": f"{summary.train_steps} ({summary.optimizer_steps} optimizer steps)",
        **_accuracies(summary),
        **_trained_problems(summary),
        **(_recorded(directory) if directory is not None else {}),
        "training time": f"{duration(summary.train_seconds)} (whole run {duration(summary.total_seconds)})",
        "speed": f"{summary.samples_per_s:.1f} samples/s, {summary.generated_tokens_per_s:,.0f} generated tokens/s",
        **({"explained variance": f"{summary.extra[EXPLAINED]:.3f}"} if EXPLAINED in summary.extra else {}),
        **summary.directories,
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def next_steps(summary: RunSummary, recipe: Path, base: Path) -> list[str]:
    """Return commands for what a run has left. `base`: the directory of the model that it started from."""
    steps = []
    if report := summary.directories.get("report"):
        steps.append(f"open {report}")
    if model := summary.directories.get("huggingface"):
        steps.append(f'python -c "from transformers import AutoModelForCausalLM as M; M.from_pretrained({model!r})"')
        steps.append(f"megatron-dapo demo {Path(model).parent}")
        if summary.accuracy_after is not None:
            steps.append(f"megatron-dapo eval {recipe} --model {model} --against {base}")
    return steps


def _accuracies(summary: RunSummary) -> dict[str, str]:
    before, after = summary.accuracy_before, summary.accuracy_after
    if before is None or after is None:
        return {"accuracy before": _accuracy(before), "accuracy after": _accuracy(after)}
    return {"held-out accuracy": f"{before:.3f} -> {after:.3f} ({after - before:+.3f})"}


def _trained_problems(summary: RunSummary) -> dict[str, str]:
    evaluations = summary.extra.get("evaluations", {}).values()
    count = max((row.get("eval/trained_problems", 0) for row in evaluations), default=0)
    return {"held-out data": f"{count:.0f} of its problems are also trained on"} if count else {}


def _accuracy(value: float | None) -> str:
    return "not evaluated" if value is None else f"{value:.3f}"


def _recorded(directory: Path) -> dict[str, str]:
    """Return reward and truncated responses from metrics.jsonl; nothing if it cannot be read or has no step."""
    try:
        rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))["config"]["rollout"]
        ends = mean_of_ends([row["reward/mean"] for row in rows if row["reward/mean"] is not None])
        last = rows[-1]
        responses = round(last["rollout/groups_trained"] * config["group_size"])
        num_cut = round((last["rollout/truncated_share"] or 0.0) * responses)
    except (OSError, ValueError, LookupError, TypeError):
        return {}
    length = config["max_response_tokens"]
    cut = {"cut off": f"{num_cut} of the last step's {responses} responses, at {length:,} tokens"} if num_cut else {}
    return {**({"reward": f"{ends[0]:.3f} -> {ends[1]:.3f}"} if ends else {}), **cut}


def mean_of_ends(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the means over the first and the last quarter of a series, of ten steps at most; None if it is empty."""
    width = max(1, min(10, len(values) // 4))
    return (sum(values[:width]) / width, sum(values[-width:]) / width) if values else None
