"""Curves of a run for the page: which ones share a chart, and their points, few enough for the page's size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from megatron_dapo.evaluation.reference import AVERAGE, Record
from megatron_dapo.report.anomalies import train_steps_of
from megatron_dapo.report.run_files import RunFiles
from megatron_dapo.telemetry.alarms import RUN_ALARMS
from megatron_dapo.telemetry.metrics import (
    DISTILLED,
    EPISODE_LIMITS,
    EVALUATION_METRICS,
    PHASES,
    RECORDED,
    REWARD_PART,
    SOURCE,
    STEP_METRICS,
)
from megatron_dapo.types import CallStatus

EVALUATED = "eval/"
# Charts that include run-specific metrics.
BY_PART, BY_SOURCE, BY_FIGURE = "Reward by part", "Accuracy by source", "Figures that the environment recorded"
BY_TEACHER = "Divergence from teachers"
_UNITS = {BY_PART: "reward", BY_SOURCE: "fraction", BY_TEACHER: "nat"}  # figures of an environment have no unit
_GENERATED = "/accuracy_generated"


@dataclass(frozen=True)
class Chart:
    """Metrics drawn together. `is_wide`: over the whole page; `is_log`: a logarithmic axis if all values are
    positive."""

    title: str
    metrics: Mapping[str, str]  # metric -> its label
    is_wide: bool = False
    is_log: bool = False


SECTIONS: Mapping[str, tuple[Chart, ...]] = {
    "Learning": (
        Chart(
            "Accuracy",
            {AVERAGE: "held-out, avg@k", "rollout/accuracy_generated": "training, all responses"},
            is_wide=True,
        ),
        Chart(
            "Held-out by majority and by best",
            {"eval/pass_at_k": "pass@k", "eval/cons_at_k": "cons@k"},
        ),
        Chart(BY_SOURCE, {}),
        Chart(BY_TEACHER, {}),
        Chart("Reward", {"reward/mean": "mean", "reward/group_std_mean": "deviation within groups"}),
        Chart(
            BY_PART,
            {f"reward/{part}_mean": part for part in ("verifier", "overlong", "perplexity", "format")},
        ),
        Chart(
            "Outcomes",
            {
                f"reward/outcome_{name}": name
                for name in ("correct", "wrong", "unparsable", "truncated", "timeout", "error")
            },
        ),
    ),
    "Policy": (
        Chart("Entropy", {"actor/entropy": "entropy"}),
        Chart("Mean probability of sampled tokens", {"quality/probability_mean": "probability"}),
        Chart(
            "Clipped tokens",
            {
                "actor/clip_high_share": "upper bound",
                "actor/clip_low_share": "lower bound",
                "actor/dual_clip_share": "dual clip",
            },
        ),
        Chart("KL", {"actor/kl_loss": "to the reference", "actor/approx_kl_k3": "old to new, k3"}),
        Chart("Gradient norm", {"actor/grad_norm": "mean", "actor/grad_norm_max": "largest"}, is_log=True),
        Chart("Learning rate", {"actor/learning_rate": "policy", "critic/learning_rate": "critic"}),
    ),
    "Responses": (
        Chart(
            "Length",
            {
                "rollout/response_tokens_mean": "trained",
                "rollout/response_tokens_filtered_mean": "filtered",
                "eval/response_tokens_mean": "held-out",
            },
        ),
        Chart("Truncated", {"rollout/truncated_share": "training", "eval/truncated_share": "held-out"}),
        Chart(
            "Repetition",
            {
                "quality/repetition_mean": "repeated 20-grams",
                "quality/tail_loop_share": "ends in a loop",
                "rollout/duplicate_share": "copies within groups",
            },
        ),
    ),
    "Sampling": (
        Chart(
            "Filtered groups",
            {
                "rollout/groups_filtered_share": "all filtered",
                "rollout/groups_all_correct_share": "all correct",
                "rollout/groups_all_wrong_share": "all wrong",
            },
        ),
        Chart("Generation rounds", {"rollout/generation_rounds": "rounds"}),
        Chart(
            "Staleness",
            {
                "rollout/token_staleness_mean": "tokens, mean",
                "rollout/staleness_mean": "groups, mean",
                "rollout/staleness_max": "groups, largest",
            },
        ),
        Chart(
            "Mismatch of trainer and engine",
            {"mismatch/abs_logprob_diff_mean": "|log-prob difference|, mean"},
            is_log=True,
        ),
        Chart("Importance weights", {"mismatch/ess": "effective sample size", "mismatch/bounded_share": "bounded"}),
    ),
    "Episodes": (
        Chart(BY_FIGURE, {}),
        Chart("Turns and calls", {"episodes/turns_mean": "turns", "episodes/calls_mean": "tool calls"}),
        Chart(
            "Tokens of an episode",
            {"episodes/sampled_tokens_mean": "sampled", "episodes/observed_tokens_mean": "observed"},
        ),
        Chart("Ends", {f"episodes/end_{name}_share": name.replace("_", " ") for name in ("done", *EPISODE_LIMITS)}),
        Chart(
            "Tool calls by status",
            {f"episodes/calls_{name}_share": name.replace("_", " ") for name in get_args(CallStatus)},
        ),
        Chart(
            "Seconds of an episode",
            {f"episodes/{name}_seconds_mean": name for name in ("generating", "acting", "waiting")},
        ),
        Chart(
            "Failures of environments",
            {"episodes/retries": "retried", "episodes/begun_anew": "begun anew", "episodes/groups_lost": "groups lost"},
        ),
    ),
    "Critic": (
        Chart(
            "Explained variance",
            {
                "critic/explained_variance": "all tokens",
                "critic/explained_variance_first_decile": "first tenth",
                "critic/explained_variance_last_decile": "last tenth",
            },
        ),
        Chart("Value and return", {"critic/value_mean": "value", "critic/return_mean": "return"}),
        Chart("Value loss", {"critic/loss": "loss"}),
    ),
    "Speed": (
        Chart(
            "Throughput",
            {
                "throughput/generated_tokens_per_s": "generated tokens/s",
                "throughput/trained_tokens_per_s": "trained tokens/s",
            },
        ),
        Chart("Responses trained a second", {"throughput/samples_per_s": "responses/s"}),
        Chart("Host memory of rank 0", {"memory/host_rss_mib": "resident"}),
    ),
}
TIMES = [f"time/{name}" for name in (*PHASES, "unaccounted")]


def drawn_metrics(runs: Sequence[RunFiles]) -> list[str]:
    """Return the metrics of all charts that are not 0 in every step of every run."""
    own = sorted(
        {name for run in runs for row in (*run.steps[-1:], *run.evaluations[-1:]) for name in row if _own(name)}
    )
    names = dict.fromkeys([*(name for charts in SECTIONS.values() for chart in charts for name in chart.metrics), *own])
    return [name for name in names if any(_is_there(run, name) for run in runs)]


def _own(name: str) -> tuple[str, str] | None:
    """Return chart and label of a metric of a run's reward parts, recorded figures or sources; None for any other."""
    if name.startswith(REWARD_PART):
        return BY_PART, name.removeprefix(REWARD_PART)
    if name.startswith(RECORDED):
        return BY_FIGURE, name.removeprefix(RECORDED)
    if name.startswith(DISTILLED):
        return BY_TEACHER, name.removeprefix(DISTILLED).removesuffix("/divergence")
    if name.startswith(SOURCE) and name.endswith(_GENERATED):
        return BY_SOURCE, f"training, {name.removeprefix(SOURCE).removesuffix(_GENERATED)}"
    score = AVERAGE.removeprefix(EVALUATED)
    if name.startswith(EVALUATED) and name.endswith(f"/{score}") and name != AVERAGE:
        return BY_SOURCE, f"held-out, {name.removeprefix(EVALUATED).removesuffix(f'/{score}')}"
    return None


def _is_there(run: RunFiles, name: str) -> bool:
    rows = run.evaluations if name.startswith(EVALUATED) else run.steps
    return any(row.get(name) for row in rows)


def charts(metrics: Sequence[str], config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the page's charts, limited to the given metrics. `config`: of the first run, which has the alarms'
    limits."""
    limits = {alarm.metric: alarm.limit_in(config) for alarm in RUN_ALARMS}
    own = {name: place for name in metrics if (place := _own(name)) is not None}
    found = []
    for section, members in SECTIONS.items():
        for chart in members:
            shown = {**chart.metrics, **{name: label for name, (title, label) in own.items() if title == chart.title}}
            series = [{"metric": name, "label": label} for name, label in shown.items() if name in metrics]
            # The only part of a reward is the reward, which has a chart.
            if not series or (chart.title == BY_PART and [each["metric"] for each in series] == ["reward/verifier_mean"]):
                continue
            schema = {**STEP_METRICS, **EVALUATION_METRICS}
            known = [schema[each["metric"]] for each in series if each["metric"] in schema]
            found.append(
                {
                    "section": section,
                    "title": chart.title,
                    "wide": chart.is_wide,
                    "log": chart.is_log,
                    "unit": known[0].unit if known else _UNITS.get(chart.title, ""),
                    "series": series,
                    "help": [f"{metric.name}: {metric.meaning}" for metric in known],
                    "limits": [
                        limits[each["metric"]] for each in series if limits.get(each["metric"]) not in (None, 0, 1)
                    ],
                }
            )
    return found


def curves(run: RunFiles, metrics: Sequence[str], max_points: int) -> dict[str, Any]:
    """Return the points of a run's metrics: means over equal spans of train steps, with the range within each span.

    A metric is [values] if every step is a point, otherwise [means, lowest, highest]. None: no finite value.
    """
    steps = [row["train_step"] for row in run.steps]
    size = math.ceil(len(steps) / max_points) if steps else 1
    starts = range(0, len(steps), size)
    columns = {}
    for name in [*metrics, *TIMES]:
        if not name.startswith(EVALUATED):
            values = run.column(name)
            spans = [[value for value in values[start : start + size] if math.isfinite(value)] for start in starts]
            means = [_short(sum(span) / len(span)) if span else None for span in spans]
            # The range of a phase's time is not drawn.
            with_range = size > 1 and name not in TIMES
            ranges = (
                [[_short(edge(span)) if span else None for span in spans] for edge in (min, max)] if with_range else []
            )
            columns[name] = [means, *ranges]
    evaluated = {
        name: [_short(row.get(name)) for row in run.evaluations]
        for name in [*metrics, "eval/avg_at_k_low", "eval/avg_at_k_high"]
        if name.startswith(EVALUATED)
    }
    return {
        "x": [steps[min(start + size, len(steps)) - 1] for start in starts],
        "values": columns,
        "evaluated_x": [row["train_step"] for row in run.evaluations],
        "evaluated": evaluated,
    }


def reference_curves(run: RunFiles, reference: Record, max_points: int) -> dict[str, Any]:
    """Return the curves of a reference on the train steps of a run, by metric, up to twice as far as the run has come."""
    end = 2 * max([row["train_step"] for row in run.steps[-1:]], default=1)
    curves = {}
    for name, curve in reference.curves.items():
        steps = train_steps_of(run, [point.step for point in curve.points], reference.unit)
        points = [(step, point) for step, point in zip(steps, curve.points) if step <= end]
        points = points[:: max(1, math.ceil(len(points) / max_points))]
        if points:
            curves[name] = {
                "x": [round(step, 2) for step, _ in points],
                "y": [_short(point.value) for _, point in points],
                "hold": curve.interpolation == "hold",
            }
    return curves


def phase_shares(run: RunFiles) -> list[tuple[str, float]]:
    """Return the seconds of each phase over the whole run, longest first."""
    seconds = [(name.partition("/")[2], sum(filter(math.isfinite, run.column(name)))) for name in TIMES]
    return sorted((each for each in seconds if each[1] > 0), key=lambda each: -each[1])


def _short(value: float | None) -> float | None:
    """Return a number in the five digits that a curve shows; None if there is none."""
    return float(f"{value:.5g}") if isinstance(value, (int, float)) and math.isfinite(value) else None
