"""Anomalies of a run: every step span in which something was wrong, its cause and what to do, and the verdict on the whole.

alarms       metrics beyond a bound of `telemetry.alarms`, several steps in a row as one span
trends       mismatch that grows (mismatch.trend_factor), entropy that collapses, gradients that jump, accuracy that falls
events       skipped optimizer steps, values that are not finite, restarts, failures, node alerts, lost records
references   reference curves that the run departed from (`evaluation.comparison`)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from megatron_dapo.evaluation.comparison import Comparison
from megatron_dapo.evaluation.estimators import Estimate, student_mean
from megatron_dapo.evaluation.protocol import EvaluationResult
from megatron_dapo.report.run_files import RunFiles
from megatron_dapo.telemetry.alarms import RUN_ALARMS, Alarm
from megatron_dapo.telemetry.summary import mean_of_ends
from megatron_dapo.telemetry.trend import TrendAlarm
from megatron_dapo.untrusted import one_line

Level = Literal["alarm", "warning", "note"]
_RECENT = 0.1  # last share of the train steps: an alarm that ended before is history

_COLLAPSE = 0.1  # share of the entropy at the start
_COLLAPSE_STEPS = 5  # number of steps averaged at the start and the end
_JUMP = 10.0  # times the median gradient norm
_JUMP_HISTORY = 50  # train steps in the median
_MIN_HISTORY = 5
_MOST_LOST = 0.01  # share of a step's groups
_LONG_WAIT = 0.2  # share of the steps for which one side waits for the other


@dataclass(frozen=True)
class Anomaly:
    """Something that was wrong from train step `first` to `last`. `metric`: the curve that shows it, or ""."""

    level: Level
    first: int
    last: int
    title: str
    cause: str  # figures: value, bound, step
    advice: str = ""
    metric: str = ""


def find_anomalies(run: RunFiles, comparisons: Sequence[Comparison] = ()) -> list[Anomaly]:
    """Return the anomalies of a run, by train step."""
    anomalies = [anomaly for alarm in RUN_ALARMS for anomaly in _alarms(run, alarm)]
    for search in (_mismatch_trend, _entropy, _episodes, _gradients, _skipped, _not_finite, _attempts, _nodes, _evaluations, _waits):
        anomalies += search(run)
    anomalies += [_left(run, comparison) for comparison in comparisons if comparison.off_since is not None]
    if lost := (run.summary.get("extra") or {}).get("lost_records"):
        last = _steps(run)[-1] if run.steps else 0
        anomalies.append(Anomaly("warning", last, last, "records were lost", f"{lost} records could not be written"))
    return sorted(anomalies, key=lambda each: (each.first, each.title))


def _steps(run: RunFiles) -> list[int]:
    return [row["train_step"] for row in run.steps]


def _alarms(run: RunFiles, alarm: Alarm) -> Iterator[Anomaly]:
    limit = alarm.limit_in(run.config)
    if limit is None:
        return
    values, steps = run.column(alarm.metric), _steps(run)
    for start, end in _spans([alarm.is_passed(value, limit) for value in values]):
        if end - start < alarm.patience:
            continue
        worst = (max if alarm.side == "above" else min)(range(start, end), key=values.__getitem__)
        key = f" ({alarm.limit})" if isinstance(alarm.limit, str) else ""
        where = f" at step {steps[worst]}" if end - start > 1 else ""
        cause = f"{alarm.metric} {values[worst]:.3g}{where}, {alarm.side} {limit:.3g}{key}"
        if alarm.metric == "reward/failed_share":
            cause += _why_rewards_failed(run, steps[start], steps[end - 1])
        level: Level = "alarm" if alarm.metric.startswith("mismatch/") else "warning"
        yield Anomaly(level, steps[start], steps[end - 1], alarm.title, cause, alarm.advice, alarm.metric)


def _why_rewards_failed(run: RunFiles, first: int, last: int) -> str:
    """Return the most frequent reason that samples of these steps have, "" if none has one."""
    reasons = Counter(
        str(record["error"])
        for record in (*run.samples, *run.filtered)
        if record.get("error") and first <= record.get("train_step", 0) <= last
    )
    return f"; most often: {one_line(reasons.most_common(1)[0][0], 200)}" if reasons else ""


def _spans(flags: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Yield [start, end) of each run of True; two separated by a single False count as one."""
    joined = [flag or (0 < n < len(flags) - 1 and flags[n - 1] and flags[n + 1]) for n, flag in enumerate(flags)]
    start = None
    for place, flag in enumerate([*joined, False]):
        if flag and start is None:
            start = place
        elif not flag and start is not None:
            yield start, place
            start = None


def _mismatch_trend(run: RunFiles) -> Iterator[Anomaly]:
    metric, config = "mismatch/abs_logprob_diff_mean", run.config
    if "mismatch.trend_factor" not in config:
        return
    trend = TrendAlarm(config["mismatch.trend_factor"], config["mismatch.trend_floor"])
    for step, value in zip(_steps(run), run.column(metric)):
        if math.isfinite(value) and (growth := trend.observe(value)):
            cause = f"smoothed gap {growth.before:.3g} -> {growth.now:.3g} nats within {growth.num_steps} steps"
            advice = "a gap that grows ends in collapse: check the weight sync's checks and the precision of both sides"
            yield Anomaly("warning", step, step, "mismatch grows", cause, advice, metric)


def _entropy(run: RunFiles) -> Iterator[Anomaly]:
    metric, steps = "actor/entropy", _steps(run)
    values = run.column(metric)
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2 * _COLLAPSE_STEPS:
        return
    start = sum(finite[:_COLLAPSE_STEPS]) / _COLLAPSE_STEPS
    means = [
        sum(values[max(0, n - _COLLAPSE_STEPS + 1) : n + 1]) / min(n + 1, _COLLAPSE_STEPS) for n in range(len(values))
    ]
    for first, end in _spans([mean < _COLLAPSE * start for mean in means]):
        cause = f"{metric} {means[end - 1]:.3g} nats, {means[end - 1] / start:.0%} of {start:.3g} in the first steps"
        advice = "raise clip_ratio_high (clip-higher) or the temperature, or lower the learning rate; sampling repeats itself"
        yield Anomaly("alarm", steps[first], steps[end - 1], "entropy collapse", cause, advice, metric)


def _episodes(run: RunFiles) -> Iterator[Anomaly]:
    steps, lost = _steps(run), run.column("episodes/groups_lost")
    shares = [
        count / (count + generated) if count else 0.0
        for count, generated in zip(lost, run.column("rollout/groups_generated"), strict=True)
    ]
    for first, end in _spans([share > _MOST_LOST for share in shares]):
        worst = max(range(first, end), key=shares.__getitem__)
        cause = f"{lost[worst]:g} groups, {shares[worst]:.1%} at step {steps[worst]}, above {_MOST_LOST:.0%}"
        advice = "the log has the reason of each loss: mend the environment or what it needs, or raise its deadlines"
        yield Anomaly("warning", steps[first], steps[end - 1], "episodes are lost", cause, advice, "episodes/groups_lost")
    metric = "episodes/calls_mean"
    calls = [value for value in run.column(metric) if math.isfinite(value)]
    if len(calls) < 2 * _COLLAPSE_STEPS:
        return
    before, now = (sum(part) / _COLLAPSE_STEPS for part in (calls[:_COLLAPSE_STEPS], calls[-_COLLAPSE_STEPS:]))
    if now < _COLLAPSE * before:
        cause = f"{metric} {now:.2g} in the last steps, {before:.2g} in the first"
        advice = "the policy has stopped calling tools: read samples, and reward answers that need them or lower the learning rate"
        yield Anomaly("warning", steps[-_COLLAPSE_STEPS], steps[-1], "tool calls vanish", cause, advice, metric)


def _waits(run: RunFiles) -> Iterator[Anomaly]:
    """Yield which side of a run with separate servers waits for the other, from the seconds measured after its first steps."""
    names = ("time/step", "time/evaluate", "time/checkpoint", "async/trainer_idle", "async/engine_idle")
    rows = list(zip(_steps(run), *map(run.column, names)))[_COLLAPSE_STEPS:]
    rows = [row for row in rows if all(map(math.isfinite, row))]
    if run.config.get("sglang.placement") != "disaggregated" or run.config.get("rollout.engine") != "sglang" or not rows:
        return
    seconds = [step - evaluate - checkpoint for _, step, evaluate, checkpoint, *_ in rows]
    waited = {
        "trainer": sum(share * length for (*_, share, _), length in zip(rows, seconds)),
        "engines": sum(share * length for (*_, share), length in zip(rows, seconds)),
    }
    side = max(waited, key=waited.__getitem__)
    if waited[side] <= _LONG_WAIT * sum(seconds):
        return
    means = {name: total / len(rows) for name, total in waited.items()}
    cause = f"trainer {means['trainer']:.3g} s and engines {means['engines']:.3g} s of {sum(seconds) / len(rows):.3g} s a step"
    advice = {
        "trainer": "give the engines more devices (sglang.servers_per_node), or raise rollout.max_staleness or rollout.oversample",
        "engines": "give the trainer more devices",
    }
    split = f"`megatron-dapo plan split {run.path}` proposes how many"
    metric = "async/trainer_idle" if side == "trainer" else "async/engine_idle"
    title = "trainer waits" if side == "trainer" else "engines wait"
    yield Anomaly("note", rows[0][0], rows[-1][0], title, cause, f"{advice[side]}; {split}", metric)


def _gradients(run: RunFiles) -> Iterator[Anomaly]:
    metric, steps = "actor/grad_norm_max", _steps(run)
    values = run.column(metric)
    for place, value in enumerate(values):
        history = [each for each in values[max(0, place - _JUMP_HISTORY) : place] if math.isfinite(each)]
        if len(history) >= _MIN_HISTORY and value > _JUMP * (usual := median(history)) > 0:
            cause = f"{metric} {value:.3g}, {value / usual:.0f} times the median {usual:.3g} before"
            advice = "clipped by optimizer.clip_grad; see what the step trained on, and lower the learning rate if it repeats"
            yield Anomaly("note", steps[place], steps[place], "gradient jump", cause, advice, metric)


def _skipped(run: RunFiles) -> Iterator[Anomaly]:
    for prefix, name in (("progress", "policy"), ("critic", "critic")):
        before = 0.0
        for step, count in zip(_steps(run), run.column(f"{prefix}/skipped_optimizer_steps")):
            if count > before:
                cause = f"{count - before:g} optimizer steps of the {name} skipped: loss or gradient was not finite"
                advice = "a single one is harmless; several mean overflow: check precision and the samples of the step"
                yield Anomaly("warning", step, step, "optimizer steps skipped", cause, advice, f"{prefix}/grad_norm")
            before = count if math.isfinite(count) else before


def _not_finite(run: RunFiles) -> Iterator[Anomaly]:
    missing, steps = [[name for name, value in row.items() if value is None] for row in run.steps], _steps(run)
    for start, end in _spans([bool(names) for names in missing]):
        names = list(dict.fromkeys(name for each in missing[start:end] for name in each))
        cause = f"{', '.join(names[:4])}{f' and {len(names) - 4} more' if len(names) > 4 else ''}"
        yield Anomaly("alarm", steps[start], steps[end - 1], "metrics are not finite", cause)


def _attempts(run: RunFiles) -> Iterator[Anomaly]:
    begun = [record for record in run.attempts if "began" in record]
    ends = {record.get("attempt"): record for record in run.attempts if "ended" in record}
    for before, record in zip(begun, begun[1:]):
        step, end = int(record.get("completed_steps", 0)), ends.get(before["attempt"])
        how = end["reason"] if end else "failed or killed: it left no record of its end"
        cause = f"attempt {before['attempt']}: {how}; attempt {record['attempt']} continues after step {step}"
        yield Anomaly("note" if end else "warning", step, step, "restart", cause)
    if run.failure:
        step = _steps(run)[-1] if run.steps else 0
        # The line ends with the advice.
        cause, _, advice = str(run.failure.get("line", "see failure.json")).partition("; to do: ")
        yield Anomaly("alarm", step, step, "failure", cause, advice)


def _nodes(run: RunFiles) -> Iterator[Anomaly]:
    for record in run.attempts:
        if isinstance(alert := record.get("alert"), dict):
            step = _steps(run)[-1] if run.steps else 0
            cause = f"{alert.get('node')}: {alert.get('metric')} unlike the other nodes' for {alert.get('seconds', 0):.0f} s"
            yield Anomaly("alarm", step, step, "faulty node", cause, "megatron-dapo nodes RUN shows its metrics")


def _evaluations(run: RunFiles) -> Iterator[Anomaly]:
    best = max(run.evaluations, key=lambda row: row.get("eval/avg_at_k") or 0.0, default=None)
    if best is None or best is run.evaluations[-1]:
        return
    last = run.evaluations[-1]
    change = held_out_change(run, best["train_step"], last["train_step"])
    if change is not None and change.high < 0:
        cause = f"held-out accuracy {change.value:+.3f} [{change.low:+.3f}, {change.high:+.3f}] since its best"
        advice = (
            "compare training accuracy: if that still rises, the policy overfits to the training data or the reward"
        )
        yield Anomaly(
            "alarm", best["train_step"], last["train_step"], "held-out accuracy falls", cause, advice, "eval/avg_at_k"
        )


def _left(run: RunFiles, comparison: Comparison) -> Anomaly:
    metric, since = min(
        ((one.metric, one.off_since) for one in comparison.metrics if one.off_since is not None),
        key=lambda each: each[1],
    )
    steps = train_steps_of(run, [since], comparison.unit)
    last = max(_steps(run)[-1] if run.steps else 0, steps[0])
    title = f"off the reference {comparison.reference}"
    return Anomaly("alarm", round(steps[0]), round(last), title, comparison.verdict(), metric=metric)


def train_steps_of(run: RunFiles, steps: Sequence[float], unit: str) -> list[float]:
    """Return train steps for steps of a unit; optimizer steps by the run's rows, extrapolated in proportion beyond
    them."""
    if unit == "train_step":
        return list(steps)
    made = [(0.0, 0.0)] + [(row.get("progress/optimizer_steps") or 0.0, float(row["train_step"])) for row in run.steps]
    per_step = made[-1][0] / made[-1][1] if made[-1][1] else 1.0
    crossings = []
    for step in steps:
        after = next((place for place, (optimizer, _) in enumerate(made) if optimizer >= step), None)
        if after is None or made[after][0] == step:
            crossings.append(
                made[after][1] if after is not None else made[-1][1] + (step - made[-1][0]) / (per_step or 1.0)
            )
            continue
        (low, first), (high, second) = made[after - 1], made[after]
        crossings.append(first + (step - low) / (high - low) * (second - first))
    return crossings


def held_out_change(run: RunFiles, earlier: int, later: int) -> Estimate | None:
    """Return the change of held-out accuracy between two evaluations, with Student's 95 % interval of pairs by problem.

    None if the table of one is missing or they cover different problems.
    """
    accuracies = [_accuracies(run, step) for step in (earlier, later)]
    if not accuracies[0] or accuracies[0].keys() != accuracies[1].keys():
        return None
    return student_mean([accuracies[1][problem] - accuracies[0][problem] for problem in accuracies[0]])


def _accuracies(run: RunFiles, step: int) -> dict[str, float]:
    try:
        text = (run.path / "evaluations" / f"step_{step:06d}.json").read_text(encoding="utf-8")
        result = EvaluationResult.from_json(text)
    except (OSError, ValueError):
        return {}
    return {record.problem_id: sum(record.accuracies) / len(record.accuracies) for record in result.problems}


# ---- the verdict


@dataclass(frozen=True)
class RunVerdict:
    """What a run has learned, its health and how serious that is, and what to do next if it is healthy."""

    level: Literal["good", "warning", "alarm"]
    learned: str
    health: str
    advice: str = ""


def verdict_on(run: RunFiles, anomalies: Sequence[Anomaly], is_live: bool = False) -> RunVerdict:
    """Return the verdict on a run: the change of held-out accuracy, its end, and the current anomalies."""
    last = _steps(run)[-1] if run.steps else 0
    learned = _learned(run, last)
    if run.failure and not is_live:
        return RunVerdict("alarm", learned, f"failed after step {last}: {_titles(anomalies, 'alarm', 0)}")
    if not run.steps:
        words = "no train step yet" if is_live else "no train step was made: nothing was learned"
        return RunVerdict("warning", learned, words)
    recent = last - max(3, _RECENT * last)
    if titles := _titles(anomalies, "alarm", recent):
        return RunVerdict("alarm", learned, f"not healthy: {titles}")
    if titles := _titles(anomalies, "warning", recent):
        return RunVerdict("warning", learned, f"watch: {titles}")
    before = sum(each.level != "note" for each in anomalies)
    past = f"; {before} earlier anomal{'y' if before == 1 else 'ies'}, over now" if before else ""
    return RunVerdict("good", learned, f"healthy{past}", _advice(run))


def _titles(anomalies: Sequence[Anomaly], level: Level, since: float) -> str:
    titles = [
        f"{each.title} since step {each.first}" if each.last > each.first else f"{each.title} at step {each.first}"
        for each in anomalies
        if each.level == level and each.last >= since
    ]
    more = f" and {len(titles) - 3} more" if len(titles) > 3 else ""
    return ", ".join(list(dict.fromkeys(titles))[:3]) + more


def _scores(run: RunFiles) -> list[tuple[int, float]]:
    """Return (train step, held-out accuracy) of each evaluation."""
    scores = ((row["train_step"], row.get("eval/avg_at_k")) for row in run.evaluations)
    return [(step, score) for step, score in scores if score is not None]


def _learned(run: RunFiles, last: int) -> str:
    """Describe the change of held-out accuracy, or of training accuracy without it."""
    scores = _scores(run)
    if len(scores) < 2 or scores[-1][0] == scores[0][0]:
        values = [value for value in run.column("rollout/accuracy_generated") if math.isfinite(value)]
        ends = mean_of_ends(values)
        if ends is None:
            return "No accuracy yet"
        return f"Sampled responses: accuracy {ends[0]:.2f} -> {ends[1]:.2f} in {last} steps; no held-out data says more"
    (first_step, first), (step, score) = scores[0], scores[-1]
    k = run.config.get("evaluation.num_samples", "k")
    change = held_out_change(run, first_step, step)
    word, interval = "Held-out accuracy", ""
    if change is not None:
        word = "Learned" if change.low > 0 else "Lost" if change.high < 0 else "No clear change"
        interval = f" [{change.low:+.2f}, {change.high:+.2f}]"
    direction = f", {_direction(run, scores)}" if len(scores) > 2 else ""
    figures = f"{first:.2f} -> {score:.2f} ({score - first:+.2f}{interval})"
    count = run.evaluations[-1].get("eval/trained_problems")
    trained = f" ({count:.0f} of the held-out problems are also trained on)" if count and count >= 1 else ""
    return f"{word}: {figures} held-out avg@{k} in {step - first_step} steps{trained}{direction}"


def _direction(run: RunFiles, scores: Sequence[tuple[int, float]]) -> str:
    """Describe whether accuracy still changes: the newest evaluation against the one nearest to two thirds of the way
    to it."""
    (start, _), (step, score) = scores[0], scores[-1]
    middle = min(scores[:-1], key=lambda each: (abs(each[0] - (start + 2 * (step - start) / 3)), -each[0]))
    change = held_out_change(run, middle[0], step)
    if change is None:
        return f"{score - middle[1]:+.2f} since step {middle[0]}"
    if change.low > 0:
        return "still rising"
    return "falling" if change.high < 0 else f"level since step {middle[0]}"


_MOST = 0.5  # share of prompts from which they are too easy or too hard


def _advice(run: RunFiles) -> str:
    """Return what to do next with a healthy run: how many problems are always or never solved, and what follows."""
    scores, facts, fraction = _scores(run), [], {}
    accuracies = _accuracies(run, scores[-1][0]) if scores else {}
    if accuracies:
        always, never = (sum(value == end for value in accuracies.values()) for end in (1.0, 0.0))
        facts.append(f"of {len(accuracies)} held-out problems {always} are solved in every response and {never} in none")
    for name in ("correct", "wrong"):
        values = [value for value in run.column(f"rollout/groups_all_{name}_share")[-10:] if math.isfinite(value)]
        fraction[name] = sum(values) / len(values) if values else 0.0
    if fraction["correct"] > _MOST:
        facts.append(f"{fraction['correct']:.0%} of the last steps' groups are all correct: take harder prompts, or stop")
    elif fraction["wrong"] > _MOST:
        facts.append(f"{fraction['wrong']:.0%} of the last steps' groups are all wrong: take easier prompts or longer responses")
    elif len(scores) > 2 and _direction(run, scores) == "still rising":
        facts.append("it still rises: raise run.total_steps and start the same command again")
    elif len(scores) > 2:
        facts.append("it no longer rises: take more or other prompts, or larger groups (rollout.group_size)")
    elif scores:
        facts.append("evaluate more often (evaluation.interval) to see if it still rises, or raise run.total_steps")
    else:
        facts.append("hold some problems out (data.eval_paths) to see what it learns")
    return "; ".join(facts)
