"""DIS, DPPO, SAPO, GMPO, LUSPO and FIPO against their formulas in plain Python, token by token, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from megatron_dapo.algorithms.policy_loss import policy_loss
from megatron_dapo.algorithms.policy_loss_inputs import PolicyLossInputs
from megatron_dapo.config.loss_schema import (
    DisLossConfig,
    DppoKlLossConfig,
    DppoTvLossConfig,
    FipoLossConfig,
    GmpoLossConfig,
    GspoLossConfig,
    LuspoLossConfig,
    PolicyLossConfig,
    SapoLossConfig,
)

LENGTHS = [7, 1, 12, 5]

# Token -> (loss, its derivative by log pi): p, q and old are pi, pi_rollout and pi_old.
TokenLoss = Callable[[float, float, float, float], tuple[float, float]]


def batch(seed: int = 0, spread: float = 0.7) -> PolicyLossInputs:
    """Sequences with a masked token in the middle, and three different policies."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(LENGTHS)
    sequence_ids = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    rollout = -3 * torch.rand(num_tokens, generator=generator, dtype=torch.float64)
    old = rollout + 0.05 * torch.randn(num_tokens, generator=generator, dtype=torch.float64)
    new = (old + spread * torch.randn(num_tokens, generator=generator, dtype=torch.float64)).clamp(max=-1e-3)
    mask = torch.ones(num_tokens)
    mask[[3, 12, 20]] = 0
    advantages = torch.randn(len(LENGTHS), generator=generator, dtype=torch.float64)[sequence_ids]
    return PolicyLossInputs(
        new.requires_grad_(), old, advantages, mask, sequence_ids, len(LENGTHS), rollout_logprobs=rollout
    )


def score(weight: float, advantage: float, logprob: float) -> tuple[float, float]:
    return -weight * advantage * logprob, -weight * advantage


def dis_token(p: float, q: float, old: float, advantage: float) -> tuple[float, float]:
    ratio = math.exp(p - q)
    return score(ratio if 0.5 <= ratio <= 1.6 else 0.0, advantage, p)


def dppo_tv_token(p: float, q: float, old: float, advantage: float) -> tuple[float, float]:
    moved = math.exp(p) - math.exp(q)
    outside = moved > 0.1 if advantage > 0 else moved < -0.07
    return score(0.0 if outside else min(math.exp(p - q), 1.5), advantage, p)


def dppo_kl_token(p: float, q: float, old: float, advantage: float) -> tuple[float, float]:
    new, sampled = math.exp(p), math.exp(q)
    divergence = sampled * math.log(sampled / new) + (1 - sampled) * math.log((1 - sampled) / (1 - new))
    outside = (p > q and divergence > 0.03) if advantage > 0 else (p < q and divergence > 0.02)
    return score(0.0 if outside else min(math.exp(p - q), 20.0), advantage, p)


def sapo_token(p: float, q: float, old: float, advantage: float) -> tuple[float, float]:
    temperature, ratio = (1.0 if advantage > 0 else 1.7), math.exp(p - old)
    gate = 1 / (1 + math.exp(-temperature * (ratio - 1)))
    return -4 / temperature * gate * advantage, -4 * gate * (1 - gate) * ratio * advantage


BY_TOKEN: list[tuple[PolicyLossConfig, TokenLoss]] = [
    (DisLossConfig(clip_ratio_low=0.5, clip_ratio_high=0.6), dis_token),
    (DppoTvLossConfig(divergence_low=0.07, divergence_high=0.1, ratio_max=1.5), dppo_tv_token),
    (DppoKlLossConfig(divergence_low=0.02, divergence_high=0.03), dppo_kl_token),
    (SapoLossConfig(temperature_negative=1.7), sapo_token),
]


def loss_and_gradient(loss: PolicyLossConfig, inputs: PolicyLossInputs) -> tuple[list[float], list[float]]:
    token_loss, _ = policy_loss(loss, inputs)
    [gradient] = torch.autograd.grad(token_loss.sum(), inputs.logprobs)
    return token_loss.tolist(), gradient.tolist()


@pytest.mark.parametrize(("loss", "token_loss"), BY_TOKEN, ids=lambda each: getattr(each, "name", ""))
@pytest.mark.parametrize("seed", range(5))
def test_token_losses_and_gradients_are_those_of_the_formula(
    loss: PolicyLossConfig, token_loss: TokenLoss, seed: int
) -> None:
    inputs = batch(seed)
    rows = zip(inputs.logprobs.tolist(), inputs.sampled_logprobs.tolist(), inputs.old_logprobs.tolist(), inputs.advantages.tolist())
    wanted = [token_loss(*row) if trained else (0.0, 0.0) for row, trained in zip(rows, inputs.trained.tolist())]
    values, gradient = loss_and_gradient(loss, inputs)
    assert values == pytest.approx([value for value, _ in wanted], rel=1e-12, abs=1e-12)
    assert gradient == pytest.approx([slope for _, slope in wanted], rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("loss", [each for each, _ in BY_TOKEN[:3]], ids=lambda loss: loss.name)
def test_losses_with_a_trust_region_keep_and_drop_tokens_and_count_them(loss: PolicyLossConfig) -> None:
    inputs = batch(1)
    _, metrics = policy_loss(loss, inputs)
    _, gradient = loss_and_gradient(loss, inputs)
    dropped = sum(value == 0 for value, trained in zip(gradient, inputs.trained.tolist()) if trained)
    assert float(metrics["clip_low_sum"] + metrics["clip_high_sum"]) == dropped
    assert 0 < dropped < int(inputs.trained.sum())


def test_dppo_treats_a_certain_token_as_any_other() -> None:
    certain = torch.tensor([-1e-12, -1e-3], dtype=torch.float64, requires_grad=True)
    rollout = torch.tensor([-1e-3, 0.0], dtype=torch.float64)
    inputs = PolicyLossInputs(
        certain, rollout, torch.ones(2, dtype=torch.float64), torch.ones(2), torch.zeros(2, dtype=torch.int64), 1
    )
    for loss in (DppoTvLossConfig(), DppoKlLossConfig()):
        token_loss, metrics = policy_loss(loss, inputs)
        assert torch.isfinite(token_loss).all() and all(torch.isfinite(value) for value in metrics.values())


def gmpo_objective(inputs: PolicyLossInputs, logprobs: list[float], low: float, high: float) -> float:
    total = 0.0
    for sequence in range(inputs.num_sequences):
        places = [at for at, (number, trained) in enumerate(zip(inputs.sequence_ids.tolist(), inputs.trained.tolist())) if trained and number == sequence]
        if not places:
            continue
        advantage = float(inputs.advantages[places[0]])
        ratios = [logprobs[at] - float(inputs.old_logprobs[at]) for at in places]
        bounded = [min(each, high) if advantage > 0 else max(each, -low) for each in ratios]
        total -= advantage * math.exp(sum(bounded) / len(bounded)) / inputs.num_sequences
    return total


def test_gmpo_is_the_geometric_mean_of_bounded_ratios() -> None:
    inputs, low, high = batch(0), 0.5, 0.3
    token_loss, metrics = policy_loss(GmpoLossConfig(clip_log_ratio_low=low, clip_log_ratio_high=high), inputs)
    counts = torch.bincount(inputs.sequence_ids[inputs.trained], minlength=inputs.num_sequences)
    loss = (token_loss / (counts[inputs.sequence_ids] * inputs.num_sequences).clamp(min=1)).sum()
    logprobs = inputs.logprobs.tolist()
    assert loss.item() == pytest.approx(gmpo_objective(inputs, logprobs, low, high), rel=1e-12)
    [gradient] = torch.autograd.grad(loss, inputs.logprobs)
    for at, slope in enumerate(gradient.tolist()):
        ends = [[value + (step if index == at else 0.0) for index, value in enumerate(logprobs)] for step in (1e-6, -1e-6)]
        difference = gmpo_objective(inputs, ends[0], low, high) - gmpo_objective(inputs, ends[1], low, high)
        assert slope == pytest.approx(difference / 2e-6, rel=1e-6, abs=1e-9)
    assert float(metrics["clip_low_sum"]) > 0 and float(metrics["clip_high_sum"]) > 0


def test_luspo_is_gspo_summed_over_a_response() -> None:
    bounds = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.05}
    inputs = batch(3)
    assert loss_and_gradient(LuspoLossConfig(**bounds), inputs) == loss_and_gradient(GspoLossConfig(**bounds), inputs)
    assert LuspoLossConfig.aggregation == "seq_sum_mean" and GspoLossConfig.aggregation == "sample_mean"


def fipo_weights(inputs: PolicyLossInputs, loss: FipoLossConfig) -> list[float]:
    """f_t by a double loop over the trained tokens of a sequence."""
    weights = [1.0] * len(inputs.logprobs)
    for sequence in range(inputs.num_sequences):
        places = [at for at, (number, trained) in enumerate(zip(inputs.sequence_ids.tolist(), inputs.trained.tolist())) if trained and number == sequence]
        ratios = [(inputs.logprobs[at] - inputs.old_logprobs[at]).item() for at in places]
        for first, at in enumerate(places):
            total = sum(
                0.5 ** (distance / loss.half_life) * ratio
                for distance, ratio in enumerate(ratios[first:])
                if ratio <= math.log(loss.dual_clip)
            )
            weights[at] = min(max(math.exp(total), 1 - loss.weight_low), 1 + loss.weight_high)
    return weights


@pytest.mark.parametrize("keys", [{}, {"weight_low": 0.2, "half_life": 3.0}, {"dual_clip": 1.1, "weight_high": 4.0}])
def test_fipo_is_ppo_with_advantages_weighted_by_the_tokens_that_follow(keys: dict[str, float]) -> None:
    loss, inputs = FipoLossConfig(**keys), batch(4, spread=0.15)
    weights = fipo_weights(inputs, loss)
    assert len({round(weight, 9) for weight in weights}) > 2, "the example must hold several weights"
    wanted = []
    for new, old, advantage, weight, trained in zip(inputs.logprobs.tolist(), inputs.old_logprobs.tolist(), inputs.advantages.tolist(), weights, inputs.trained.tolist()):
        ratio, scaled = math.exp(new - old), advantage * weight
        value = max(-scaled * ratio, -scaled * min(max(ratio, 0.8), 1.28))
        value = min(value, -scaled * loss.dual_clip) if scaled < 0 else value
        wanted.append(value if trained else 0.0)
    values, _ = loss_and_gradient(loss, inputs)
    assert values == pytest.approx(wanted, rel=1e-6)


def test_observed_tokens_between_sampled_ones_change_no_weight_of_fipo() -> None:
    inputs = batch(5)
    without = replace(inputs, logprobs=inputs.logprobs.detach()[inputs.trained].requires_grad_(), **{
        name: getattr(inputs, name)[inputs.trained]
        for name in ("old_logprobs", "advantages", "loss_mask", "sequence_ids", "rollout_logprobs")
    })  # fmt: skip
    loss = FipoLossConfig(weight_low=0.5, weight_high=2.0, half_life=4.0)
    values, _ = policy_loss(loss, inputs)
    torch.testing.assert_close(values[inputs.trained], policy_loss(loss, without)[0])
