"""The rollout's metrics: age of tokens, partial responses, tokens thrown away."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, replace

import pytest

from megatron_dapo.config import config_from_dict
from megatron_dapo.config.monitoring_schema import QualityConfig
from megatron_dapo.engines.base import PrefixReuse
from megatron_dapo.rewards.pool.repetition import repetition_numbers, zlib_ratio
from megatron_dapo.rollout.batch import RolloutBatch
from megatron_dapo.rollout.statistics import StatisticsBuilder, statistics_from_json
from megatron_dapo.telemetry.alarms import QUALITY_ALARMS
from megatron_dapo.telemetry.metrics import PHASES, STEP_METRICS, checked
from megatron_dapo.trainer.metrics import (
    idle_metrics,
    prefix_metrics,
    quality_metrics,
    quality_warnings,
    reward_metrics,
    rollout_metrics,
    source_metrics,
    step_metrics,
    throughput_metrics,
    window_metrics,
)
from megatron_dapo.types import Completion, Group, Prompt, Repetition, Score, ScoredSample, VersionRange, Window


def test_the_rollout_section_is_that_of_the_schema(make_world: Callable) -> None:
    metrics = rollout_metrics(make_world([0.5] * 40).collector.collect(4), 0, 4)
    drafted = PrefixReuse(num_verified=30, num_verifications=12)
    reuse = prefix_metrics(PrefixReuse(100, 40, 5) + PrefixReuse(60, 24) + drafted - PrefixReuse(0, 0, 2))
    assert reuse == {
        "rollout/continued_tokens": 160,
        "rollout/prefix_cached_share": 0.4,
        "rollout/tokens_unrouted": 3,
        "rollout/draft_accepted": 2.5,
    }
    assert prefix_metrics(PrefixReuse())["rollout/prefix_cached_share"] == 0
    assert {*metrics, *reuse} == {name for name in STEP_METRICS if name.startswith("rollout/")}
    for name in ("token_staleness_mean", "token_staleness_max", "partial_share", "responses_continued"):
        assert metrics[f"rollout/{name}"] == 0
    assert metrics["rollout/tokens_discarded"] == metrics["rollout/groups_unfinished"] == 0


def test_rounds_are_those_that_the_collector_counts(make_world: Callable) -> None:
    world = make_world([0.5] * 60, oversample=1.25, max_staleness=1, filter_groups=False)
    config = config_from_dict(
        {
            "model": {"path": "."},
            "data": {"train_paths": ["a"]},
            "rollout": {"prompts_per_step": 10, "oversample": 1.25, "max_staleness": 1},
        }
    )
    rollout = world.collector.collect(10)
    times = dict.fromkeys((*PHASES, "step"), 1.0)
    metrics = step_metrics(config, rollout, 0, {}, times, 0.0, None)
    assert rollout.statistics.num_started == 13, "12.5 rounded up: two rounds, if the metric rounded down"
    assert metrics["rollout/generation_rounds"] == world.collector.generation_step == 1


def test_idle_shares_are_those_of_the_step_without_evaluation() -> None:
    times = {**dict.fromkeys(PHASES, 0.0), "generate": 3.0, "evaluate": 5.0, "step": 15.0}
    assert idle_metrics(times, 13.0) == {"async/trainer_idle": pytest.approx(0.3), "async/engine_idle": pytest.approx(0.2)}
    assert idle_metrics(times, None)["async/engine_idle"] == pytest.approx(0.7), "engines that take turns with the trainer"
    assert idle_metrics(times, 0.0)["async/engine_idle"] == 1.0 and idle_metrics(times, 99.0)["async/engine_idle"] == 0.0


def test_sources_by_counting_their_groups(make_world: Callable) -> None:
    world = make_world([0.5] * 40)
    prompts = world.collector._prompts  # the ids of the world, as its collector looks them up
    for number, name in enumerate(list(prompts)):
        prompts[name] = replace(prompts[name], source="odd" if number % 2 else "even")
    batch = world.collector.collect(4)
    metrics = source_metrics(batch)
    counts = batch.statistics.sources
    decided = sum(batch.statistics.filter_decisions.values())
    assert sum(metrics[f"rollout/source/{name}/groups_generated"] for name in ("odd", "even")) == decided
    assert sum(found["kept"] for found in counts.values()) == batch.statistics.filter_decisions["kept"]
    correct = sum(found["correct"] for found in counts.values())
    responses = sum(found["responses"] for found in counts.values())
    assert correct / responses == pytest.approx(batch.statistics.mean_accuracy)
    assert statistics_from_json(json.loads(json.dumps(asdict(batch.statistics)))) == batch.statistics
    with pytest.raises(ValueError, match="missing"):  # the names of sources are known to the schema
        checked(STEP_METRICS, metrics)
    one = replace(batch.statistics, sources={"odd": counts["odd"]})
    assert source_metrics(replace(batch, statistics=one)) == {}


def test_the_window_section_by_counting_windows() -> None:
    import window_world

    world = window_world.make_window_world([0.5] * 60)
    num_waiting = 0
    for _ in range(5):
        batch = world.collector.collect(5)
        metrics = window_metrics(batch)
        assert list(metrics) == [name for name in STEP_METRICS if name.startswith("window/")]
        samples = [sample for group in batch.groups for sample in group.samples]
        finished = [len(sample.completion.token_ids) for sample in samples if sample.window.is_finished]
        assert metrics["window/responses"] == len(samples) == 20
        assert metrics["window/finished_share"] == pytest.approx(len(finished) / 20)
        assert metrics["window/continued_share"] == pytest.approx(num_waiting / 20)
        assert metrics["window/per_finished"] == pytest.approx(sum(-(-n // 8) for n in finished) / len(finished))
        assert metrics["window/prefix_tokens"] == sum(sample.window.start for sample in samples)
        assert metrics["window/prefix_tokens"] == 8 * sum(sample.window.start // 8 for sample in samples)
        num_waiting = 20 - len(finished)
        accounting = world.collector.accounting()
        assert metrics["window/waiting"] == accounting.unfinished + accounting.not_started
    assert num_waiting > 0


def test_the_window_section_is_zero_where_responses_come_whole(make_world: Callable) -> None:
    metrics = window_metrics(make_world([0.5] * 40).collector.collect(4))
    assert set(metrics.values()) == {0} and {f"window/{name}" for name in ("responses", "waiting")} <= set(metrics)


def test_age_and_partial_responses_by_counting_tokens(make_world: Callable) -> None:
    world = make_world([0.5] * 200, oversample=3.0, max_staleness=3, partial_rollout=True, filter_groups=False)
    num_partial = 0
    for version in range(6):
        batch = world.collector.collect(4)
        metrics = rollout_metrics(batch, version, 4)
        ages = []
        spans = []
        for group in batch.groups:
            for sample in group.samples:
                runs = sample.completion.versions
                ages += [version - run.version for run in runs for _ in range(run.start, run.end)]
                spans.append(len({run.version for run in runs}))
        assert metrics["rollout/token_staleness_mean"] == pytest.approx(sum(ages) / len(ages))
        assert metrics["rollout/token_staleness_max"] == max(ages) <= 3
        assert metrics["rollout/partial_share"] == pytest.approx(sum(span > 1 for span in spans) / len(spans))
        assert metrics["rollout/staleness_max"] >= metrics["rollout/staleness_mean"]
        assert metrics["rollout/groups_unfinished"] == world.collector.accounting().unfinished
        num_partial += sum(span > 1 for span in spans)
        world.engine.policy_version += 1
    assert num_partial > 0


def test_only_the_tokens_of_the_window_are_trained() -> None:
    """Eight tokens of an earlier window, two of this one by the version before the trained one, and three by that one."""
    versions = (VersionRange(0, 8, 1), VersionRange(8, 10, 4), VersionRange(10, 13, 5))
    completion = Completion("g/0", [1] * 13, [0.0] * 13, "abort", versions)
    sample = ScoredSample("g/0", completion, "", Score(0.0, 0.0, "unfinished"), {}, window=Window(8, False))
    batch = RolloutBatch((Group("g", Prompt("p", (), (1,), "1"), (sample,), 4, 1),), StatisticsBuilder().build())
    metrics = rollout_metrics(batch, 5, 4)
    assert metrics["rollout/token_staleness_mean"] == pytest.approx(2 / 5)
    assert metrics["rollout/token_staleness_max"] == metrics["rollout/staleness_max"] == 1


def test_generation_beside_training_is_not_credited_with_the_wait_alone(make_world: Callable) -> None:
    batch = make_world([0.5] * 40).collector.collect(4)
    times = {"generate": 0.5, "train": 2.0, "step": 4.0, "evaluate": 0.0, "checkpoint": 0.0}
    num_tokens = batch.statistics.num_tokens
    for seconds, expected in ((0.0, num_tokens / 0.5), (4.0, num_tokens / 4.0)):
        metrics = throughput_metrics(replace(batch, seconds=seconds), times)
        assert metrics["throughput/generated_tokens_per_s"] == pytest.approx(expected)


def test_tokens_of_given_up_groups_count_as_discarded(make_world: Callable) -> None:
    world = make_world([0.5] * 200, oversample=3.0, group_size=2)
    discarded = used = 0
    for version in range(8):
        batch = world.collector.collect(4)
        dropped = batch.statistics.dropped_lengths
        used += sum(sample.completion.num_tokens for group in batch.groups for sample in group.samples)
        used += round(dropped.mean * dropped.num_responses)
        discarded += rollout_metrics(batch, version, 4)["rollout/tokens_discarded"]
        world.engine.policy_version += 1
    assert discarded == world.engine.num_generated - used > 0


def judged(tokens: list[int], outcome: str, logprobs: list[float], is_truncated: bool = False) -> ScoredSample:
    version = (VersionRange(0, len(tokens), 0),)
    completion = Completion("g/0", tokens, logprobs, "length" if is_truncated else "stop", version)
    score = Score(float(outcome == "correct"), 0.0, outcome)
    return ScoredSample("g/0", completion, "", score, {}, repetition=Repetition(*repetition_numbers(tokens)))


def test_the_quality_section_by_outcome_and_its_warnings() -> None:
    loop, fresh = [1, 2, 3] * 20, list(range(60))
    samples = (
        judged(fresh, "correct", [-0.5] * 60),
        judged(loop, "wrong", [-0.1] * 60),
        judged(loop, "truncated", [-0.1] * 60, is_truncated=True),
        judged(fresh, "truncated", [-0.5] * 60, is_truncated=True),
    )
    groups = [Group("g", Prompt("p", (), (1,), "1"), samples, 0, 1)]
    metrics = quality_metrics(groups)
    assert set(metrics) == {name for name in STEP_METRICS if name.startswith("quality/")}
    share = 1 - 3 / 41  # 41 20-grams, of which three differ
    expected = {
        "repetition_mean": share / 2,
        "repetition_p99": share,
        "repetition_correct_mean": 0.0,
        "repetition_wrong_mean": share,
        "repetition_truncated_mean": share / 2,
        "repetition_truncated_p99": 0.99 * share,
        "tail_loop_share": 0.5,
        "tail_loop_truncated_share": 0.5,
        "tail_loop_token_share": 0.5,
        "compression_mean": (zlib_ratio(loop) + zlib_ratio(fresh)) / 2,
        "probability_mean": (math.exp(-0.5) + math.exp(-0.1)) / 2,
    }
    assert {name: metrics[f"quality/{name}"] for name in expected} == pytest.approx(expected)
    metrics["reward/failed_share"] = reward_metrics(groups, 0.0)["reward/failed_share"]
    assert quality_warnings(metrics, QualityConfig(repetition_alarm=0.5, tail_loop_alarm=0.5)) == []
    found = quality_warnings(metrics, QualityConfig(repetition_alarm=0.4, tail_loop_alarm=1, probability_alarm=0.7))
    assert found == [
        "quality/repetition_mean is 0.463, above quality.repetition_alarm 0.4",
        "quality/probability_mean is 0.756, above quality.probability_alarm 0.7",
    ]
    assert len(quality_warnings(metrics, QualityConfig(compression_alarm=1.0))) == 3
    # One of four in a part of a mixture: an alarm, whatever the response's own outcome.
    failed = Score(1.0, 1.0, "correct", detail={"failed": {"judge": "status 500"}})
    groups = [Group("g", Prompt("p", (), (1,), "1"), (replace(samples[0], score=failed), *samples[1:]), 0, 1)]
    metrics["reward/failed_share"] = reward_metrics(groups, 0.0)["reward/failed_share"]
    found = quality_warnings(metrics, QualityConfig(repetition_alarm=1, tail_loop_alarm=1), groups)
    assert found == ["reward/failed_share is 0.25, above quality.reward_failure_alarm 0.02; the first: judge: status 500"]
    assert set(quality_metrics([]).values()) == {0.0}


@pytest.mark.parametrize(("compression", "probability"), [(1.15, 0.94), (0.38, 0.98)])
def test_runs_that_learn_warn_of_nothing_by_default(compression: float, probability: float) -> None:
    """The levels of SmolLM2-135M with six tokens a response, and of the quickstart with eighty."""
    level = {"compression_mean": compression, "probability_mean": probability}
    metrics = {alarm.metric: 0.0 for alarm in QUALITY_ALARMS} | {f"quality/{name}": at for name, at in level.items()}
    assert quality_warnings(metrics, QualityConfig()) == []


def test_loops_warn_by_default_without_the_compression_alarm() -> None:
    metrics = {alarm.metric: 0.0 for alarm in QUALITY_ALARMS}
    metrics |= {"quality/repetition_mean": 0.5, "quality/tail_loop_share": 0.5, "quality/compression_mean": 0.05}
    found = quality_warnings(metrics, QualityConfig())
    assert [line.split()[0] for line in found] == ["quality/repetition_mean", "quality/tail_loop_share"]
