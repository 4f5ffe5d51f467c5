from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dapo.algorithms.advantages import ADVANTAGES, AdvantageInputs, compute_advantages
from megatron_dapo.config.algorithm_schema import (
    AdvantageConfig,
    DrGrpoAdvantageConfig,
    FunctionAdvantageConfig,
    GdpoAdvantageConfig,
    GrpoAdvantageConfig,
    MaxRlAdvantageConfig,
    ReinforceBaselineAdvantageConfig,
    ReinforcePpAdvantageConfig,
    RlooAdvantageConfig,
)
from tests.examples import examples

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "hooks" / "advantage.py"
SECTIONS = {section.name: section for section in (kind() for kind in get_args(AdvantageConfig))}
SECTIONS["function"] = FunctionAdvantageConfig(function=f"{EXAMPLE}:advantage")
DR_GRPO, RLOO, BASELINE = DrGrpoAdvantageConfig(), RlooAdvantageConfig(), ReinforceBaselineAdvantageConfig()
PAPER = ReinforceBaselineAdvantageConfig(variant="paper")

rewards_of_groups = st.lists(
    st.lists(st.floats(-5, 5, allow_nan=False, width=32), min_size=1, max_size=6), min_size=1, max_size=5
)


def inputs_of(rewards: list[list[float]], lengths: list[int] | None = None) -> AdvantageInputs:
    index = torch.cat([torch.full((len(group),), 7 * number - 3) for number, group in enumerate(rewards)])
    flat = torch.tensor(sum(rewards, []), dtype=torch.float64)
    return AdvantageInputs(flat, index, torch.tensor(lengths) if lengths else torch.arange(1, len(flat) + 1))


def advantages_of(section: AdvantageConfig, inputs: AdvantageInputs) -> torch.Tensor:
    return ADVANTAGES[section.name](inputs, section)


@settings(max_examples=examples(60), deadline=None)
@given(rewards_of_groups)
def test_rloo_is_dr_grpo_times_g_over_g_minus_1(rewards):
    inputs = inputs_of(rewards)
    sizes = torch.cat([torch.full((len(group),), float(len(group))) for group in rewards])
    expected = torch.where(sizes > 1, advantages_of(DR_GRPO, inputs) * sizes / (sizes - 1).clamp(min=1), 0.0)
    torch.testing.assert_close(advantages_of(RLOO, inputs), expected, rtol=1e-12, atol=1e-12)


@settings(max_examples=examples(60), deadline=None)
@given(rewards_of_groups)
def test_rloo_subtracts_the_mean_of_the_others(rewards):
    expected = []
    for group in rewards:
        for index, reward in enumerate(group):
            others = group[:index] + group[index + 1 :]
            expected.append(reward - sum(others) / len(others) if others else 0.0)
    torch.testing.assert_close(
        advantages_of(RLOO, inputs_of(rewards)), torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-9
    )


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=1, max_size=6), min_size=1, max_size=5))
def test_maxrl_divides_by_the_mean(rewards):
    expected = [
        (reward - sum(group) / len(group)) / (sum(group) / len(group)) if sum(group) else 0.0
        for group in rewards
        for reward in group
    ]
    ours = advantages_of(MaxRlAdvantageConfig(), inputs_of(rewards))
    torch.testing.assert_close(ours, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from([0.0, 1.0]), st.floats(-3, 3, width=32)), min_size=2, max_size=5),
        min_size=1,
        max_size=4,
    ),
    st.floats(0, 4, width=32),
)
def test_gdpo_is_the_scaled_sum_of_each_reward_s_advantages(rewards, weight):
    """Equations 4 to 6 of the paper by Python's statistics, the batch's mean included."""
    sums: list[float] = []
    for group in rewards:
        totals = [0.0] * len(group)
        for column, factor in zip(zip(*group), (1.0, weight)):
            spread = statistics.stdev(column)
            if len(set(column)) > 1:
                totals = [
                    total + factor * (one - statistics.fmean(column)) / (spread + 1e-6) for total, one in zip(totals, column)
                ]
        sums += totals
    spread = statistics.stdev(sums) + 1e-6 if any(sums) else 1.0
    expected = torch.tensor([(one - statistics.fmean(sums)) / spread for one in sums], dtype=torch.float64)
    plain = inputs_of([[right + style for right, style in group] for group in rewards])
    columns = torch.tensor([pair for group in rewards for pair in group], dtype=torch.float64)
    inputs = replace(plain, parts={"right": columns[:, 0], "style": columns[:, 1]})
    ours = advantages_of(GdpoAdvantageConfig(weights={"style": weight}), inputs)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)


def test_gdpo_tells_apart_what_a_sum_does_not():
    """The paper's figure 2: rewards (0, 1) and (0, 2) of two responses have one advantage by GRPO."""
    parts = {"a": torch.tensor([0.0, 1.0, 0.0, 1.0]), "b": torch.tensor([0.0, 0.0, 0.0, 1.0])}
    plain = inputs_of([[0.0, 1.0], [0.0, 2.0]])
    together, apart = (advantages_of(kind(), replace(plain, parts=parts)) for kind in (GrpoAdvantageConfig, GdpoAdvantageConfig))
    assert together[1] == pytest.approx(float(together[3]), rel=1e-5) and float(apart[3] / apart[1]) == pytest.approx(2, rel=1e-5)
    with pytest.raises(ValueError, match="names c, the batch has the rewards a, b"):
        advantages_of(GdpoAdvantageConfig(weights={"c": 1.0}), replace(plain, parts=parts))


@pytest.mark.parametrize("reward", [-1.0, 1.5])
def test_maxrl_refuses_rewards_outside_0_and_1(reward):
    with pytest.raises(ValueError, match=f"from 0 to 1, have .*{reward:g}"):
        advantages_of(MaxRlAdvantageConfig(), inputs_of([[1.0, reward]]))


@settings(max_examples=examples(60), deadline=None)
@given(rewards_of_groups, st.sampled_from(["biased", "unbiased"]))
def test_grpo_matches_torch_std_of_each_group(rewards, std):
    expected = []
    for group in rewards:
        values = torch.tensor(group, dtype=torch.float64)
        constant = len(set(group)) == 1
        spread = 1.0 if constant else values.std(correction=int(std == "unbiased")) + 1e-6
        expected.append(torch.zeros_like(values) if constant else (values - values.mean()) / spread)
    torch.testing.assert_close(
        advantages_of(GrpoAdvantageConfig(std=std), inputs_of(rewards)), torch.cat(expected), rtol=1e-9, atol=1e-9
    )


@settings(max_examples=examples(60), deadline=None)
@given(rewards_of_groups, st.sampled_from(sorted(ADVANTAGES)), st.randoms(use_true_random=False))
def test_an_advantage_does_not_depend_on_the_order_of_the_responses(rewards, name, random):
    if name == "maxrl":
        rewards = [[abs(reward) / 5 for reward in group] for group in rewards]
    inputs = inputs_of(rewards)
    order = list(range(inputs.rewards.numel()))
    random.shuffle(order)
    shuffled = AdvantageInputs(inputs.rewards[order], inputs.group_index[order], inputs.response_lengths[order])
    section = SECTIONS[name]
    torch.testing.assert_close(
        advantages_of(section, shuffled), advantages_of(section, inputs)[order], rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -1 / 3, 1e30])
@pytest.mark.parametrize("settings_", [{"eps": 0.0}, {}])
def test_groups_of_equal_rewards_get_exactly_zero(reward, settings_):
    inputs = inputs_of([[reward] * 3, [reward] * 7])
    assert SECTIONS.keys() == ADVANTAGES.keys()
    # reinforce_pp compares nothing within a group, maxrl takes rewards from 0 to 1.
    for name in SECTIONS.keys() - {"reinforce_pp"} - ({"maxrl"} if not 0 <= reward <= 1 else set()):
        chosen = GrpoAdvantageConfig(**settings_) if name == "grpo" else SECTIONS[name]
        assert compute_advantages(chosen, inputs).values.tolist() == [0.0] * 10


def test_singletons_get_zero_or_their_reward():
    inputs = inputs_of([[0.75], [1.0, 0.0]], [4, 4, 4])
    assert (
        advantages_of(GrpoAdvantageConfig(), inputs)[0] == 0
        and advantages_of(RLOO, inputs)[0] == 0
        and advantages_of(DR_GRPO, inputs)[0] == 0
    )
    # Token-weighted std of A' = (.75, .5, -.5).
    deviation = torch.tensor([0.75, 0.5, -0.5], dtype=torch.float64)
    expected = deviation / deviation.std(correction=0)
    torch.testing.assert_close(advantages_of(BASELINE, inputs), expected, rtol=1e-12, atol=1e-12)


def test_baseline_without_spread_or_tokens_is_returned_unscaled():
    assert advantages_of(PAPER, inputs_of([[0.5], [0.5]], [3, 5])).tolist() == [0.5, 0.5]
    untrained = AdvantageInputs(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), torch.tensor([0, 0]))
    assert advantages_of(BASELINE, untrained).tolist() == [0.5, -0.5]


def test_scale_only_keeps_an_all_right_group_at_zero_and_paper_does_not():
    inputs = inputs_of([[1.0, 1.0], [1.0, 0.0]], [1, 1, 1, 9])
    assert advantages_of(BASELINE, inputs)[:2].tolist() == [0.0, 0.0]
    assert float(advantages_of(PAPER, inputs)[0]) > 0.1


def test_excluded_responses_leave_the_statistics_and_get_zero():
    rewards = torch.tensor([1.0, 0.0, 5.0, 1.0, 1.0, 1.0])
    included = torch.tensor([True, True, False, True, True, True])
    result = compute_advantages(
        DR_GRPO, AdvantageInputs(rewards, torch.tensor([0, 0, 0, 0, 1, 1]), torch.ones(6), included)
    )
    torch.testing.assert_close(result.values, torch.tensor([1 / 3, -2 / 3, 0.0, 1 / 3, 0.0, 0.0]))
    assert result.metrics["num_groups"] == 2 and result.metrics["frac_zero_std_groups"] == 0.5


def test_diagnostics():
    result = compute_advantages(GrpoAdvantageConfig(std="biased", eps=0.0), inputs_of([[1.0, -1.0], [1.0, 1.0]]))
    assert result.values.dtype == torch.float32
    assert result.metrics["frac_zero_std_groups"] == 0.5
    assert result.metrics["reward_mean"] == 0.5
    assert result.metrics["reward_group_std"] == 0.5
    assert result.metrics["reward_std"] == pytest.approx(0.75**0.5)
    assert result.metrics["advantage_mean"] == 0 and result.metrics["advantage_abs_max"] == 1


def test_reinforce_pp_whitens_over_the_tokens_of_the_batch():
    inputs = inputs_of([[1.0], [0.0], [-1.0]], [1, 2, 5])
    tokens = inputs.rewards.repeat_interleave(inputs.response_lengths)
    expected = (inputs.rewards - tokens.mean()) / tokens.std(correction=0)
    torch.testing.assert_close(advantages_of(ReinforcePpAdvantageConfig(), inputs), expected)
    scaled = advantages_of(ReinforcePpAdvantageConfig(variant="scale_only", weighting="sequence"), inputs)
    torch.testing.assert_close(scaled, inputs.rewards / inputs.rewards.std(correction=0))


def test_a_reward_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="response 1 is nan"):
        compute_advantages(GrpoAdvantageConfig(), inputs_of([[0.0, float("nan")]]))
