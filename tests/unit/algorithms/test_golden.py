"""Golden values: all of those implemented are checked. A leaf that no check reads fails the test; sections for later are
named."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from megatron_dapo.algorithms.advantages import AdvantageInputs, dr_grpo, grpo, reinforce_baseline, rloo
from megatron_dapo.algorithms.aggregation import global_denominators, sample_token_weights
from megatron_dapo.algorithms.dynamic_sampling import GroupFilter, wasted_fraction
from megatron_dapo.algorithms.egae import extended_estimates, without_tail
from megatron_dapo.algorithms.gae import ValueInputs, estimate_values
from megatron_dapo.algorithms.kl import KL_ESTIMATORS
from megatron_dapo.algorithms.length_adaptive_lambda import (
    LengthAdaptiveLambda,
    WindowLambda,
    prospective_lengths,
    raw_lambda,
)
from megatron_dapo.algorithms.length_reward import soft_overlong_penalty, soft_perplexity_penalty
from megatron_dapo.algorithms.off_policy import (
    OffPolicyInputs,
    importance_weights,
    mismatch_metrics,
    mismatch_sums,
    normalize_by_batch_mean,
)
from megatron_dapo.algorithms.policy_loss import policy_loss
from megatron_dapo.algorithms.policy_loss_inputs import PolicyLossInputs
from megatron_dapo.algorithms.prompt_priority import ucb_priority
from megatron_dapo.algorithms.sampling_budget import PassRate, fit_total, wanted_size
from megatron_dapo.algorithms.token_rewards import kl_shaped_rewards, outcome_rewards, token_divergence
from megatron_dapo.algorithms.value_loss import ValueLossInputs, value_loss
from megatron_dapo.algorithms.vapo import positive_example_loss, positive_token_weights, positive_tokens
from megatron_dapo.algorithms.whitening import moments, whiten
from megatron_dapo.config.algorithm_schema import (
    CriticConfig,
    DrGrpoAdvantageConfig,
    GrpoAdvantageConfig,
    OffPolicyConfig,
    ReinforceBaselineAdvantageConfig,
    RlooAdvantageConfig,
)
from megatron_dapo.config.loss_schema import GspoLossConfig, PolicyLossConfig, PpoClipLossConfig
from megatron_dapo.rewards.pool.repetition import ngram_repetition, tail_loop

# A chapter whose every leaf another file reads.
ELSEWHERE = {"kl": "tests/unit/ops/test_divergence.py"}
# Whoever builds one of these moves it to SECTIONS (or to the tests of its own package).
LATER = {
    "seeds.rejection_sampling": "asserted in tests/unit/algorithms/test_selection.py",
    "seeds.adversarial_injection": "variants of filtered prompts, asserted in tests/unit/rollout/test_injected_groups.py",
    "seeds.stopping_bias": "the estimate of groups whose size is set first, asserted in tests/unit/rollout/test_prompt_source.py",
    "systems.*": "fault detection and resharding, tested in their own packages",
}


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def assert_equal(actual, expected) -> None:
    torch.testing.assert_close(torch.as_tensor(actual, dtype=torch.float64), tensor(expected), rtol=1e-9, atol=1e-9)


def groups_of(rewards, lengths=None) -> AdvantageInputs:
    """Nested lists, one inner list a group."""
    index = torch.cat([torch.full((len(group),), number) for number, group in enumerate(rewards)])
    lengths = torch.ones_like(index) if lengths is None else torch.tensor(sum(lengths, []))
    return AdvantageInputs(tensor(sum(rewards, [])), index, lengths)


def one_sequence(ratios, advantages) -> PolicyLossInputs:
    logprobs = tensor(ratios).log().requires_grad_()
    num_tokens = logprobs.numel()
    return PolicyLossInputs(
        logprobs,
        torch.zeros(num_tokens, dtype=torch.float64),
        tensor(advantages).expand(num_tokens),
        torch.ones(num_tokens),
        torch.zeros(num_tokens, dtype=torch.int64),
        1,
    )


def clip(low: float = 0.2, high: float = 0.28, dual_clip: float | str = "off") -> PpoClipLossConfig:
    return PpoClipLossConfig(clip_ratio_low=low, clip_ratio_high=high, dual_clip=dual_clip)


def grpo_of(inputs: AdvantageInputs, std: str, eps: float) -> torch.Tensor:
    return grpo(inputs, GrpoAdvantageConfig(std=std, eps=eps))


def baseline_of(inputs: AdvantageInputs, **keys) -> torch.Tensor:
    return reinforce_baseline(inputs, ReinforceBaselineAdvantageConfig(**keys))


def loss_and_gradient(loss: PolicyLossConfig, ratios, advantage) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = one_sequence(ratios, advantage)
    token_loss, _ = policy_loss(loss, inputs)
    (gradient,) = torch.autograd.grad(token_loss.sum(), inputs.logprobs)
    return token_loss.detach(), gradient


def check_grpo_advantages(section) -> None:
    estimators = {
        "grpo_biased_std_eps1e-6": lambda inputs: grpo_of(inputs, "biased", 1e-6),
        "grpo_unbiased_std_eps1e-6": lambda inputs: grpo_of(inputs, "unbiased", 1e-6),
        "dr_grpo": lambda inputs: dr_grpo(inputs, DrGrpoAdvantageConfig()),
        "rloo": lambda inputs: rloo(inputs, RlooAdvantageConfig()),
    }
    for key in section.keys():
        case = section[key]
        if key.startswith("["):
            rewards = [float(part) for part in key.strip("[]").split(",")]
            assert set(case.keys()) == set(estimators)
            for name, estimator in estimators.items():
                assert_equal(estimator(groups_of([rewards])), case[name])
        else:
            num_correct = int(key.split("_")[1])
            rewards = [1.0] * num_correct + [-1.0] * (16 - num_correct)
            actual = grpo_of(groups_of([rewards]), "biased", 0.0)
            assert_equal(actual[0], case["correct"])
            assert_equal(actual[-1], case["wrong"])
            assert_equal(actual[0], case["closed_form_correct=sqrt((1-p)/p)"])


def check_reinforce_baseline(section) -> None:
    inputs = groups_of(section["rewards"], section["lengths"])
    assert_equal(dr_grpo(inputs, DrGrpoAdvantageConfig()), sum(section["r_minus_group_mean"], []))
    sequence = section["sequence_weighted_norm"]
    for std in ("biased", "unbiased"):
        assert_equal(
            baseline_of(inputs, variant="paper", weighting="sequence", std=std, scale="std_plus_eps"), sequence[std]
        )
    token = section["token_weighted_norm"]
    assert_equal(
        baseline_of(inputs, variant="paper", weighting="token", std="biased", scale="variance_floor"),
        token["adv_biased_rsqrt_clamp1e-8"],
    )
    assert_equal(
        baseline_of(inputs, variant="paper", weighting="token", std="unbiased", scale="variance_plus_eps"),
        token["adv_unbiased_rsqrt_plus1e-8"],
    )
    tokens = dr_grpo(inputs, DrGrpoAdvantageConfig()).repeat_interleave(inputs.response_lengths)
    assert_equal(tokens.mean(), token["token_mean"])
    assert_equal(tokens.var(correction=0), token["token_var_biased"])
    assert_equal(tokens.var(correction=1), token["token_var_unbiased"])
    assert_equal(baseline_of(inputs), section["token_weighted_scale_only(no mean subtraction)"])
    assert_equal(grpo_of(inputs, "biased", 1e-8), sum(section["grpo_same_rewards_biased"], []))


def check_reinforce_pp(section) -> None:
    def padded(rows) -> torch.Tensor:
        width = max(len(row) for row in rows)
        return tensor([row + [math.nan] * (width - len(row)) for row in rows])

    logprobs, ref_logprobs = padded(section["logp"]), padded(section["ref_logp"])
    mask = torch.isfinite(logprobs).float()
    lengths, flat = torch.full((len(logprobs),), logprobs.shape[1]), mask.flatten()
    divergence = token_divergence("k1", logprobs.flatten(), ref_logprobs.flatten(), flat)
    rewards = outcome_rewards(tensor(section["rewards"]), flat, lengths)
    shaped = kl_shaped_rewards(rewards, divergence, flat, section["beta"])
    zeros = torch.zeros_like(shaped)
    returns = estimate_values(ValueInputs(zeros, shaped, flat, lengths, zeros[: len(lengths)]), 1.0, 1.0).returns
    assert_equal(returns[flat > 0], sum(section["return_to_go"], []))
    found = moments(returns, flat)
    whitened = whiten(returns, flat, found.mean(), found.variance())
    assert_equal(whitened[flat > 0], section["whitened_token_biased"])


def check_soft_overlong(section) -> None:
    limits = {
        "A: L_max=20480,cache=4096 (text of DAPO sec 4.1: penalty starts at 16384)": 20480,
        "B: L_max=16384,cache=4096 (penalty starts at 12288)": 16384,
    }
    for key, max_length in limits.items():
        for length in section[key].keys():
            assert_equal(soft_overlong_penalty(torch.tensor(int(length)), max_length, 4096), section[key][length])
    public = section["verl max_resp=20480 buf=4096 factor=1.0"]
    for length in public.keys():
        ours = soft_overlong_penalty(torch.tensor(int(length)), 20480, 4096)
        # Past the limit the public code keeps falling; the paper and we stop at -1.
        beyond = min(0, 20480 - int(length)) / 4096
        assert_equal(ours + beyond, public[length])
    penalty = soft_overlong_penalty(torch.tensor([18432, 20481]), 20480, 4096)
    assert_equal(1.0 + penalty[0], section["total_reward_correct_len18432_A"])
    assert_equal(-1.0 + penalty[1], section["total_reward_wrong_len20481_A"])


def check_dynamic_sampling(section) -> None:
    group_filter = GroupFilter()
    decisions = {name: group_filter.decide(section["acc"][name]) for name in section["acc"].keys()}
    assert [name for name, decision in decisions.items() if decision == "kept"] == section["kept"]
    assert (decisions["a"], decisions["c"]) == ("all_right", "all_wrong")
    waste = section["fraction_wasted_if_pass_rate_p (p^G+(1-p)^G), G=16"]
    multiplier = section["expected_rollout_multiplier=1/(1-waste)"]
    for rate in waste.keys():
        assert_equal(wasted_fraction(float(rate), 16), waste[rate])
        assert_equal(1.0 / (1.0 - wasted_fraction(float(rate), 16)), multiplier[rate])
    assert section["must_filter_on"].startswith("accuracy")


def check_clip(section) -> None:
    losses = {
        "sym_0.2_0.2": clip(0.2, 0.2),
        "clip_higher_0.2_0.28": clip(0.2, 0.28),
    }
    for name, loss in losses.items():
        for sign in ("+1", "-1"):
            case = section[f"{name}_A{sign}"]
            token_loss, gradient = loss_and_gradient(loss, section["ratios"], float(sign))
            assert_equal(token_loss, case["loss"])
            assert_equal(-token_loss, case["objective"])
            assert_equal(gradient, case["dloss_dlogp"])
            assert (gradient == 0).tolist() == case["grad_zero"]
    for bound in (3, 10):
        case = section[f"dual_clip_c{bound}_A-1"]
        token_loss, gradient = loss_and_gradient(clip(dual_clip=bound), case["ratios"], -1.0)
        assert_equal(token_loss, case["loss"])
        assert_equal(gradient, case["dloss_dlogp"])
    ratios = section["dual_clip_c3_A-1"]["ratios"]
    token_loss, _ = loss_and_gradient(clip(dual_clip=3), ratios, 1.0)
    assert_equal(token_loss, section["dual_clip_c3_A+1(no effect)"]["loss"])
    check_reachable_probability(section["clip_higher_bound_examples"])


def check_reachable_probability(section) -> None:
    """The probability at which the gradient of a good token dies: old probability x the largest rewarded ratio."""

    def largest(old: float, loss: PolicyLossConfig) -> float:
        token_loss, _ = loss_and_gradient(loss, [1 / old], 1.0)
        return min(1.0, -float(token_loss) * old)

    assert_equal(largest(0.01, clip(0.2, 0.2)), section["p_old .01 -> max p, eps .2"])
    assert_equal(largest(0.01, clip(0.2, 0.28)), section["p_old .01, eps .28"])
    assert_equal(largest(0.9, clip(0.2, 0.2)), section["p_old .9, eps .2 (capped by 1)"])


def check_loss_aggregation(section) -> None:
    losses = [tensor(row) for row in section["per_token_losses"]]
    trained = torch.tensor(section["lengths"])
    assert trained.tolist() == [len(row) for row in losses]
    sums = torch.stack([row.sum() for row in losses])
    assert_equal(sums, section["sums"])
    groups = torch.tensor([0, 0, 1, 1])
    denominators = global_denominators(trained, groups)
    assert denominators.num_tokens == section["total_tokens"]

    def weights(mode: str) -> torch.Tensor:
        return sample_token_weights(mode, trained, groups, denominators, 8)

    values = {
        "sample_mean": "sample_mean (GRPO/VAPO-vanilla): mean_i(sum_i/len_i)",
        "token_mean": "token_mean_global (DAPO/blog GA-level): sum/total_tokens",
        "per_group": "per_group_eq8 then mean over prompts: E_q[1/sum_i|o_i| sum]",
        "dr_grpo": "dr_grpo const L=8: sum/(N*8)",
        "seq_sum_mean": "sequence_sum_mean: mean_i sum_i",
    }
    for mode, key in values.items():
        assert_equal((weights(mode) * sums).sum(), section[key])
    per_token = section["weight_of_one_token_by_response"]
    assert_equal(weights("sample_mean"), per_token["sample_mean"])
    assert_equal(weights("token_mean"), per_token["token_mean_global"])

    # The bug: denominators of each micro-batch, then a mean over micro-batches. It is reproduced here to be told apart.
    def local_weights(split) -> torch.Tensor:
        wrong = torch.empty(4, dtype=torch.float64)
        for part in split:
            local = global_denominators(trained[part], groups[part])
            wrong[part] = sample_token_weights("token_mean", trained[part], groups[part], local, 8) / len(split)
        return wrong

    assert_equal(local_weights([[0, 1], [2, 3]]), per_token["microbatch_bug"])
    bug = section["token_mean_per_microbatch_then_mean (BUG, GA=2 [0,1],[2,3])"]
    assert_equal((local_weights([[0, 1], [2, 3]]) * sums).sum(), bug)
    other = section["bug_other_split [0,3],[1,2] (value depends on packing)"]
    assert_equal((local_weights([[0, 3], [1, 2]]) * sums).sum(), other)

    # A framework that averages over micro-batches (and ranks) needs our summed losses times their number.
    identity = section["framework_identity"]
    scaled = torch.stack([(weights("token_mean") * sums)[part].sum() * 2 for part in ([0, 1], [2, 3])])
    assert_equal(scaled, identity["microbatch_losses_to_return (x dp*GA / N_global)"])
    assert_equal(scaled.mean(), identity["mean_over_microbatches"])


def check_kl_estimators(section) -> None:
    difference = tensor(section["log_ref_minus_log_pi"])
    for name, estimator in KL_ESTIMATORS.items():
        logprobs = torch.full_like(difference, -1.0).requires_grad_()
        values = estimator(logprobs, difference - 1.0)
        (gradient,) = torch.autograd.grad(values.sum(), logprobs)
        assert_equal(values.detach(), section[name])
        assert_equal(gradient, section[f"d{name}_dlogp"])
    check_kl_enumeration(section["enumeration_check"])


def check_kl_enumeration(section) -> None:
    """Expectations over the whole vocabulary: what each estimator's gradient is on average."""
    logits = tensor(section["logits_pi"]).requires_grad_()
    log_ref = tensor(section["logits_ref"]).log_softmax(0)
    log_pi = logits.log_softmax(0)
    probability = log_pi.exp().detach()

    def gradient(value: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    def expected_gradient(name: str) -> torch.Tensor:
        return gradient((probability * KL_ESTIMATORS[name](log_pi, log_ref)).sum())

    reverse = (log_pi.exp() * (log_pi - log_ref)).sum()
    forward = (log_ref.exp() * (log_ref - log_pi)).sum()
    assert_equal(reverse.detach(), section["KL(pi||ref)"])
    assert_equal((probability * KL_ESTIMATORS["k3"](log_pi, log_ref)).sum().detach(), section["E[k3]"])
    facts = {
        "E[grad k1]=0": torch.allclose(expected_gradient("k1"), torch.zeros(5, dtype=torch.float64), atol=1e-12),
        "E[grad k2]=grad KL(pi||ref)": torch.allclose(expected_gradient("k2"), gradient(reverse), atol=1e-12),
        "E[grad k3]=grad KL(ref||pi)": torch.allclose(expected_gradient("k3"), gradient(forward), atol=1e-12),
    }
    for key, holds in facts.items():
        assert holds is section[key]


def check_tis(section) -> None:
    old, rollout = tensor(section["p_train_old"]).log(), tensor(section["p_rollout"]).log()
    inputs = OffPolicyInputs(old, rollout, torch.ones(5), torch.zeros(5, dtype=torch.int64), 1)

    def weights(correction: str, level: str, high: float, low: float = 0.0) -> torch.Tensor:
        return importance_weights(OffPolicyConfig(correction=correction, level=level, high=high, low=low), inputs)[0]

    assert_equal(weights("tis", "token", 1e6), section["w_raw"])
    assert_equal(weights("tis", "token", 2.0), section["tis_token_C2"])
    assert_equal(weights("icepop", "token", 2.0, 0.6), section["icepop_[0.6,2]"])
    assert_equal(weights("icepop", "token", 5.0, 0.5), section["icepop_[0.5,5]"])
    assert_equal(weights("tis", "sequence", 1e6), [section["seq_product"]] * 5)
    assert_equal(weights("tis", "sequence", 2.0), [section["seq_tis_C2"]] * 5)
    assert_equal(weights("tis", "geometric", 1e6), [section["seq_geo_mean"]] * 5)
    truncated, sums = importance_weights(OffPolicyConfig(correction="tis"), inputs)
    normalized = normalize_by_batch_mean(truncated, float(sums["is_weight_sum"]), float(sums["num_tokens"]))
    assert_equal(normalized, section["tis_token_C2_batch_normalised"])
    check_decoupled(section["decoupled_pg"], old, truncated)
    bypass = section["bypass_pg(ratio=new/rollout)"]
    new, advantages = section["decoupled_pg"]["p_new"], section["decoupled_pg"]["adv"]
    ratio = tensor(new) / rollout.exp()
    assert_equal(ratio, bypass["ratio"])
    assert_equal(loss_and_gradient(clip(), ratio.tolist(), advantages)[0], bypass["pg_loss"])
    check_mismatch(section["mismatch_metrics"], old, rollout)


def check_decoupled(section, old, weights) -> None:
    ratio = tensor(section["p_new"]) / old.exp()
    assert_equal(ratio, section["ratio_new_over_old"])
    token_loss, _ = loss_and_gradient(clip(), ratio.tolist(), section["adv"])
    assert_equal(token_loss, section["pg_loss"])
    assert_equal(token_loss * weights, section["pg_loss_times_tis"])
    trained, group = torch.tensor([5]), torch.tensor([0])
    weight = sample_token_weights("token_mean", trained, group, global_denominators(trained, group), 5)
    assert_equal((weight * token_loss * weights).sum(), section["token_mean"])


def check_mismatch(section, old, rollout) -> None:
    metrics = mismatch_metrics(mismatch_sums(old, rollout, torch.ones(5)))
    assert_equal(metrics["mismatch/kl_k1"], section["k1 rollout_kl = mean(log p_rollout - log p_train)"])
    assert_equal(metrics["mismatch/kl_k3"], section["k3"])
    assert_equal(metrics["mismatch/abs_prob_diff_max"], section["max_abs_prob_diff"])
    assert_equal(metrics["mismatch/ess"], section["ess = (sum w)^2/(n sum w^2)"])


def check_gspo(section) -> None:
    def loss(ratios, advantage, low=3e-4, high=4e-4) -> tuple[float, float]:
        """(the sequence's loss, clipped share above) under sample-mean weights."""
        token_loss, metrics = policy_loss(
            GspoLossConfig(clip_ratio_low=low, clip_ratio_high=high), one_sequence(ratios, advantage)
        )
        return float(token_loss.detach().mean()), float(metrics["clip_high_sum"] / metrics["num_tokens"])

    ratios = section["token_ratios"]
    assert_equal(-loss(ratios, 1.0, 1.0, 10.0)[0], section["s_i"])
    value, clipped = loss(ratios, 1.0)
    assert_equal(-value, section["objective_A+1"])
    assert (clipped == 1.0) is section["clipped_A+1"]
    assert_equal(-loss(ratios, -1.0)[0], section["objective_A-1"])
    small = [1.0001, 0.9999, 1.0002, 1.0]
    assert_equal(-loss(small, 1.0, 1.0, 10.0)[0], section["s_small"])
    assert_equal(-loss(small, 1.0)[0], section["objective_small_A+1"])


def check_repetition(section) -> None:
    responses = {"s1": section["s1"], "s2": section["s2"], "s3": list(range(10)), "s4": [5] * 10}
    ngram = section["ngram3"]
    for name, key in {"s1": "s1", "s2": "s2", "s3": "s3=range(10)", "s4": "s4=[5]*10"}.items():
        assert_equal(ngram_repetition(responses[name], 3), ngram[key])
    assert_equal(ngram_repetition([1, 2], 3), ngram["too_short"])
    loops = section["tail_loop(min 3)"]
    for name, response in responses.items():
        found = tail_loop(response, min_repeats=3)
        assert [found.period, found.repeats] == loops[name]


def one_response(values, rewards, mask=None, bootstrap=0.0) -> ValueInputs:
    mask = torch.ones(len(values)) if mask is None else torch.tensor(mask)
    return ValueInputs(tensor(values), tensor(rewards), mask, torch.tensor([len(values)]), tensor([bootstrap]))


def check_gae(section) -> None:
    values, gamma = section["values"], section["gamma"]
    inputs = one_response(values, section["rewards"])
    assert_equal(outcome_rewards(tensor([1.0]), inputs.loss_mask, inputs.lengths), section["rewards"])
    for lam in ("1.0", "0.95", "0.9", "0.0"):
        estimates = estimate_values(inputs, gamma, float(lam))
        assert_equal(estimates.advantages, section[f"lambda_{lam}"]["adv"])
        assert_equal(estimates.returns, section[f"lambda_{lam}"]["returns"])
    decoupled = section["decoupled(policy .95, critic 1.0)"]
    assert_equal(estimate_values(inputs, gamma, 0.95).advantages, decoupled["adv"])
    returns = estimate_values(inputs, gamma, 1.0).returns
    assert_equal(returns, decoupled["critic_target"])
    loss_inputs = ValueLossInputs(inputs.values, inputs.values, returns, inputs.loss_mask)
    losses, _ = value_loss(CriticConfig(loss="squared"), loss_inputs)
    assert_equal(losses.mean(), decoupled["critic_mse_half_mean"])
    punished = one_response(values, [0.0, 0.0, 0.0, 0.0, -1.0])
    assert_equal(estimate_values(punished, gamma, 0.95).advantages, section["lambda_0.95_reward_-1"]["adv"])
    shaped = section["kl_in_reward_beta0.1_lambda0.95"]
    rewards = kl_shaped_rewards(inputs.rewards, tensor(shaped["kl"]), inputs.loss_mask, 0.1)
    estimates = estimate_values(one_response(values, rewards.tolist()), gamma, 0.95)
    assert_equal(estimates.advantages, shaped["adv"])
    assert_equal(estimates.returns, shaped["returns"])
    gap = section["masked_gap_lambda_0.95"]
    masked = one_response(values, section["rewards"], gap["mask"])
    assert_equal(estimate_values(masked, gamma, 0.95).advantages, gap["adv"])


def check_reward_decay(section) -> None:
    """A reward `distance` tokens ahead reaches a critic that knows nothing as lambda^distance."""
    for distance in section.keys():
        values = [0.0] * (int(distance) + 1)
        advantages = estimate_values(one_response(values, values[:-1] + [1.0]), 1.0, 0.95).advantages
        assert math.isclose(float(advantages[0]), section[distance], rel_tol=1e-9)


def check_length_adaptive_lambda(section) -> None:
    finished = torch.tensor([True])
    for length in section.keys():
        case, lengths = section[length], torch.tensor([int(length)])
        assert_equal(raw_lambda(lengths, 0.05), [case["raw"]])
        assert_equal(LengthAdaptiveLambda(0.05)(lengths, finished), [case["clamp01"]])
        assert_equal(WindowLambda(0.05)(lengths, finished), [case["min095"]])
        if "alpha*l" in case:
            total = 1.0 / (1.0 - LengthAdaptiveLambda(0.05)(lengths, finished))
            assert_equal(total, [case["sum_lambda^k(k<inf)"]])
            assert_equal(total, [case["alpha*l"]])


def check_tppo_length_rule(section) -> None:
    for key in section.keys():
        state, _, length = key.split("_")
        arguments = (torch.tensor([int(length)]), torch.tensor([state == "finished"]))
        assert prospective_lengths(*arguments, 8192).tolist() == [section[key]["len"]]
        assert_equal(WindowLambda(0.05, 0.95, 8192)(*arguments), [section[key]["lambda"]])


def check_egae(section) -> None:
    windows = section["two_windows"]
    values = windows["values_w0"]

    def advantages(values, rewards, is_finished, gamma, lam) -> torch.Tensor:
        lengths, finished = torch.tensor([len(values)]), torch.tensor([is_finished])
        mask = torch.ones(len(values))
        return extended_estimates(tensor(values), tensor(rewards), mask, lengths, finished, gamma, lam).advantages

    nothing = [0.0] * 5
    for gamma in ("1.0", "0.99"):
        for lam in ("0.95", "1.0"):
            expected = section[f"truncated_g{gamma}_l{lam}"]
            assert_equal(advantages(values, nothing, False, float(gamma), float(lam)), expected)
    assert_equal(advantages(values, nothing[:-1] + [1.0], True, 1.0, 0.95), section["finished_g1.0_l0.95"])
    # The mistake that the stand-in for the next value avoids: it is plain GAE with a bootstrap of 0.
    wrong = estimate_values(one_response(values, nothing), 1.0, 0.95).advantages
    assert_equal(wrong, section["WRONG_truncated_with_V_end=0"])
    tail = section["truncated_ignore_last2"]
    mask = without_tail(torch.ones(5), torch.tensor([5]), torch.tensor([False]), 2)
    assert_equal(mask, tail["policy_mask"])
    assert_equal(advantages(values, nothing, False, 1.0, 0.95) * mask, tail["adv_masked"])
    check_two_windows(windows, advantages)


def check_two_windows(section, advantages) -> None:
    first, second = section["values_w0"], section["values_w1"]
    assert_equal(advantages(first, [0.0] * 5, False, 1.0, 0.95), section["policy_adv_w0(step k)"])
    assert_equal(advantages(second, [0.0, 0.0, 1.0], True, 1.0, 0.95), section["policy_adv_w1(step k+1)"])
    whole = one_response(first + second, [0.0] * 7 + [1.0])
    assert_equal(estimate_values(whole, 1.0, 1.0).returns, section["critic_target_all_8_tokens(step k+1)"])
    assert section["critic_trained_at_step_k"] is False  # tests/unit/algorithms/test_value_advantages.py


def check_tppo_aggregation(section) -> None:
    """The mini-batches of loss_aggregation: responses 0 and 1, then 2 and 3; 12 tokens in all."""
    trained, groups = torch.tensor([4, 2]), torch.tensor([0, 1])
    denominators = global_denominators(trained, groups, rollout_tokens=12, num_mini_batches=2)
    weight = float(sample_token_weights("rollout_token_mean", trained, groups, denominators, 8)[0])
    assert_equal(weight * (1.0 + 1.5), section["mini0"])
    assert_equal(weight * (-3.0 + 2.1), section["mini1"])


def check_vapo_positive_nll(section) -> None:
    correct = torch.tensor(section["correct"])
    trained = torch.tensor([len(row) for row in section["logp"]])

    def loss(correct: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(int(trained.sum()))
        per_token = correct.repeat_interleave(trained)
        token_loss, _ = positive_example_loss(tensor(sum(section["logp"], [])), mask, per_token)
        count = int(positive_tokens(trained, correct).sum())
        weights = positive_token_weights(trained, correct, count, section["mu"])
        return (weights.repeat_interleave(trained) * token_loss).sum()

    assert_equal(loss(correct) / section["mu"], section["nll"])
    assert_equal(section["L_ppo"] + loss(correct), section["total"])
    assert section["no_correct_in_minibatch"].startswith("nll = 0")
    assert float(loss(torch.zeros_like(correct))) == 0.0


def check_ucb_priority(section) -> None:
    assert_equal(ucb_priority([1.0, -1.0] * 8, 16, 100), section["mean0_n16_step100"])
    assert_equal(ucb_priority([1.0] * 16, 16, 100), section["mean1_n16_step100"])
    assert_equal(ucb_priority([-1.0] * 160, 160, 100), section["mean-1_n160_step100"])


def check_soft_perplexity(section):
    nll = tensor(section["nll"])
    assert_equal(nll.exp(), section["ppl"])
    assert_equal(soft_perplexity_penalty(nll, 1.0, 1.5), section["one_sided a=1.0,b=1.5"])
    banded = soft_perplexity_penalty(nll, 1.0, 1.5, low_start=0.2, low_end=0.05)
    assert_equal(banded, section["band a=1,b=1.5,c=.2,d=.05"])
    one = section["from_logp"]
    mean = -tensor(one["logp"]).mean()
    assert_equal(mean, one["nll_mean"])
    assert_equal(soft_perplexity_penalty(mean, 1.0, 1.5), one["penalty"])


def check_budget(section) -> None:
    wanted = [wanted_size(rate) for rate in section["p_hat"]]
    assert_equal(wanted, section["want(delta=.05,4..64)"])
    assert_equal(fit_total(wanted, 96), section["fixed_total_96"])
    assert_equal(fit_total(wanted, 200), section["fixed_total_200"])
    assert_equal(wanted_size(0.0), section["p=0"])
    assert_equal(wanted_size(1.0), section["p=1"])


def check_filter_bound(section) -> None:
    for count in ("8", "16", "32", "57", "58", "64", "128"):
        assert_equal(PassRate().seen(0, int(count)).probability_below(section[count]), 0.95)
        assert_equal(PassRate().seen(int(count), 0).probability_below(1 - section[count]), 0.05)


SECTIONS: dict[str, Callable] = {
    "gae.gae_5tok_terminal_reward": check_gae,
    "gae.reward_decay": check_reward_decay,
    "gae.length_adaptive_lambda_alpha0.05": check_length_adaptive_lambda,
    "gae.tppo_length_rule_window8192": check_tppo_length_rule,
    "gae.egae": check_egae,
    "loss.loss_agg_tppo_batch": check_tppo_aggregation,
    "loss.vapo_positive_nll": check_vapo_positive_nll,
    "adv.grpo_advantages": check_grpo_advantages,
    "adv.reinforce_baseline": check_reinforce_baseline,
    "adv.reinforce_pp_k1": check_reinforce_pp,
    "adv.soft_overlong": check_soft_overlong,
    "adv.dynamic_sampling": check_dynamic_sampling,
    "loss.clip": check_clip,
    "loss.loss_aggregation": check_loss_aggregation,
    "loss.kl_estimators": check_kl_estimators,
    "loss.tis": check_tis,
    "loss.gspo": check_gspo,
    "seeds.repetition": check_repetition,
    "seeds.budget": check_budget,
    "seeds.filter_upper_bound_0_of_n": check_filter_bound,
    "seeds.ucb_priority": check_ucb_priority,
    "seeds.soft_ppl": check_soft_perplexity,
}


@pytest.mark.parametrize("name", SECTIONS)
def test_golden_section(name, golden_file, golden_section):
    chapter, key = name.split(".", 1)
    section = golden_section(golden_file[chapter][key], name)
    SECTIONS[name](section)
    assert section.unread() == []


def test_every_golden_section_is_asserted_or_named_for_later(golden_file):
    present = {f"{chapter}.{key}" for chapter, keys in golden_file.items() if chapter != "_meta" for key in keys}
    whole = {name.split(".")[0] for name in LATER if name.endswith(".*")}
    open_ones = {name for name in present if name.split(".")[0] not in whole | set(ELSEWHERE)}
    named = set(SECTIONS) | {name for name in LATER if not name.endswith(".*")}
    assert open_ones == named
    assert not set(SECTIONS) & set(LATER)


@pytest.mark.parametrize("chapter", ELSEWHERE)
def test_a_chapter_of_another_file_is_guarded_there(chapter, golden_file, repository):
    assert chapter in golden_file
    text = (repository / ELSEWHERE[chapter]).read_text(encoding="utf-8")
    assert f'golden_file["{chapter}"]' in text and ".unread()" in text
