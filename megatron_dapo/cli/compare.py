"""`megatron-dapo compare`, and comparisons as text: a run with a reference, two evaluations paired by problem."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from megatron_dapo.cli.options import JsonOption, refusing

if TYPE_CHECKING:
    from megatron_dapo.evaluation.comparison import Comparison, MetricComparison
    from megatron_dapo.evaluation.estimators import Estimate
    from megatron_dapo.evaluation.protocol import EvaluationResult


def compare(
    run: Annotated[Path, typer.Argument(help="a run's directory, or a result that `eval --output` wrote")],
    reference: Annotated[
        Path,
        typer.Argument(
            help="another run's directory, or a .json, .csv or .jsonl with a step column; of a result another result"
        ),
    ],
    metric: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[=TOLERANCE]", help="compare this one, too, or with another tolerance; may repeat"),
    ] = None,
    unit: Annotated[
        Literal["train_step", "optimizer_step"] | None, typer.Option(help="the steps of two directories")
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Say whether a run is on the track of a reference, or since when not, with intervals.

    Exit code: 0 on track or too early to say, 1 off track, 2 arguments that cannot be read.
    """
    from megatron_dapo.evaluation.comparison import compare_with, rule_from
    from megatron_dapo.evaluation.reference import read_record

    if run.is_file():
        from megatron_dapo.evaluation.protocol import EvaluationResult

        with refusing(ValueError, OSError):
            results = [EvaluationResult.from_json(path.read_text(encoding="utf-8")) for path in (run, reference)]
            typer.echo("\n".join(difference_lines(*results)))
        return
    with refusing(ValueError, OSError):
        comparison = compare_with(run, read_record(reference, unit), dict(map(rule_from, metric or ())))
    if json_output:
        typer.echo(json.dumps({**asdict(comparison), "off_since": comparison.off_since}))
    else:
        Console().print(comparison_table(comparison))
        for remark in remarks(comparison):
            typer.echo(remark)
        typer.echo(comparison.verdict())
    raise typer.Exit(0 if comparison.off_since is None else 1)


def comparison_table(comparison: Comparison) -> Table:
    """Return the newest difference of every metric, and since when it is off track."""
    table = Table(title=f"{comparison.run} against {comparison.reference}", title_justify="left")
    table.add_column("metric", no_wrap=True)
    for name in (comparison.unit.replace("_", " "), "run", "reference", "difference [95 %]", "verdict"):
        table.add_column(name, overflow="fold")
    for metric in comparison.metrics:
        table.add_row(*_row(metric))
    return table


def _row(metric: MetricComparison) -> tuple[str, ...]:
    last, since = metric.last, metric.off_since
    if last is None:
        return (metric.metric, "-", "-", "-", "-", "too early")
    deviation = "watch: the newest point deviates" if last.deviates else "on track"
    return (
        metric.metric,
        f"{last.step:,.0f}",
        f"{last.run:.4g}",
        f"{last.reference:.4g}",
        f"{last.difference:+.3g} [{last.low:+.3g}, {last.high:+.3g}]",
        deviation if since is None else f"off since {since:,.0f}",
    )


def remarks(comparison: Comparison) -> list[str]:
    """Return remarks on the table."""
    notes = [f"{metric.metric}: {metric.note}" for metric in comparison.metrics if metric.note]
    scores = [f"{score.name} {score.value:g} ({score.source})" for score in comparison.nearest_scores]
    return notes + ([f"published scores like the run's newest: {'; '.join(scores)}"] if scores else [])


def result_lines(result: EvaluationResult) -> Iterator[str]:
    """Yield the estimates of all problems, of each source's, and the rates."""
    yield from _estimate_lines(result.metrics)
    for source in result.sources:
        part = result.of_source(source)
        yield f"{source}, {len(part.problems)} problems:"
        yield from (f"  {line}" for line in _estimate_lines(part.metrics))
    for name, rate in result.rates.items():
        yield f"{name}: {rate:.4g}"


def difference_lines(result: EvaluationResult, other: EvaluationResult) -> Iterator[str]:
    """Yield `result` minus `other` with intervals, paired by problem. ValueError for unlike protocols or problems."""
    from megatron_dapo.evaluation.protocol import compare

    yield f"{result.protocol.model} minus {other.protocol.model}, paired over {len(result.problems)} problems, 95 %:"
    yield from (f"  {line}" for line in _estimate_lines(compare(other, result), sign="+"))
    for source in result.sources:
        part = result.of_source(source)
        yield f"{source}, {len(part.problems)} problems:"
        yield from (f"  {line}" for line in _estimate_lines(compare(other.of_source(source), part), sign="+"))


def _estimate_lines(metrics: Mapping[str, Estimate], sign: str = "") -> Iterator[str]:
    for name, estimate in metrics.items():
        yield f"{name}: {estimate.value:{sign}.4f}  [{estimate.low:{sign}.4f}, {estimate.high:{sign}.4f}]"
