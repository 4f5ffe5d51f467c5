"""Comparisons with a reference: made curves whose verdicts are known, and intervals that hold the truth as often as they say."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_dapo.cli.main import app
from megatron_dapo.evaluation.comparison import BLOCK, compare_with, half_width, lag_one_correlation
from megatron_dapo.evaluation.estimators import ProblemRecord, estimate_metrics, response_rates
from megatron_dapo.evaluation.protocol import EvaluationResult
from megatron_dapo.evaluation.reference import Curve, CurvePoint, read_record, sampling_interval
from tests.unit.evaluation.conftest import PROTOCOL as ONE_PROBLEM

REFERENCES = Path(__file__).resolve().parents[3] / "examples" / "references"
AVERAGE, ENTROPY, LENGTH = "eval/avg_at_k", "actor/entropy", "rollout/response_tokens_mean"
PROTOCOL = replace(ONE_PROBLEM, num_problems=30, num_samples=32)


def result_of(rates, seed, protocol=PROTOCOL):
    """Answers to problems that are solved with the given probabilities."""
    rng, n = random.Random(seed), protocol.num_samples
    rows = [tuple(float(rng.random() < rate) for _ in range(n)) for rate in rates]
    records = tuple(
        ProblemRecord(f"p{i}", "1", 1, row, ("1",) * n, ("correct",) * n, (False,) * n, (5,) * n)
        for i, row in enumerate(rows)
    )
    return EvaluationResult(protocol, estimate_metrics(records), response_rates(records), records)


def write_run(directory: Path, series, results=(), per_step=16, evaluations=()):
    """A run's directory: `series` of metrics by train step, `results` of evaluations by train step."""
    directory.mkdir()
    length = max((len(values) for values in series.values()), default=0)
    rows = [
        {"train_step": step + 1, "progress/optimizer_steps": per_step * (step + 1.0)}
        | {name: values[step] for name, values in series.items()}
        for step in range(length)
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = list(evaluations)
    for step, result in dict(results).items():
        (directory / "evaluations").mkdir(exist_ok=True)
        (directory / "evaluations" / f"step_{step:06d}.json").write_text(result.to_json())
        bounds = {f"{AVERAGE}_low": result.headline.low, f"{AVERAGE}_high": result.headline.high}
        lines.append({"train_step": step, AVERAGE: result.headline.value, **bounds})
    (directory / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


def noise(seed, count, level=1.0, spread=0.1, rho=0.5):
    rng, value, values = random.Random(seed), 0.0, []
    for _ in range(count):
        value = rho * value + math.sqrt(1 - rho * rho) * rng.gauss(0, spread)
        values.append(level + value)
    return values


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.85])
def test_intervals_of_block_means_hold_the_truth(rho):
    held = total = 0
    for seed in range(400):
        values = noise(seed, 4 * BLOCK, level=0.0, spread=1.0, rho=rho)
        blocks = [values[start : start + BLOCK] for start in range(0, len(values), BLOCK)]
        correlation = lag_one_correlation(blocks)
        for block in blocks:
            total += 1
            held += abs(sum(block) / BLOCK) <= half_width(block, correlation)
    assert 0.92 <= held / total <= 0.99


def test_sampling_intervals_hold_the_models_true_score():
    rng = random.Random(3)
    held = 0
    for seed in range(100):
        rates = [rng.random() ** 2 for _ in range(30)]
        low, high = sampling_interval(result_of(rates, seed))
        held += low <= sum(rates) / 30 <= high
    assert 90 <= held <= 99


def test_two_runs_of_one_recipe_are_on_track(tmp_path):
    rates = [i / 30 for i in range(30)]
    runs = [
        write_run(
            tmp_path / f"run{seed}",
            {ENTROPY: noise(seed, 100), LENGTH: noise(10 + seed, 100, 500.0, 20.0)},
            {0: result_of(rates, seed), 50: result_of(rates, 20 + seed), 100: result_of(rates, 40 + seed)},
        )
        for seed in (1, 2)
    ]
    comparison = compare_with(runs[0], read_record(runs[1]))
    assert comparison.off_since is None and comparison.verdict().startswith("on track at train step 100: eval/avg_at_k")
    by_name = {metric.metric: metric for metric in comparison.metrics}
    assert [point.step for point in by_name[AVERAGE].differences] == [0, 50, 100]
    assert [point.step for point in by_name[ENTROPY].differences] == [20, 40, 60, 80, 100]


def test_the_step_at_which_a_run_left_the_track_is_found(tmp_path):
    entropy = [value * (1.0 if step < 60 else 0.4) for step, value in enumerate(noise(1, 120))]
    lost = write_run(tmp_path / "lost", {ENTROPY: entropy, LENGTH: noise(2, 120, 500.0, 20.0)})
    good = write_run(tmp_path / "good", {ENTROPY: noise(3, 120), LENGTH: noise(4, 120, 500.0, 20.0)})
    comparison = compare_with(lost, read_record(good))
    assert comparison.off_since == 80  # the first block after step 60 ends there
    assert comparison.verdict().startswith("off track since train step 80: actor/entropy 0.3958, reference 0.987")
    in_optimizer_steps = compare_with(lost, read_record(good, "optimizer_step"))
    assert in_optimizer_steps.off_since == 16 * 80 and "optimizer step 1,280" in in_optimizer_steps.verdict()


def test_a_run_that_came_back_is_on_track_and_one_bad_point_is_watched(tmp_path):
    good = write_run(tmp_path / "good", {ENTROPY: noise(3, 120)})
    dip = [value * (0.4 if 40 <= step < 80 else 1.0) for step, value in enumerate(noise(1, 120))]
    comparison = compare_with(write_run(tmp_path / "dip", {ENTROPY: dip}), read_record(good))
    assert [point.deviates for point in comparison.metrics[0].differences] == [False, False, True, True, False, False]
    assert comparison.off_since is None
    late = [value * (0.4 if step >= 100 else 1.0) for step, value in enumerate(noise(1, 120))]
    comparison = compare_with(write_run(tmp_path / "late", {ENTROPY: late}), read_record(good))
    assert comparison.off_since is None and "watch actor/entropy: the newest point deviates" in comparison.verdict()


def test_same_problems_are_paired(tmp_path):
    """Accuracies between 0 and 1 differ far more from problem to problem than between the runs."""
    rates = [i / 30 for i in range(30)]
    better = [min(1.0, rate + 0.15) for rate in rates]
    series = {ENTROPY: noise(1, 20)}
    a = write_run(tmp_path / "a", series, {10: result_of(rates, 1), 20: result_of(rates, 2)})
    b = write_run(tmp_path / "b", series, {10: result_of(better, 3), 20: result_of(better, 4)})
    up, down = compare_with(b, read_record(a)), compare_with(a, read_record(b))
    first = up.metrics[0].differences[0]
    assert 0.05 < first.low < first.difference < first.high < 0.25
    assert up.off_since is None  # A value above the reference is no deviation.
    assert down.off_since == 10 and first.difference == -down.metrics[0].differences[0].difference


def test_unlike_protocols_are_not_paired_and_the_note_says_why(tmp_path):
    rates = [0.5] * 30
    series = {ENTROPY: noise(1, 20)}
    other = replace(PROTOCOL, verifier="lenient")
    a = write_run(tmp_path / "a", series, {10: result_of(rates, 1)})
    b = write_run(tmp_path / "b", series, {10: result_of(rates, 2, other)})
    metric = compare_with(b, read_record(a)).metrics[0]
    assert "verifier: 'dapo' and 'lenient'" in metric.note and metric.last is not None


@pytest.mark.parametrize(("rate", "expected"), [(0.5, None), (0.3, 5120.0)])
def test_published_score_is_due_at_its_step(tmp_path, rate, expected):
    series = {ENTROPY: noise(1, 330)}
    reference = read_record(REFERENCES / "dapo_qwen2.5_32b.json")
    early = write_run(tmp_path / "early", series, {10: result_of([0.1] * 30, 1), 300: result_of([0.2] * 30, 2)})
    assert compare_with(early, reference).off_since is None  # nothing is published between the begin and the end
    results = {10: result_of([0.1] * 30, 1), 320: result_of([rate] * 30, 2), 330: result_of([rate] * 30, 3)}
    comparison = compare_with(write_run(tmp_path / "late", series, results), reference)
    assert comparison.off_since == expected
    names = [score.name for score in comparison.nearest_scores]
    assert ("naive GRPO" in names) == (rate == 0.3) and ("+ dynamic sampling (DAPO)" in names) == (rate == 0.5)


@pytest.mark.parametrize("path", sorted(REFERENCES.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_references_are_read_and_every_figure_has_its_source(path):
    record = read_record(path)
    document = json.loads(path.read_text())
    assert record.unit == "optimizer_step" and record.curves[AVERAGE].interpolation == "hold"
    figures = [*document["scores"], *(point for curve in document["curves"].values() for point in curve["points"])]
    assert all(figure["source"] and 0 <= figure["value"] <= 1 for figure in figures)
    last = record.curves[AVERAGE].points[-1]
    assert last.high - last.low == pytest.approx(2 * 1.96 * math.sqrt(last.value * (1 - last.value) / 960), rel=1e-3)


def test_interpolation():
    points = (CurvePoint(10, 1.0, 0.0, 2.0), CurvePoint(20, 3.0, 2.0, 4.0))
    assert Curve(points).at(15) == CurvePoint(15, 2.0, 1.0, 3.0)
    assert Curve(points).at(9) is None and Curve(points).at(21) is None and Curve(points).at(20) == points[1]
    assert Curve(points, "hold").at(19) == points[0] and Curve(points, "hold").at(99) == points[1]


def test_a_wandb_export_is_a_reference(tmp_path):
    """Columns as W&B and verl name them, with gaps."""
    path = tmp_path / "export.csv"
    head = '"Step","DAPO - val-core/math_dapo/acc/mean@32","DAPO - val-core/math_dapo/acc/mean@32__MIN","DAPO - actor/entropy"'
    rows = [f'"{step}","{0.1 * (step == 10) or ""}","0","{0.5}"' for step in range(1, 41)]
    path.write_text("\n".join([head, *rows]) + "\n")
    record = read_record(path)
    assert record.unit == "train_step" and set(record.curves) == {AVERAGE, ENTROPY}
    assert [point.step for point in record.curves[AVERAGE].points] == [10]
    run = write_run(tmp_path / "run", {ENTROPY: noise(1, 40, 0.5, 0.01)})
    assert compare_with(run, record).off_since is None


def test_a_line_that_is_being_written_is_left_out(tmp_path):
    run = write_run(tmp_path / "run", {ENTROPY: noise(1, 10)})
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"train_step": 11, "actor/ent')
    assert len(read_record(run).curves[ENTROPY].points) == 10


def invoke(*arguments):
    return CliRunner().invoke(app, ["compare", *map(str, arguments)], env={"COLUMNS": "200"})


def test_command(tmp_path):
    good = write_run(tmp_path / "good", {ENTROPY: noise(1, 80)})
    bad = write_run(tmp_path / "bad", {ENTROPY: noise(2, 80, level=0.2)})
    same = invoke(good, good)
    assert same.exit_code == 0 and same.output.splitlines()[-1].startswith("on track at train step 80")
    off = invoke(bad, good, "--json")
    assert off.exit_code == 1 and json.loads(off.output)["off_since"] == 20
    assert "off since 20" in invoke(bad, good).output
    assert invoke(bad, good, "--metric", "actor/entropy=1.5").exit_code == 0  # another tolerance


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "time,actor/entropy\n1,2\n", "no step column (optimizer_step, train_step, step, global_step, _step)"),
        ("a.csv", "step,other\n1,2\n", "no column of a known metric; found: step, other"),
        ("a.csv", "step,actor/entropy\n", "has no rows"),
        ("a.csv", "step,actor/entropy\n1,x\n", "could not convert string to float: 'x'"),
        ("a.csv", "step,actor/grad_norm\n1,2\n", "not in both"),
        ("a.jsonl", '{"entropy": 1}\n', "no step column"),
        ("a.json", "{}", "format None, expected 'megatron_dapo reference 1'"),
        ("a.json", '{"format": "megatron_dapo reference 1", "unit": "hour"}', "unit 'hour', choose train_step or"),
        (
            "a.json",
            '{"format": "megatron_dapo reference 1", "name": "x", "unit": "train_step", "curves": {"actor/entropy": '
            '{"interpolation": "linear", "points": [{"value": 1.0}]}}}',
            "has no step",
        ),
        ("a.toml", "", "unknown kind of reference"),
    ],
)
def test_bad_references_are_one_line(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_text(content)
    result = invoke(write_run(tmp_path / "run", {ENTROPY: noise(1, 10)}), path)
    assert result.exit_code == 2 and message in result.stderr and len(result.stderr.splitlines()) == 1, result.stderr


def test_other_bad_input_is_one_line(tmp_path):
    run = write_run(tmp_path / "run", {ENTROPY: noise(1, 10)})
    empty = tmp_path / "empty"
    empty.mkdir()
    for arguments, message in (
        ((run, tmp_path / "nothing"), "neither a run's directory nor a file"),
        ((empty, run), "is no run's directory"),
        ((run, run, "--metric", "actor/nothing"), "actor/nothing: not in both"),
        ((run, run, "--metric", "actor/entropy=low"), "the tolerance must be a number"),
        (
            (run, REFERENCES / "dapo_qwen2.5_32b.json", "--unit", "train_step"),
            "counts optimizer_steps, not train_steps",
        ),
    ):
        result = invoke(*arguments)
        assert result.exit_code == 2 and message in result.stderr and len(result.stderr.splitlines()) == 1
    result = invoke(run, run, "--unit", "epoch")
    assert result.exit_code == 2 and "'epoch' is not one of" in result.stderr
