"""A comparison with a reference, as a table."""

from __future__ import annotations

from rich.table import Table

from megatron_dapo.evaluation.comparison import Comparison, MetricComparison


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
    """Return what a reader should know beside the table."""
    notes = [f"{metric.metric}: {metric.note}" for metric in comparison.metrics if metric.note]
    scores = [f"{score.name} {score.value:g} ({score.source})" for score in comparison.nearest_scores]
    return notes + ([f"published scores like the run's newest: {'; '.join(scores)}"] if scores else [])
