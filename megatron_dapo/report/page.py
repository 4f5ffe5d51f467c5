"""The report as one HTML file: data, script and style inside it, below MAX_BYTES whatever the runs hold.

The page makes no network requests, and its policy forbids them. Run output is embedded as data: text from a model is
never markup.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from megatron_dapo._version import __version__
from megatron_dapo.evaluation.comparison import Comparison, compare_with
from megatron_dapo.evaluation.reference import Record, read_record
from megatron_dapo.report.anomalies import Anomaly, find_anomalies, train_steps_of, verdict_on
from megatron_dapo.report.curves import charts, curves, drawn_metrics, phase_shares, reference_curves
from megatron_dapo.report.run_files import Row, RunFiles, read_attempts, read_run, shown
from megatron_dapo.report.samples import samples_for_page, size_of
from megatron_dapo.telemetry.completions import before_and_after, distinct_tasks, excerpt, outcome_of, task_of
from megatron_dapo.telemetry.metrics import PHASES
from megatron_dapo.untrusted import one_line, printable

MAX_BYTES = 2_000_000
MAX_RUNS = 12
RELOAD_S = 30  # period after which a live run's page reloads
_MARGIN = 20_000  # bytes
_POINTS = 2400  # points per metric, over all runs
_SAMPLE_SHARES = (1.0, 0.6, 0.3, 0.1, 0.0)  # tried in turn: escapes are counted only in the page itself
_MAX_ANOMALIES = 200
_MAX_PAIRS = 5

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main id="report"><noscript>This report draws its curves with JavaScript: turn it on for this file.</noscript></main>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def write_report(runs: Sequence[Path], references: Sequence[Path], output: Path, is_live: bool = False) -> int:
    """Write the report of runs to `output` in one step, and return its size in bytes.

    `references`: curves to compare with, in addition to each run's telemetry.references. `is_live`: of a run under way; if
    it has ended meanwhile, its last report is left as it is. Raises a one-line ValueError for anything unreadable.
    """
    page = build_page(runs, references, is_live).encode()
    partial = output.with_name(f".{output.name}.{os.getpid()}.tmp")  # another process may be writing, too
    partial.write_bytes(page)
    if is_live and _end_of(read_attempts(runs[0])):
        partial.unlink()
    else:
        partial.replace(output)
    return len(page)


def build_page(paths: Sequence[Path], references: Sequence[Path] = (), is_live: bool = False) -> str:
    """Return the report of runs as HTML of at most MAX_BYTES."""
    if not 1 <= len(paths) <= MAX_RUNS:
        raise ValueError(f"report: {len(paths)} runs, takes 1 to {MAX_RUNS}; name fewer")
    runs = [read_run(path) for path in paths]
    metrics = drawn_metrics(runs)
    records = [read_record(path) for path in references]
    max_points = max(40, min(400, _POINTS // (len(runs) * 4)))
    document: dict[str, Any] = {
        "version": __version__,
        "written": time.time(),
        "reload_s": RELOAD_S if is_live else 0,
        "phases": dict(PHASES),
        "charts": charts(metrics, runs[0].config),
        "runs": [_run(run, metrics, records, max_points, is_live) for run in runs],
        "config": _configuration(runs),
    }
    left = MAX_BYTES - _MARGIN - len(_rendered({**document, "samples": {}}).encode())
    if left < 0:
        raise ValueError(f"report: {len(runs)} runs come to {-left:,} bytes too many without samples; name fewer")
    for share in _SAMPLE_SHARES:
        document["samples"] = samples_for_page(runs, int(share * left))
        if size_of(document["samples"]) <= left and len(page := _rendered(document)) <= MAX_BYTES:
            if len(page.encode()) <= MAX_BYTES:
                return page
    raise AssertionError("a page without samples is below the limit")


def _run(
    run: RunFiles, metrics: Sequence[str], references: Sequence[Record], max_points: int, is_live: bool
) -> dict[str, Any]:
    compared = _own_references(run, references)
    comparisons = [each for record in compared if (each := _compared(run, record)) is not None]
    anomalies = find_anomalies(run, comparisons)
    return {
        "name": run.name,
        "path": str(run.path),
        "verdict": asdict(verdict_on(run, anomalies, is_live)),
        "facts": _facts(run, is_live),
        "anomalies": [asdict(each) for each in _most_serious(anomalies)],
        "num_anomalies": len(anomalies),
        "curves": curves(run, metrics, max_points),
        "pairs": _pairs(run),
        "phase_seconds": [[name, round(seconds, 2)] for name, seconds in phase_shares(run)],
        "references": [
            {"name": record.name, "curves": reference_curves(run, record, max_points)} for record in compared
        ],
        "comparisons": [_comparison(run, each) for each in comparisons],
        "provenance": run.provenance,
    }


def _pairs(run: RunFiles) -> list[dict[str, Any]]:
    """Return the held-out problems whose reward rose most, with their first responses before and after."""
    pairs = before_and_after(run.path / "evaluations")
    tasks = distinct_tasks([task_of(after) for _, after in pairs])
    return [
        {
            "task": excerpt(task, 600),
            "answer": one_line(after["answer"], 100),
            "steps": [before["train_step"], after["train_step"]],
            "responses": [
                {"text": excerpt(each["response"], 600), "reward": each["reward"], "outcome": outcome_of(each)}
                for each in (before, after)
            ],
        }
        for task, (before, after) in zip(tasks[:_MAX_PAIRS], pairs[:_MAX_PAIRS])
    ]


def _most_serious(anomalies: Sequence[Anomaly]) -> list[Anomaly]:
    """Return at most _MAX_ANOMALIES: alarms before warnings before notes, in the order of the steps."""
    rank = {"alarm": 0, "warning": 1, "note": 2}
    chosen = sorted(anomalies, key=lambda each: (rank[each.level], -each.last))[:_MAX_ANOMALIES]
    return sorted(chosen, key=lambda each: (each.first, each.title))


def _own_references(run: RunFiles, references: Sequence[Record]) -> list[Record]:
    """Return the references of the command, then those of the run's configuration that can still be read."""
    records = list(references)
    for path in run.config.get("telemetry.references") or ():
        try:
            record = read_record(Path(path))
        except (ValueError, OSError):
            continue  # they may be missing on another machine
        if record.name not in [each.name for each in records]:
            records.append(record)
    return records


def _compared(run: RunFiles, record: Record) -> Comparison | None:
    try:
        return compare_with(run.path, record)
    except (ValueError, OSError):  # no metric in common, or no step yet
        return None


def _comparison(run: RunFiles, comparison: Comparison) -> dict[str, Any]:
    """Return verdict and newest differences of a comparison, with the train step since which each metric is off."""
    rows = []
    for metric in comparison.metrics:
        last, since = metric.last, metric.off_since
        rows.append(
            {
                "metric": metric.metric,
                "last": asdict(last) if last is not None else None,
                "off_since": round(train_steps_of(run, [since], comparison.unit)[0]) if since is not None else None,
                "note": metric.note,
            }
        )
    return {"reference": comparison.reference, "verdict": comparison.verdict(), "metrics": rows}


def _end_of(attempts: Sequence[Row]) -> Row:
    """Return the record of the end of a run's last attempt; empty if it has none."""
    last = [record for record in attempts if "began" in record][-1:]
    ended = [record for record in attempts if "ended" in record and last and record.get("attempt") == last[0].get("attempt")]
    return ended[-1] if ended else {}


def _facts(run: RunFiles, is_live: bool) -> list[list[str]]:
    last, summary = (run.steps[-1] if run.steps else {}), run.summary
    total = run.config.get("run.total_steps")
    seconds = sum(value for name, value in phase_shares(run))
    end = _end_of(run.attempts)
    state = "under way" if is_live else end["reason"] if end else "failed" if run.failure else "no end on record"
    facts = {
        "state": state,
        "train steps": f"{last.get('train_step', 0):,} of {total:,}" if isinstance(total, int) else "",
        "optimizer steps": f"{last['progress/optimizer_steps']:,.0f}" if last.get("progress/optimizer_steps") else "",
        "time on record": _duration(seconds),
        "generated": f"{sum(row.get('throughput/generated_tokens') or 0 for row in run.steps):,.0f} tokens",
        "speed": f"{summary['generated_tokens_per_s']:,.0f} tokens/s" if summary.get("generated_tokens_per_s") else "",
        "attempts": str(sum("began" in record for record in run.attempts) or ""),
        "machine": str(run.provenance.get("machine", "")).partition(";")[0],
        "plan": str(run.plan.get("line", "")),
    }
    return [[name, printable(value)] for name, value in facts.items() if value]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _configuration(runs: Sequence[RunFiles]) -> list[list[Any]]:
    """Return [key, value of each run, origin of each run] of every key that any run has; equal columns are one."""
    rows: list[list[Any]] = []
    for key in dict.fromkeys(key for run in runs for key in run.config):
        values = [shown(run.config[key]) if key in run.config else "" for run in runs]
        origins = [printable(str(run.origins.get(key, "default"))) for run in runs]
        rows.append([key, *([each[0]] if len(set(each)) == 1 else each for each in (values, origins))])
    return rows


def _rendered(document: Mapping[str, Any]) -> str:
    assets = files("megatron_dapo.report") / "assets"
    uplot, script, uplot_style, style = (
        (assets / name).read_text(encoding="utf-8")
        for name in ("uPlot.iife.min.js", "report.js", "uPlot.min.css", "report.css")
    )
    # No "<" in the data can begin or end a tag, and no line separator can break the script.
    data = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    data = printable(data).replace("<", "\\u003c")
    names = ", ".join(run["name"] for run in document["runs"])
    title = f"{names}: report".replace("&", "&amp;").replace("<", "&lt;")
    return _PAGE.format(title=printable(title), style=uplot_style + style, data=data, script=f"{uplot}\n{script}")
