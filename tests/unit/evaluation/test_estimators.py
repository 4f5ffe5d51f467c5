from __future__ import annotations

import itertools
import math

import pytest
import torch

from megatron_dapo.evaluation.estimators import (
    Estimate,
    ProblemRecord,
    avg_at_k,
    bootstrap_mean,
    cons_at_k,
    estimate_metrics,
    pass_at_k,
    problem_values,
    reported_ks,
    response_rates,
    student_mean,
    student_quantile,
)


def record(name: str, accuracies, extracted=None, truncated=None, outcomes=None, tokens=None) -> ProblemRecord:
    n = len(accuracies)
    return ProblemRecord(
        name,
        "42",
        1,
        tuple(accuracies),
        tuple(extracted or [None] * n),
        tuple(outcomes or ["wrong"] * n),
        tuple(truncated or [False] * n),
        tuple(tokens or [10] * n),
    )


@pytest.mark.parametrize("num_samples", [1, 4, 7])
def test_pass_at_k_by_enumeration_of_every_draw(num_samples):
    for num_correct in range(num_samples + 1):
        correct = [index < num_correct for index in range(num_samples)]
        for k in range(1, num_samples + 1):
            draws = list(itertools.combinations(correct, k))
            expected = sum(any(draw) for draw in draws) / len(draws)
            assert pass_at_k(num_samples, num_correct, k) == pytest.approx(expected, abs=1e-15)


def test_pass_at_k_is_exact_for_large_n():
    # Product form of the ratio of binomials.
    expected = 1 - math.prod((1000 - 3 - i) / (1000 - i) for i in range(500))
    assert pass_at_k(1000, 3, 500) == pytest.approx(expected, rel=1e-12)


def test_avg_at_k_takes_the_first_k():
    assert avg_at_k([1.0, 0.0, 1.0, 1.0], 2) == 0.5 and avg_at_k([1.0, 0.0, 1.0, 1.0], 4) == 0.75


@pytest.mark.parametrize(
    ("extracted", "accuracies", "expected"),
    [
        (["7", "42", "42"], [0, 1, 1], 1),
        (["7", "7", "42"], [0, 0, 1], 0),
        (["7", "42", None], [0, 1, 0], 0),  # a tie: 7 was first
        (["42", "7", None], [1, 0, 0], 1),
        ([None, None, "42"], [0, 0, 1], 1),  # no answer is no vote
        ([None, None, None], [0, 0, 0], 0),
        (["42", "7", "42"], [0, 0, 1], 1),  # the first voter was truncated, its answer is right
    ],
)
def test_cons_at_k(extracted, accuracies, expected):
    assert cons_at_k(extracted, accuracies, 3) == expected


def test_cons_at_k_ignores_later_votes():
    extracted, accuracies = ["7", "42", "42"], [0, 1, 1]
    assert [cons_at_k(extracted, accuracies, k) for k in (1, 2, 3)] == [0, 0, 1]
    assert [cons_at_k(["42", "42"], [0, 1], k) for k in (1, 2)] == [0, 1]


def test_k_out_of_range_is_refused():
    with pytest.raises(ValueError, match="k = 5 needs between 1 and all of the 4"):
        pass_at_k(4, 1, 5)
    with pytest.raises(ValueError, match="k = 0"):
        avg_at_k([1.0], 0)
    with pytest.raises(ValueError, match="5 correct of 4"):
        pass_at_k(4, 5, 1)


def test_reported_ks():
    assert [reported_ks(n) for n in (1, 2, 8, 12)] == [(1,), (1, 2), (1, 2, 4, 8), (1, 2, 4, 8, 12)]


def test_values_by_problem():
    values = problem_values([record("a", [1, 0, 0, 0], ["42", "7", "7", "7"]), record("b", [1, 1, 1, 1], ["3"] * 4)])
    assert values == {
        "avg@4": [0.25, 1.0],
        "pass@1": [0.25, 1.0],
        "pass@2": [0.5, 1.0],
        "pass@4": [1.0, 1.0],
        "cons@1": [1.0, 1.0],
        "cons@2": [1.0, 1.0],
        "cons@4": [0.0, 1.0],
    }
    with pytest.raises(ValueError, match="different numbers of responses"):
        problem_values([record("a", [1, 0]), record("b", [1])])


def test_bootstrap_covers_the_truth_about_as_often_as_it_says():
    generator = torch.Generator().manual_seed(0)
    covered = 0
    for trial in range(200):
        values = (torch.rand(60, generator=generator) < 0.4).double().tolist()
        estimate = bootstrap_mean(values, seed=trial, num_resamples=400)
        covered += estimate.low <= 0.4 <= estimate.high
    assert 0.88 <= covered / 200 <= 0.99


def test_bootstrap_is_seeded_and_nested_by_confidence():
    values = [0.0, 0.25, 0.5, 1.0, 0.125]
    assert bootstrap_mean(values, seed=1) == bootstrap_mean(values, seed=1) != bootstrap_mean(values, seed=2)
    narrow, wide = (bootstrap_mean(values, confidence=level) for level in (0.5, 0.99))
    assert wide.low < narrow.low < narrow.value == wide.value < narrow.high < wide.high
    assert bootstrap_mean([0.25]) == Estimate(0.25, 0.25, 0.25)
    with pytest.raises(ValueError, match="no values"):
        bootstrap_mean([])
    with pytest.raises(ValueError, match="confidence 95"):
        bootstrap_mean([0.1], confidence=95)


def test_metrics_and_rates():
    records = [
        record("a", [1, 0], ["42", None], [False, True], ["correct", "truncated"], [10, 30]),
        record("b", [0, 0], ["1", "2"], [False, False], ["wrong", "wrong"], [20, 20]),
    ]
    metrics = estimate_metrics(records)
    assert metrics["avg@2"].value == 0.25 and metrics["pass@2"].value == 0.5
    assert 0.0 <= metrics["avg@2"].low < 0.25 < metrics["avg@2"].high <= 0.5
    assert response_rates(records) == {
        "truncation_rate": 0.25,
        "mean_response_tokens": 20.0,
        "outcome/correct": 0.25,
        "outcome/truncated": 0.25,
        "outcome/wrong": 0.5,
    }


def test_a_ragged_record_is_refused():
    with pytest.raises(ValueError, match=r"problem a: columns of lengths \[2, 1, 2, 2, 2\]"):
        record("a", [1, 0], extracted=["42"])
    with pytest.raises(ValueError, match="at least one problem"):
        problem_values([])


# Table of the t distribution, two-sided.
@pytest.mark.parametrize(
    ("degrees", "confidence", "expected"),
    [(1, 0.95, 12.7062), (2, 0.95, 4.30265), (3, 0.95, 3.18245), (10, 0.99, 3.16927), (31, 0.9, 1.69552)],
)
def test_quantiles_of_student_are_those_of_the_table(degrees, confidence, expected):
    assert student_quantile(degrees, confidence) == pytest.approx(expected, rel=2e-6)


def test_the_interval_of_a_few_normal_values_covers_the_mean_as_often_as_it_says():
    draws = torch.randn(4000, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).tolist()
    intervals = [student_mean(values) for values in draws]
    covered = sum(each.low <= 0 <= each.high for each in intervals) / len(intervals)
    assert covered == pytest.approx(0.95, abs=0.012)


def test_one_value_has_no_interval():
    assert student_mean([0.25]) == Estimate(0.25, 0.25, 0.25)
    with pytest.raises(ValueError, match="0 values"):
        student_mean([])
