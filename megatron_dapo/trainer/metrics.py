"""Builds the metrics of one train step, by their schema names, from what each hop reports."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import numpy as np
import psutil
import torch

from megatron_dapo.config.monitoring_schema import QualityConfig
from megatron_dapo.config.schema import Config
from megatron_dapo.data.injection import TEMPLATE
from megatron_dapo.engines.base import PrefixReuse
from megatron_dapo.evaluation.protocol import EvaluationResult
from megatron_dapo.rollout.batch import RolloutBatch
from megatron_dapo.rollout.shortage import round_size_of
from megatron_dapo.rollout.statistics import WindowSummary
from megatron_dapo.telemetry.alarms import QUALITY_ALARMS
from megatron_dapo.telemetry.metrics import (
    DISTILLED,
    EPISODE_LIMITS,
    PHASES,
    RECORDED,
    REWARD_PART,
    SOURCE,
    STEP_METRICS,
)
from megatron_dapo.types import CallStatus, Group, Outcome, ScoredSample, TrainSample, num_distinct

OUTCOMES: tuple[Outcome, ...] = ("correct", "wrong", "unparsable", "timeout", "truncated", "error", "unfinished")


def mean(values: Sequence[float]) -> float:
    """Return the mean; 0 if there are no values."""
    return sum(values) / len(values) if values else 0.0


def _std(values: Sequence[float]) -> float:
    center = mean(values)
    return math.sqrt(mean([(value - center) ** 2 for value in values]))


def step_metrics(
    config: Config,
    rollout: RolloutBatch,
    train_step: int,
    learned: Mapping[str, float],
    times: Mapping[str, float],
    disagreement_share: float,
    engine_busy: float | None,
) -> dict[str, float]:
    """Return the metrics of a finished train step, except progress; `times` in seconds by phase.

    `engine_busy`: seconds in which servers had requests since the last step; None for engines in the trainer's processes.
    `train_step` counts from 0, so it is the policy version that was trained. `learned`: the learner's metrics. Metrics
    that the learner does not report, because the algorithm has no critic or no group advantages, are 0.
    """
    round_size = round_size_of(config.rollout.prompts_per_step, config.rollout)
    absent = {name: 0.0 for name in STEP_METRICS if name.startswith(("critic/", "advantage/"))}
    return {
        **rollout_metrics(rollout, train_step, round_size),
        **prefix_metrics(rollout.prefix_reuse),
        **prompt_metrics(rollout),
        **window_metrics(rollout),
        **episode_metrics(rollout),
        **source_metrics(rollout),
        **{f"{DISTILLED}teacher/{name}/divergence": total / max(1, count) for name, (total, count) in rollout.taught.items()},
        **quality_metrics(rollout.groups),
        **reward_metrics(rollout.groups, disagreement_share),
        **absent,
        **learned,
        **throughput_metrics(rollout, times),
        **idle_metrics(times, engine_busy),
        **process_metrics(times),
    }


def sft_metrics(samples: Sequence[TrainSample], learned: Mapping[str, float], times: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a step of fine-tuning, except progress; those of sampling and rewards are 0."""
    lengths = [sample.num_response_tokens for sample in samples]
    return {
        **{name: 0.0 for name in STEP_METRICS if not name.startswith(("progress/", "checkpoint/"))},
        "rollout/groups_trained": len(samples),
        "rollout/response_tokens_mean": mean(lengths),
        "rollout/response_tokens_max": max(lengths, default=0),
        "rollout/prompt_tokens_mean": mean([sample.prompt_length for sample in samples]),
        "quality/compression_mean": 1.0,  # low values raise an alarm
        **learned,
        "throughput/samples_per_s": len(samples) / max(training_seconds(times), 1e-9),
        "throughput/trained_tokens_per_s": sum(one.num_tokens for one in samples) / max(times["train"], 1e-9),
        **process_metrics(times),
    }


def process_metrics(times: Mapping[str, float]) -> dict[str, float]:
    """Return memory and seconds by phase of this process, and the "nodes/" section of unwatched nodes."""
    return {
        **node_metrics(),
        "memory/host_rss_mib": psutil.Process().memory_info().rss / 2**20,
        "memory/device_unallocated_mib": device_unallocated() / 2**20,
        **{f"time/{name}": seconds for name, seconds in times.items()},
    }


def device_unallocated() -> int:
    """Return by how many bytes torch's peak reserved device memory exceeds its peak allocated; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0
    return torch.cuda.max_memory_reserved() - torch.cuda.max_memory_allocated()


def node_metrics(num_alerts: int = 0, stragglers: Sequence[Mapping[str, Any]] = ()) -> dict[str, float]:
    """Return the "nodes/" section, by default that of a run whose nodes are not watched.

    stragglers: "phase", "rank" and "over_median" of each compared phase.
    """
    compared = {each["phase"]: each for each in stragglers}
    metrics: dict[str, float] = {"nodes/alerts": num_alerts}
    for phase in PHASES:
        slowest = compared.get(phase, {"rank": -1, "over_median": 0.0})
        metrics[f"nodes/{phase}_slowest_rank"] = slowest["rank"]
        metrics[f"nodes/{phase}_over_median"] = slowest["over_median"]
    return metrics


def rollout_metrics(batch: RolloutBatch, policy_version: int, round_size: int) -> dict[str, float]:
    """Return the "rollout/" section."""
    statistics, groups = batch.statistics, batch.groups
    samples = [sample for group in groups for sample in group.samples]
    lengths = [sample.completion.num_sampled for sample in samples]
    staleness = [policy_version - group.policy_version for group in groups]
    num_finished = max(1, sum(statistics.filter_decisions.values()))
    ages = [
        (policy_version - run.version, run.end - max(run.start, sample.window.start))
        for sample in samples
        for run in sample.completion.versions
        if run.end > sample.window.start
    ]
    finished = [_finished(group.samples) for group in groups]
    duplicates = sum(len(group) - num_distinct(sample.completion for sample in group) for group in finished)
    return {
        "rollout/groups_trained": len(groups),
        "rollout/groups_generated": sum(statistics.filter_decisions.values()),
        "rollout/groups_filtered_share": 1.0 - statistics.filter_decisions.get("kept", 0) / num_finished,
        "rollout/groups_all_correct_share": statistics.filter_decisions.get("all_right", 0) / num_finished,
        "rollout/groups_all_wrong_share": statistics.filter_decisions.get("all_wrong", 0) / num_finished,
        "rollout/groups_carried_over": statistics.num_buffered,
        "rollout/groups_unfinished": statistics.num_unfinished,
        "rollout/groups_dropped_stale": statistics.num_stale,
        "rollout/generation_rounds": math.ceil(statistics.num_started / round_size),
        "rollout/staleness_mean": mean(staleness),
        "rollout/staleness_max": max(staleness, default=0),
        "rollout/token_staleness_mean": sum(age * count for age, count in ages) / max(1, sum(count for _, count in ages)),
        "rollout/token_staleness_max": max((age for age, _ in ages), default=0),
        "rollout/partial_share": mean([len({run.version for run in one.completion.versions}) > 1 for one in samples]),
        "rollout/responses_continued": statistics.num_continued,
        "rollout/tokens_discarded": statistics.num_discarded_tokens,
        "rollout/accuracy_trained": mean([sample.score.accuracy for sample in _finished(samples)]),
        "rollout/accuracy_generated": statistics.mean_accuracy,
        "rollout/response_tokens_mean": mean(lengths),
        "rollout/response_tokens_max": max(lengths, default=0),
        "rollout/response_tokens_filtered_mean": statistics.dropped_lengths.mean,
        "rollout/prompt_tokens_mean": mean([len(group.prompt.token_ids) for group in groups]),
        "rollout/truncated_share": mean([sample.completion.is_truncated for sample in _finished(samples)]),
        "rollout/duplicate_share": duplicates / max(1, len(samples)),
        "rollout/injected_share": mean([TEMPLATE in group.prompt.extra for group in groups]),
        "rollout/injected_accuracy": mean(
            [
                one.score.accuracy
                for group in groups
                if TEMPLATE in group.prompt.extra
                for one in _finished(group.samples)
            ]
        ),
    }


def source_metrics(batch: RolloutBatch) -> dict[str, float]:
    """Return accuracy and filtered share of each prompt source; empty if there is only one source."""
    sources = batch.statistics.sources
    return {
        f"{SOURCE}{name}/{metric}": value
        for name, counts in sources.items()
        if len(sources) > 1
        for metric, value in (
            ("accuracy_generated", counts["correct"] / max(1, counts["responses"])),
            ("groups_generated", counts["groups"]),
            ("groups_filtered_share", 1.0 - counts["kept"] / counts["groups"]),
        )
    }


def prefix_metrics(reuse: PrefixReuse) -> dict[str, float]:
    """Return the part of the "rollout/" section that only the engine knows."""
    return {
        "rollout/continued_tokens": reuse.num_tokens,
        "rollout/prefix_cached_share": reuse.cached_share,
        "rollout/tokens_unrouted": reuse.num_unrouted,
        "rollout/draft_accepted": reuse.num_verified / max(1, reuse.num_verifications),
    }


def prompt_metrics(batch: RolloutBatch) -> dict[str, float]:
    """Return the "prompts/" section."""
    names = (
        *("skipped", "audited", "tokens_saved", "filter_precision", "filter_recall", "calibration_error"),
        *("put_off", "is_long_round"),
    )
    sizes = [len(group.samples) for group in batch.groups]
    return {
        **{f"prompts/{name}": batch.statistics.prompts.get(name, 0.0) for name in names},
        "prompts/group_size_min": min(sizes, default=0),
        "prompts/group_size_max": max(sizes, default=0),
    }


def quality_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return the "quality/" section: repetition by outcome, loops, compressibility and probability."""
    samples = [sample for group in groups for sample in group.samples]
    finished = _finished(samples)
    truncated = [sample for sample in finished if sample.completion.is_truncated]
    whole = [sample for sample in finished if not sample.completion.is_truncated]
    kinds = {
        "": samples,
        "correct_": [sample for sample in whole if sample.score.accuracy > 0],
        "wrong_": [sample for sample in whole if sample.score.accuracy <= 0],
        "truncated_": truncated,
    }
    metrics: dict[str, float] = {}
    for kind, chosen in kinds.items():
        shares = [sample.repetition.ngram for sample in chosen]
        metrics[f"quality/repetition_{kind}mean"] = mean(shares)
        metrics[f"quality/repetition_{kind}p99"] = _percentile(shares, 99)
    ratios = [sample.repetition.zlib_ratio for sample in samples]
    num_tokens = max(1, sum(sample.completion.num_sampled for sample in samples))
    in_loops = sum(sample.repetition.loop_period * sample.repetition.loop_repeats for sample in samples)
    correct = [sample.completion.sampled.logprobs for sample in kinds["correct_"]]
    nll = [-float(logprobs.mean()) for logprobs in correct if len(logprobs)]
    probability = sum(float(np.exp(sample.completion.sampled.logprobs).sum(dtype=np.float64)) for sample in samples)
    return {
        **metrics,
        "quality/tail_loop_share": mean([sample.repetition.loop_repeats > 0 for sample in samples]),
        "quality/tail_loop_truncated_share": mean([sample.repetition.loop_repeats > 0 for sample in truncated]),
        "quality/tail_loop_token_share": in_loops / num_tokens,
        "quality/nll_correct_p95": _percentile(nll, 95),
        "quality/nll_correct_p995": _percentile(nll, 99.5),
        "quality/compression_mean": mean(ratios),
        "quality/compression_p01": _percentile(ratios, 1),
        "quality/probability_mean": probability / num_tokens,
    }


def quality_warnings(metrics: Mapping[str, float], config: QualityConfig, groups: Sequence[Group] = ()) -> list[str]:
    """Return a warning for each [quality] threshold that a step's metrics have crossed.

    The one for failed rewards has the text of the first failure in the step's `groups`.
    """
    failures = (sample.score.failure for group in groups for sample in group.samples if sample.score.failure)
    first_failure = next(failures, "")
    limits = {f"quality.{name}": value for name, value in config.model_dump().items()}
    warnings = []
    for alarm in QUALITY_ALARMS:
        value, limit = metrics[alarm.metric], limits[str(alarm.limit)]
        if alarm.is_passed(value, limit):
            reason = f"; the first: {first_failure}" if alarm.metric == "reward/failed_share" and first_failure else ""
            warnings.append(f"{alarm.metric} is {value:.3g}, {alarm.side} {alarm.limit} {limit:.3g}{reason}")
    return warnings


def _percentile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent)) if values else 0.0


def window_metrics(batch: RolloutBatch) -> dict[str, float]:
    """Return the "window/" section; all 0 without windows."""
    windows = batch.statistics.windows or WindowSummary()
    return {
        "window/responses": windows.num_windows,
        "window/finished_share": windows.finished_share,
        "window/continued_share": windows.continued_share,
        "window/per_finished": windows.windows_per_finished,
        "window/waiting": windows.num_waiting,
        "window/prefix_tokens": windows.num_prefix_tokens,
    }


def episode_metrics(batch: RolloutBatch) -> dict[str, float]:
    """Return the "episodes/" section; all 0 without an environment."""
    samples = [sample for group in batch.groups for sample in group.samples]
    completions, finished = [sample.completion for sample in samples], _finished(samples)
    played = [(one, one.episode) for one in completions if one.episode is not None]
    turns = [turn for _, episode in played for turn in episode.turns]
    turns += [turn for _, episode in played for segment in episode.segments for turn in segment.turns]
    statuses = Counter(call.status for turn in turns for call in turn.calls)
    ends: Counter[str] = Counter(episode.end for _, episode in played)
    num_sampled = sum(turn.end - turn.start for turn in turns)
    num_observed = sum(turn.observed_end - turn.end for turn in turns)
    num_played, num_calls = max(1, len(played)), max(1, statuses.total())
    num_ended = max(1, ends.total() - ends["window"])
    return {
        "episodes/turns_mean": len(turns) / num_played,
        "episodes/sampled_tokens_mean": num_sampled / num_played,
        "episodes/observed_tokens_mean": num_observed / num_played,
        "episodes/segments_mean": sum(len(episode.segments) for _, episode in played) / num_played,
        **{f"episodes/end_{name}_share": ends[name] / num_ended for name in ("done", *EPISODE_LIMITS)},
        "episodes/calls_mean": statuses.total() / num_played,
        **{f"episodes/calls_{name}_share": statuses[name] / num_calls for name in get_args(CallStatus)},
        **{
            f"episodes/{name}_seconds_mean": sum(episode.seconds.get(name, 0.0) for _, episode in played) / num_played
            for name in ("generating", "acting", "waiting")
        },
        "episodes/retries": sum(episode.num_retries for _, episode in played),
        "episodes/begun_anew": sum(episode.attempt for _, episode in played),
        "episodes/groups_lost": batch.statistics.num_lost,
        "episodes/left_out": batch.statistics.num_left_out,
        **_means(RECORDED, [one.completion.episode.figures for one in finished if one.completion.episode is not None]),
    }


def _finished(samples: Sequence[ScoredSample]) -> list[ScoredSample]:
    """Return the finished samples; without windows, that is all of them."""
    return [sample for sample in samples if sample.window.is_finished]


def reward_metrics(groups: Sequence[Group], disagreement_share: float) -> dict[str, float]:
    """Return the "reward/" section."""
    worked_on = [sample for group in groups for sample in group.samples]
    samples = _finished(worked_on)
    rewards = [sample.reward for sample in samples]
    outcomes = [sample.score.outcome for sample in worked_on]
    return {
        "reward/mean": mean(rewards),
        "reward/std": _std(rewards),
        "reward/group_std_mean": mean([_std([one.reward for one in _finished(group.samples)]) for group in groups]),
        "reward/verifier_mean": mean([sample.reward_parts.get("verifier", 0.0) for sample in samples]),
        **{
            f"reward/{part}_mean": mean([sample.reward_parts.get(part, 0.0) for sample in samples])
            for part in ("overlong", "perplexity", "format")
        },
        **{f"reward/outcome_{outcome}": outcomes.count(outcome) / max(1, len(outcomes)) for outcome in OUTCOMES},
        "reward/failed_share": mean([bool(sample.score.failure) for sample in worked_on]),
        "reward/disagreement_share": disagreement_share,
        **_means(REWARD_PART, [sample.score.detail.get("parts", {}) for sample in samples]),
    }


def _means(prefix: str, values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each of the users' numbers, over the responses that have it; `prefix` comes before its name."""
    names = sorted({name for one in values for name in one})
    return {prefix + name: mean([one[name] for one in values if name in one]) for name in names}


def training_seconds(times: Mapping[str, float]) -> float:
    """Return the seconds of a step, excluding evaluations and checkpoints since the previous step."""
    return times["step"] - times["evaluate"] - times["checkpoint"]


def throughput_metrics(batch: RolloutBatch, times: Mapping[str, float]) -> dict[str, float]:
    """Return the "throughput/" section; `times` in seconds by phase."""
    samples = [(group, sample) for group in batch.groups for sample in group.samples]
    trained_tokens = sum(len(group.prompt.token_ids) + sample.completion.num_tokens for group, sample in samples)
    generated = batch.statistics.num_tokens
    return {
        "throughput/samples_per_s": len(samples) / max(training_seconds(times), 1e-9),
        # If collecting overlaps training, the phase is only the wait for the batch.
        "throughput/generated_tokens_per_s": generated / max(times["generate"], batch.seconds, 1e-9),
        "throughput/trained_tokens_per_s": trained_tokens / max(times["train"], 1e-9),
        "throughput/generated_tokens": generated,
    }


def idle_metrics(times: Mapping[str, float], engine_busy: float | None) -> dict[str, float]:
    """Return the "async/" section: the share of a step in which each side has nothing to do.

    `times` in seconds by phase; `engine_busy` as in `step_metrics`. Engines without servers are busy while they generate.
    """
    step = max(training_seconds(times), 1e-9)
    busy = times["generate"] if engine_busy is None else engine_busy - times["evaluate"]
    return {
        "async/trainer_idle": min(1.0, times["generate"] / step),
        "async/engine_idle": min(1.0, max(0.0, 1.0 - busy / step)),
    }


def evaluation_metrics(result: EvaluationResult, seconds: float, num_trained: int = 0) -> dict[str, float]:
    """Return the "eval/" metrics over all problems and, if there are several sources, eval/NAME/avg_at_k for each.

    num_trained: problems of the evaluation that are also trained on.
    """
    metrics = {f"eval/{name}": value for name, value in _estimates(result).items()}
    for source in result.sources:
        estimates = _estimates(result.of_source(source))
        metrics |= {f"eval/{source}/{name}": value for name, value in estimates.items()}
    return {**metrics, "eval/seconds": seconds, "eval/trained_problems": float(num_trained)}


def _estimates(result: EvaluationResult) -> dict[str, float]:
    k, headline = result.protocol.num_samples, result.headline
    return {
        "avg_at_k": headline.value,
        "avg_at_k_low": headline.low,
        "avg_at_k_high": headline.high,
        "pass_at_k": result.metrics[f"pass@{k}"].value,
        "cons_at_k": result.metrics[f"cons@{k}"].value,
        "truncated_share": result.rates["truncation_rate"],
        "response_tokens_mean": result.rates["mean_response_tokens"],
    }
