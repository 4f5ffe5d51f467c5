from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dapo.algorithms.off_policy import (
    LAGS,
    OffPolicyInputs,
    importance_weights,
    mismatch_metrics,
    mismatch_sums,
    normalize_by_batch_mean,
)
from megatron_dapo.config.algorithm_schema import OffPolicyConfig
from tests.examples import examples


def batch(log_weights: list[list[float]], masked_tail: int = 0) -> OffPolicyInputs:
    """Sequences of given log pi_old - log pi_rollout, each followed by masked tokens of nonsense."""
    flat, mask, ids = [], [], []
    for number, row in enumerate(log_weights):
        flat += [*row, *[9.0] * masked_tail]
        mask += [1.0] * len(row) + [0.0] * masked_tail
        ids += [number] * (len(row) + masked_tail)
    difference = torch.tensor(flat, dtype=torch.float64)
    return OffPolicyInputs(
        difference - 3.0, torch.full_like(difference, -3.0), torch.tensor(mask), torch.tensor(ids), len(log_weights)
    )


def test_levels_by_brute_force():
    rows = [[0.2, -0.1, 0.4], [-0.3, 0.1]]
    inputs = batch(rows, masked_tail=1)
    expected = {
        "token": [value for row in rows for value in (*row, None)],
        "sequence": [value for row in rows for value in (*[sum(row)] * len(row), None)],
        "geometric": [value for row in rows for value in (*[sum(row) / len(row)] * len(row), None)],
    }
    for level, logs in expected.items():
        weights, metrics = importance_weights(OffPolicyConfig(correction="tis", level=level, high=100.0), inputs)
        wanted = torch.tensor([0.0 if log is None else log for log in logs], dtype=torch.float64).exp()
        wanted[[index for index, log in enumerate(logs) if log is None]] = 0.0
        torch.testing.assert_close(weights, wanted)
        assert float(metrics["num_tokens"]) == 5
        assert float(metrics["is_weight_sum"]) == pytest.approx(float(wanted.sum()))


GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "off_policy.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda c: f"{c['method']}-{c['level']}-{c['lower']}-{c['upper']}")
def test_every_method_at_every_level_gives_the_golden_weights(case):
    rows = [
        [math.log(old / rollout) for old, rollout in zip(*pair, strict=True)]
        for pair in zip(GOLDEN["p_old"], GOLDEN["p_rollout"], strict=True)
    ]
    correction = OffPolicyConfig(correction=case["method"], level=case["level"], high=case["upper"], low=case["lower"])
    weights, metrics = importance_weights(correction, batch(rows))
    expected = torch.tensor(case["weights"], dtype=torch.float64)
    torch.testing.assert_close(weights, expected, rtol=1e-9, atol=1e-12)
    assert (float(metrics["is_bounded_sum"]), float(metrics["is_masked_sum"])) == (
        case["num_bounded"],
        case["num_masked"],
    )


def test_truncating_keeps_and_masking_drops_what_is_outside():
    inputs = batch([[1.5, -1.5, 0.1]])
    kept = torch.tensor(0.1, dtype=torch.float64).exp()
    cases = {
        ("tis", 0.0): ([2.0, torch.tensor(-1.5).exp(), kept], 1, 0),
        ("tis", 0.5): ([2.0, 0.5, kept], 2, 0),
        ("mis", 0.0): ([0.0, torch.tensor(-1.5).exp(), kept], 1, 1),
        ("mis", 0.5): ([0.0, 0.0, kept], 2, 2),
        ("icepop", 0.5): ([0.0, 0.0, kept], 2, 2),
    }
    for (method, lower), (expected, bounded, masked) in cases.items():
        weights, metrics = importance_weights(OffPolicyConfig(correction=method, high=2.0, low=lower), inputs)
        torch.testing.assert_close(weights, torch.tensor([float(value) for value in expected], dtype=torch.float64))
        assert (float(metrics["is_bounded_sum"]), float(metrics["is_masked_sum"])) == (bounded, masked)


@pytest.mark.parametrize("level", ["sequence", "geometric"])
def test_sequences_cut_in_parts_get_the_same_weights(level):
    whole = batch([[0.2, -0.1, 0.4, 0.3], [-0.3, 0.1, 0.2, 0.0]])
    correction = OffPolicyConfig(correction="tis", level=level)
    expected, _ = importance_weights(correction, whole)
    halves = [torch.arange(8) % 4 < 2, torch.arange(8) % 4 >= 2]
    seen: list[torch.Tensor] = []

    def part(chosen, reduce) -> OffPolicyInputs:
        return OffPolicyInputs(
            whole.old_logprobs[chosen],
            whole.rollout_logprobs[chosen],
            whole.loss_mask[chosen],
            whole.sequence_ids[chosen],
            2,
            reduce,
        )

    for chosen in halves:
        importance_weights(correction, part(chosen, lambda sums: seen.append(sums) or sums))
    for chosen in halves:
        weights, _ = importance_weights(correction, part(chosen, lambda sums: seen[0] + seen[1]))
        torch.testing.assert_close(weights, expected[chosen])


def test_weights_carry_no_gradient_and_survive_absurd_log_probs():
    old = torch.tensor([-1.0, -5000.0], requires_grad=True)
    inputs = OffPolicyInputs(old, torch.tensor([-5000.0, -1.0]), torch.ones(2), torch.zeros(2, dtype=torch.int64), 1)
    weights, _ = importance_weights(OffPolicyConfig(correction="tis", high=1e12), inputs)
    assert not weights.requires_grad and torch.isfinite(weights).all()


def test_batch_normalization_uses_the_sums_of_all_parts():
    parts = [batch([[0.5, 0.2]]), batch([[-0.4, 0.1, 0.3]])]
    results = [importance_weights(OffPolicyConfig(correction="tis"), part) for part in parts]
    total = sum(float(metrics["is_weight_sum"]) for _, metrics in results)
    normalized = torch.cat([normalize_by_batch_mean(weights, total, 5) for weights, _ in results])
    assert float(normalized.mean()) == pytest.approx(1.0)
    assert normalize_by_batch_mean(torch.zeros(3), 0.0, 3).tolist() == [0.0, 0.0, 0.0]


@settings(max_examples=examples(40), deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(-8, 0), st.floats(-8, 0), st.booleans(), st.sampled_from([0, 1, 2, 5])),
        min_size=1,
        max_size=12,
    ),
    st.integers(0, 12),
)
def test_mismatch_sums_combine(tokens, cut):
    columns = tuple(torch.tensor(column, dtype=torch.float64) for column in zip(*tokens))
    whole = mismatch_metrics(mismatch_sums(*columns))
    first, second = (mismatch_sums(*(column[part] for column in columns)) for part in (slice(cut), slice(cut, None)))
    parts = mismatch_metrics(first.combine(second))
    assert parts == pytest.approx(whole, rel=1e-9, abs=1e-12)
    trained = bool(columns[2].sum())
    assert sum(whole[f"mismatch/{lag}_token_share"] for lag in LAGS) == pytest.approx(float(trained))
    for name in ("abs_logprob_diff_mean", "kl_k3"):
        overall = whole["mismatch/" + name]
        by_lag = [whole[f"mismatch/{lag}_token_share"] * whole[f"mismatch/{lag}_{name}"] for lag in LAGS]
        assert sum(by_lag) == pytest.approx(overall)
    assert whole["mismatch/kl_k3"] >= 0 and 0 < whole["mismatch/ess"] <= 1 + 1e-12


def test_mismatch_metrics_of_known_tokens():
    old, rollout = torch.tensor([0.5, 0.25, 0.9]).log(), torch.tensor([0.25, 0.5, 0.1]).log()
    metrics = mismatch_metrics(mismatch_sums(old, rollout, torch.tensor([1.0, 1.0, 0.0])))
    assert metrics["mismatch/abs_logprob_diff_mean"] == pytest.approx(0.693147, rel=1e-5)
    assert metrics["mismatch/abs_logprob_diff_max"] == pytest.approx(0.693147, rel=1e-5)
    assert metrics["mismatch/abs_prob_diff_mean"] == pytest.approx(0.25)
    assert metrics["mismatch/kl_k1"] == pytest.approx(0.0, abs=1e-7)
    assert metrics["mismatch/ess"] == pytest.approx(2.5**2 / (2 * 4.25))
    assert metrics["mismatch/ppl_ratio"] == pytest.approx(1.0)
    worse = mismatch_metrics(mismatch_sums(rollout[:1], old[:1], torch.ones(1)))
    assert worse["mismatch/ppl_ratio"] == pytest.approx(2.0), "half the probability is twice the perplexity"


def test_mismatch_by_the_age_of_the_tokens():
    gaps, ages = torch.tensor([0.1, 0.3, -0.2, 0.6, 1.0, 9.0]), torch.tensor([0.0, 0.0, 1.0, 2.0, 4.0, 1.0])
    mask = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 0.0])
    metrics = mismatch_metrics(mismatch_sums(gaps - 3, torch.full((6,), -3.0), mask, ages))
    for lag, share, mean in (("lag0", 0.4, 0.2), ("lag1", 0.2, 0.2), ("lag2plus", 0.4, 0.8)):
        assert metrics[f"mismatch/{lag}_token_share"] == pytest.approx(share)
        assert metrics[f"mismatch/{lag}_abs_logprob_diff_mean"] == pytest.approx(mean, rel=1e-5)
    assert metrics["mismatch/lag1_kl_k3"] == pytest.approx(math.exp(-0.2) - 1 + 0.2, rel=1e-4)


def test_no_trained_token_is_no_mismatch():
    metrics = mismatch_metrics(mismatch_sums(torch.zeros(3), -torch.ones(3), torch.zeros(3)))
    assert all(f"mismatch/{lag}_token_share" in metrics for lag in LAGS)
    assert metrics.pop("mismatch/ess") == 1.0 and metrics.pop("mismatch/ppl_ratio") == 1.0
    assert set(metrics.values()) == {0.0}
