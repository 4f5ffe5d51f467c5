"""Anomalies with their steps and causes, and the verdict on a run, from made runs whose faults are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_dapo.evaluation.comparison import compare_with
from megatron_dapo.evaluation.reference import read_record
from megatron_dapo.report.anomalies import find_anomalies, held_out_change, train_steps_of, verdict_on
from megatron_dapo.report.run_files import read_run
from tests.made_runs import a_sample, an_evaluation, make_run, write_json, write_lines


def spans(path: Path) -> dict[str, tuple[int, int]]:
    return {each.title: (each.first, each.last) for each in find_anomalies(read_run(path))}


def test_a_healthy_run_has_none_and_says_what_it_learned(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run"))
    assert find_anomalies(run) == []
    verdict = verdict_on(run, [])
    assert verdict.level == "good"
    first, last = (run.evaluations[place]["eval/avg_at_k"] for place in (0, -1))
    change = held_out_change(run, 0, 30)
    assert change is not None and change.low > 0
    figures = f"{first:.2f} -> {last:.2f} ({last - first:+.2f} [{change.low:+.2f}, {change.high:+.2f}])"
    assert verdict.learned == f"Learned: {figures} held-out avg@8 in 30 steps, still rising"
    assert verdict.health == "healthy"
    solved = [sum(one.accuracies) for one in an_evaluation(0.8, 3).problems]
    counts = f"{solved.count(8.0)} are solved in every response and {solved.count(0.0)} in none"
    assert verdict.advice == f"of 40 held-out problems {counts}; it still rises: raise run.total_steps and start the same command again"
    shared = replace(run, evaluations=[{**row, "eval/trained_problems": 3.0} for row in run.evaluations])
    assert "in 30 steps (3 of the held-out problems are also trained on), still" in verdict_on(shared, []).learned


@pytest.mark.parametrize(
    ("scores", "words"),
    [((0.4, 0.8, 0.8, 0.8), "level since step 20"), ((0.4, 0.8, 0.8, 0.3), "falling")],
)
def test_the_direction_is_that_of_pairs_by_problem(tmp_path: Path, scores: tuple[float, ...], words: str) -> None:
    run = read_run(make_run(tmp_path / "run", scores=scores))
    assert verdict_on(run, []).learned.endswith(words)


@pytest.mark.parametrize(
    ("scores", "word"), [((0.4, 0.8), "Learned: "), ((0.8, 0.4), "Lost: "), ((0.5, 0.5), "No clear change: ")]
)
def test_two_evaluations_have_no_direction(tmp_path: Path, scores: tuple[float, ...], word: str) -> None:
    run = read_run(make_run(tmp_path / "run", evaluate_every=30, scores=scores))
    learned = verdict_on(run, []).learned
    assert learned.startswith(word) and learned.endswith("held-out avg@8 in 30 steps")


@pytest.mark.parametrize(
    ("metric", "words"), [("rollout/groups_all_correct_share", "harder prompts"), ("rollout/groups_all_wrong_share", "easier prompts")]
)
def test_a_healthy_run_is_told_when_its_prompts_are_used_up(tmp_path: Path, metric: str, words: str) -> None:
    run = read_run(make_run(tmp_path / "run", rows={step: {metric: 0.7} for step in range(15, 31)}))
    assert words in verdict_on(run, []).advice


def test_the_reason_of_failed_rewards_is_in_the_anomaly(tmp_path: Path) -> None:
    samples = [a_sample(step, outcome="error", error="KeyError: 'JUDGE_KEY'") for step in (11, 12, 13)]
    rows = {step: {"reward/failed_share": 0.5} for step in range(12, 14)}
    found = find_anomalies(read_run(make_run(tmp_path / "run", rows=rows, samples=samples, filtered=[])))
    assert [each.cause.partition("; ")[2] for each in found] == ["most often: KeyError: 'JUDGE_KEY'"]


@pytest.mark.parametrize(
    ("metric", "value", "title", "steps"),
    [
        ("mismatch/abs_logprob_diff_mean", 0.05, "trainer and engine disagree", 1),
        ("quality/repetition_mean", 0.3, "responses repeat themselves", 1),
        ("quality/tail_loop_share", 0.5, "responses end in loops", 1),
        ("rollout/truncated_share", 0.9, "most responses are cut at the length limit", 3),
        ("rollout/groups_filtered_share", 0.95, "dynamic sampling filters most groups", 3),
        ("advantage/zero_std_groups_share", 0.8, "most trained groups have equal rewards", 3),
        ("reward/failed_share", 0.1, "the reward fails or runs out of time", 1),
        ("mismatch/ess", 0.1, "few samples carry the importance weights", 2),
    ],
)
def test_each_alarm_names_its_steps_and_needs_its_patience(
    tmp_path: Path, metric: str, value: float, title: str, steps: int
) -> None:
    faulty = {step: {metric: value} for step in range(12, 12 + steps)}
    assert spans(make_run(tmp_path / "run", rows=faulty))[title] == (12, 11 + steps)
    if steps > 1:
        short = {step: {metric: value} for step in range(12, 11 + steps)}
        assert title not in spans(make_run(tmp_path / "short", rows=short))


def test_a_span_is_one_anomaly_with_its_worst_step(tmp_path: Path) -> None:
    values = {5: 0.03, 6: 0.09, 7: 0.001, 8: 0.04}
    rows = {step: {"mismatch/abs_logprob_diff_mean": value} for step, value in values.items()}
    found = [
        each for each in find_anomalies(read_run(make_run(tmp_path / "run", rows=rows))) if "disagree" in each.title
    ]
    assert [(each.first, each.last) for each in found] == [(5, 8)]
    assert found[0].cause == "mismatch/abs_logprob_diff_mean 0.09 at step 6, above 0.02 (mismatch.alarm)"


def test_limits_are_those_of_the_run(tmp_path: Path) -> None:
    rows = {9: {"quality/repetition_mean": 0.3}}
    assert "responses repeat themselves" not in spans(
        make_run(tmp_path / "run", rows=rows, quality__repetition_alarm=0.5)
    )


def test_collapse_jumps_skips_and_gaps(tmp_path: Path) -> None:
    rows: dict[int, dict[str, Any]] = {step: {"actor/entropy": 0.001} for step in range(15, 31)}
    rows[20] = rows[20] | {"actor/grad_norm_max": 9.0}
    for step in range(22, 31):
        rows[step] = rows[step] | {"progress/skipped_optimizer_steps": 2.0}
    rows[25] = rows[25] | {"actor/loss": None, "actor/grad_norm": None}
    found = spans(make_run(tmp_path / "run", rows=rows))
    # The mean over five steps is below a tenth of the start's at the fifth step of the collapse.
    assert found["entropy collapse"] == (19, 30)
    assert found["gradient jump"] == (20, 20)
    assert found["optimizer steps skipped"] == (22, 22)
    assert found["metrics are not finite"] == (25, 25)
    verdict = verdict_on(read_run(tmp_path / "run"), find_anomalies(read_run(tmp_path / "run")))
    assert verdict.level == "alarm" and verdict.health == "not healthy: entropy collapse since step 19"


def test_episodes_that_are_lost_and_calls_that_vanish(tmp_path: Path) -> None:
    """Lost: more than a hundredth of a step's groups. Calls: the last five steps below a tenth of the first five."""
    rows: dict[int, dict[str, Any]] = {
        step: {"episodes/calls_mean": 2.0 if step < 24 else 0.1, "rollout/groups_generated": 256} for step in range(1, 31)
    }
    rows[7]["episodes/groups_lost"] = 2.0  # 0.8 %
    for step in (12, 13):
        rows[step]["episodes/groups_lost"] = 3.0
    found = spans(make_run(tmp_path / "run", rows=rows))
    assert found["episodes are lost"] == (12, 13) and found["tool calls vanish"] == (26, 30)
    few = {step: {**row, "episodes/calls_mean": 2.0 if step < 28 else 0.1} for step, row in rows.items()}
    assert "tool calls vanish" not in spans(make_run(tmp_path / "few", rows=few))


def test_mismatch_that_grows_below_the_alarm(tmp_path: Path) -> None:
    rows = {step: {"mismatch/abs_logprob_diff_mean": 1e-3 * 1.04**step} for step in range(1, 81)}
    found = list(find_anomalies(read_run(make_run(tmp_path / "run", 80, rows=rows))))
    assert "mismatch grows" in [each.title for each in found]


def test_restarts_failures_and_nodes(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    alert = {"node": "node3", "metric": "cpu_throttled", "seconds": 250.0}
    records = [
        {"attempt": 1, "began": 1.0, "job": "", "completed_steps": 0},
        {"attempt": 2, "began": 2.0, "job": "", "completed_steps": 11},
        {"attempt": 2, "ended": 3.0, "reason": "stopped by a signal", "exit_code": 75},
        {"attempt": 3, "began": 4.0, "job": "", "completed_steps": 20},
        {"attempt": 3, "alert": alert, "job": "", "excluded": ""},
    ]
    write_lines(path / "attempts.jsonl", records)
    write_json(
        path / "failure.json", {"line": "first failure: attempt 3, rank 3 (node1): killed; to do: look for who sent it"}
    )
    found = find_anomalies(read_run(path))
    restarts = [each for each in found if each.title == "restart"]
    assert [each.first for each in restarts] == [11, 20]
    assert (
        restarts[0].cause
        == "attempt 1: failed or killed: it left no record of its end; attempt 2 continues after step 11"
    )
    assert restarts[1].level == "note" and "stopped by a signal" in restarts[1].cause
    failure = next(each for each in found if each.title == "failure")
    assert failure.cause.endswith("killed") and failure.advice == "look for who sent it"
    assert "node3: cpu_throttled" in next(each for each in found if each.title == "faulty node").cause
    assert verdict_on(read_run(path), found).health.startswith("failed after step 30: ")


def test_accuracy_that_falls_from_its_best(tmp_path: Path) -> None:
    assert spans(make_run(tmp_path / "run", scores=(0.3, 0.9, 0.5, 0.2)))["held-out accuracy falls"] == (10, 30)


def test_a_reference_is_left_at_the_step_that_compare_says(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", scores=(0.4, 0.4, 0.4, 0.4))
    table = tmp_path / "reference.csv"
    table.write_text("optimizer_step,value\n0,0.4\n40,0.9\n80,0.95\n")
    comparison = compare_with(path, read_record(table))
    found = find_anomalies(read_run(path), [comparison])
    assert comparison.off_since == 20.0  # optimizer steps, two a train step
    assert [(each.first, each.last) for each in found if each.title.startswith("off the reference")] == [(10, 30)]


def test_optimizer_steps_become_train_steps(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run", 10))
    assert train_steps_of(run, [0, 2, 3, 20, 40], "optimizer_step") == [0, 1, 1.5, 10, 20]
    assert train_steps_of(run, [3.0], "train_step") == [3.0]


def test_an_empty_run_is_no_success(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        (path / name).unlink()
    run = read_run(path)
    assert verdict_on(run, find_anomalies(run)).health == "no train step was made: nothing was learned"


@pytest.mark.parametrize(("dtype", "titles"), [("bfloat16", []), ("float32", ["trainer and engine disagree"])])
def test_the_default_alarm_is_that_of_format_and_device(tmp_path: Path, dtype: str, titles: list[str]) -> None:
    rows = {step: {"mismatch/abs_logprob_diff_mean": 0.04} for step in range(1, 31)}
    path = make_run(tmp_path / "run", rows=rows, mismatch__alarm=0.0, model__dtype=dtype)
    write_json(path / "provenance.json", {"machine": "TP1 PP1 CP1 DP1 on 1 processes, CPU; host, Linux, 2 CPUs"})
    assert [each.title for each in find_anomalies(read_run(path))] == titles


@pytest.mark.parametrize(
    ("trainer", "engine", "title", "figures"),
    [
        (0.5, 0.0, "trainer waits", "trainer 5 s and engines 0 s of 10 s a step"),
        (0.1, 0.4, "engines wait", "trainer 1 s and engines 4 s of 10 s a step"),
        (0.1, 0.1, None, ""),
    ],
)
def test_the_side_that_waits_is_named_with_its_seconds(
    tmp_path: Path, trainer: float, engine: float, title: str | None, figures: str
) -> None:
    """Evaluations and checkpoints belong to neither side; the first steps, which compile, are left out."""
    times = {"time/step": 13.0, "time/evaluate": 2.0, "time/checkpoint": 1.0}
    waits = {"async/trainer_idle": trainer, "async/engine_idle": engine}
    rows: dict[int, dict[str, Any]] = {step: {**times, **waits} for step in range(6, 31)}
    rows |= {step: {**times, "async/trainer_idle": 1.0, "async/engine_idle": 0.0} for step in range(1, 6)}
    servers = {"rollout__engine": "sglang", "sglang__placement": "disaggregated"}
    found = find_anomalies(read_run(make_run(tmp_path / "run", rows=rows, **servers)))
    assert [(one.title, one.cause, one.first, one.last) for one in found] == ([(title, figures, 6, 30)] if title else [])
    shared = {**servers, "sglang__placement": "colocated"}
    assert find_anomalies(read_run(make_run(tmp_path / "colocated", rows=rows, **shared))) == []
