from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch

from megatron_dapo.algorithms.policy_loss import POLICY_LOSSES, policy_loss
from megatron_dapo.algorithms.policy_loss_inputs import PolicyLossInputs
from megatron_dapo.config.loss_schema import (
    CispoLossConfig,
    FunctionLossConfig,
    GmpoLossConfig,
    GspoLossConfig,
    GspoTokenLossConfig,
    PolicyLossConfig,
    PpoClipLossConfig,
)

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "hooks" / "policy_loss.py"
SECTIONS = {section.name: section for section in (kind() for kind in get_args(PolicyLossConfig))}
SECTIONS["function"] = FunctionLossConfig(function=f"{EXAMPLE}:loss")


def clip(low: float, high: float, dual_clip: float | str = "off") -> PpoClipLossConfig:
    return PpoClipLossConfig(clip_ratio_low=low, clip_ratio_high=high, dual_clip=dual_clip)


def gspo(low: float, high: float) -> GspoLossConfig:
    return GspoLossConfig(clip_ratio_low=low, clip_ratio_high=high)


def gspo_token(low: float, high: float) -> GspoTokenLossConfig:
    return GspoTokenLossConfig(clip_ratio_low=low, clip_ratio_high=high)


def packed(lengths: list[int], seed: int = 0, spread: float = 0.4) -> PolicyLossInputs:
    """Sequences with a masked first position each, advantages constant in a sequence, ratios around 1."""
    generator = torch.Generator().manual_seed(seed)
    sequence_ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    num_tokens = int(sum(lengths))
    old = -torch.rand(num_tokens, generator=generator, dtype=torch.float64) - 0.5
    shift = spread * torch.randn(num_tokens, generator=generator, dtype=torch.float64)
    mask = torch.ones(num_tokens)
    mask[torch.tensor([0, *lengths[:-1]]).cumsum(0)] = 0
    advantages = torch.randn(len(lengths), generator=generator, dtype=torch.float64)[sequence_ids]
    return PolicyLossInputs((old + shift).requires_grad_(), old, advantages, mask, sequence_ids, len(lengths))


def gradient_of(loss, inputs: PolicyLossInputs, weights: torch.Tensor) -> torch.Tensor:
    token_loss, _ = policy_loss(loss, inputs)
    return torch.autograd.grad((weights * inputs.loss_mask * token_loss).sum(), inputs.logprobs)[0]


def finite_differences(objective, logprobs: torch.Tensor, step: float = 1e-6) -> torch.Tensor:
    gradient = torch.zeros_like(logprobs)
    for index in range(logprobs.numel()):
        moved = torch.zeros_like(logprobs)
        moved[index] = step
        gradient[index] = (objective(logprobs + moved) - objective(logprobs - moved)) / (2 * step)
    return gradient


@pytest.mark.parametrize("loss", [clip(0.2, 0.2), clip(0.2, 0.28), clip(0.2, 0.28, 1.5)])
def test_gradient_of_clipped_losses_matches_finite_differences(loss):
    inputs = packed([5, 9, 3], spread=0.6)
    weights = torch.rand(17, dtype=torch.float64)

    def objective(logprobs: torch.Tensor) -> float:
        ratio = (logprobs - inputs.old_logprobs).exp()
        low, high = loss.clip_ratio_low, loss.clip_ratio_high
        a = inputs.advantages
        value = torch.maximum(-a * ratio, -a * ratio.clamp(1 - low, 1 + high))
        if loss.dual_clip != "off":
            value = torch.where(a < 0, torch.minimum(value, -a * loss.dual_clip), value)
        return float((weights * inputs.loss_mask * value).sum())

    token_loss, _ = policy_loss(loss, inputs)
    assert float((weights * token_loss).sum().detach()) == pytest.approx(objective(inputs.logprobs.detach()), rel=1e-12)
    expected = finite_differences(objective, inputs.logprobs.detach())
    torch.testing.assert_close(gradient_of(loss, inputs, weights), expected, rtol=1e-6, atol=1e-8)
    assert 0 < int((expected == 0).sum()) < 17, "the example must hold clipped and unclipped tokens"


@pytest.mark.parametrize("bounds", [(3e-4, 4e-4), (0.15, 0.1), (1.0, 10.0)])
def test_gspo_gradient_matches_finite_differences_of_the_sequence_objective(bounds):
    inputs = packed([6, 4, 9, 5], seed=3)
    low, high = bounds
    counts = torch.zeros(4, dtype=torch.float64).index_add_(0, inputs.sequence_ids, inputs.loss_mask.double())
    advantage = torch.stack([inputs.advantages[inputs.sequence_ids == i][0] for i in range(4)])

    def objective(logprobs: torch.Tensor) -> float:
        log_ratio = (logprobs - inputs.old_logprobs) * inputs.loss_mask
        s = (torch.zeros(4, dtype=torch.float64).index_add_(0, inputs.sequence_ids, log_ratio) / counts).exp()
        return float(torch.maximum(-s * advantage, -s.clamp(1 - low, 1 + high) * advantage).mean())

    sample_mean = (1 / (4 * counts))[inputs.sequence_ids]
    token_loss, metrics = policy_loss(gspo(low, high), inputs)
    loss = float((sample_mean * token_loss).sum().detach())
    assert loss == pytest.approx(objective(inputs.logprobs.detach()), rel=1e-12)
    expected = finite_differences(objective, inputs.logprobs.detach())
    torch.testing.assert_close(gradient_of(gspo(low, high), inputs, sample_mean), expected, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(gradient_of(gspo_token(low, high), inputs, sample_mean), expected, rtol=1e-6, atol=1e-9)
    clipped = metrics["clip_low_sum"] + metrics["clip_high_sum"]
    assert (float(clipped) == 0) == (bounds == (1.0, 10.0))


def test_gspo_token_uses_each_tokens_own_advantage_and_gspo_their_mean():
    inputs = packed([5])
    varied = replace(inputs, advantages=torch.tensor([9.0, 1.0, 2.0, 3.0, 6.0], dtype=torch.float64))
    trained = varied.loss_mask > 0
    log_ratio = (varied.logprobs - varied.old_logprobs).detach()
    s = log_ratio[trained].mean().exp()
    wide = (1.0, 10.0)
    token_loss, _ = policy_loss(gspo_token(*wide), varied)
    torch.testing.assert_close(token_loss.detach()[trained], -s * varied.advantages[trained])
    token_loss, _ = policy_loss(gspo(*wide), varied)
    torch.testing.assert_close(token_loss.detach()[trained], -s * torch.full((4,), 3.0, dtype=torch.float64))


@pytest.mark.parametrize("loss", [gspo(0.01, 0.01), gspo_token(0.01, 0.01), GmpoLossConfig(clip_log_ratio_low=0.05, clip_log_ratio_high=0.05)])
def test_sequences_cut_in_parts_give_the_same_loss_and_gradient(loss):
    """Two ranks that hold alternate tokens; the reduction adds what the other rank has."""
    whole = packed([8, 6, 7], seed=5, spread=0.1)
    ones = torch.ones(21, dtype=torch.float64)
    expected_loss, expected_metrics = policy_loss(loss, whole)
    expected = gradient_of(loss, whole, ones)
    cut = torch.arange(21) % 2 == 0
    seen: dict[int, torch.Tensor] = {}

    def part(index: int, reduce) -> PolicyLossInputs:
        chosen = cut if index == 0 else ~cut
        return PolicyLossInputs(
            whole.logprobs.detach()[chosen].requires_grad_(),
            whole.old_logprobs[chosen],
            whole.advantages[chosen],
            whole.loss_mask[chosen],
            whole.sequence_ids[chosen],
            3,
            reduce,
        )

    for index in (0, 1):
        policy_loss(loss, part(index, lambda sums, index=index: seen.setdefault(index, sums)))
    total = seen[0] + seen[1]
    clipped = 0.0
    for index, chosen in ((0, cut), (1, ~cut)):
        inputs = part(index, lambda sums: total)
        token_loss, metrics = policy_loss(loss, inputs)
        torch.testing.assert_close(token_loss, expected_loss[chosen])
        torch.testing.assert_close(gradient_of(loss, inputs, ones[chosen]), expected[chosen])
        clipped += float(metrics["clip_low_sum"] + metrics["clip_high_sum"])
    assert clipped == float(expected_metrics["clip_low_sum"] + expected_metrics["clip_high_sum"]) > 0


def test_cispo_gradient_is_the_clipped_weight_times_the_advantage_for_every_token():
    inputs = packed([7, 7], spread=1.0)
    loss = CispoLossConfig(clip_ratio_low=0.5, clip_ratio_high=0.5)
    ratio = (inputs.logprobs - inputs.old_logprobs).detach().exp()
    expected = -ratio.clamp(0.5, 1.5) * inputs.advantages * inputs.loss_mask
    torch.testing.assert_close(gradient_of(loss, inputs, torch.ones(14, dtype=torch.float64)), expected)
    _, metrics = policy_loss(loss, inputs)
    trained = inputs.loss_mask > 0
    assert float(metrics["clip_low_sum"]) == int((ratio[trained] < 0.5).sum()) > 0
    assert float(metrics["clip_high_sum"]) == int((ratio[trained] > 1.5).sum()) > 0


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_values_at_masked_positions_change_nothing(name):
    loss = SECTIONS[name]
    clean = packed([5, 6])
    logprobs, advantages = clean.logprobs.detach().clone(), clean.advantages.clone()
    masked = clean.loss_mask == 0
    logprobs[masked], advantages[masked] = math.nan, math.inf
    dirty = replace(clean, logprobs=logprobs.requires_grad_(), advantages=advantages)
    (clean_loss, clean_metrics), (dirty_loss, dirty_metrics) = policy_loss(loss, clean), policy_loss(loss, dirty)
    torch.testing.assert_close(dirty_loss, clean_loss)
    assert dirty_loss[masked].tolist() == [0.0, 0.0]
    torch.testing.assert_close(dirty_metrics, clean_metrics)
    ones = torch.ones(11, dtype=torch.float64)
    gradient = gradient_of(loss, dirty, ones)
    torch.testing.assert_close(gradient, gradient_of(loss, clean, ones))
    assert gradient[masked].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_metric_sums_of_parts_add_up_to_the_whole(name):
    loss = SECTIONS[name]
    whole = packed([5, 6, 4])
    total = policy_loss(loss, whole)[1]
    parts = []
    for ids in ((0, 1), (2,)):
        chosen = torch.isin(whole.sequence_ids, torch.tensor(ids))
        renumbered = whole.sequence_ids[chosen] - ids[0]
        parts.append(
            policy_loss(
                loss,
                PolicyLossInputs(
                    whole.logprobs[chosen], whole.old_logprobs[chosen], whole.advantages[chosen],
                    whole.loss_mask[chosen], renumbered, len(ids),
                ),
            )[1]
        )  # fmt: skip
    for key, value in total.items():
        torch.testing.assert_close(parts[0][key] + parts[1][key], value)
    assert float(total["num_tokens"]) == 12


def test_metrics_of_a_known_batch():
    old = torch.tensor([0.5, 0.4, 0.3, 0.2], dtype=torch.float64).log()
    new = torch.tensor([0.9, 0.1, 0.3, 0.9], dtype=torch.float64).log()
    inputs = PolicyLossInputs(
        new, old, torch.tensor([1.0, -1.0, 1.0, -1.0]), torch.ones(4), torch.zeros(4, dtype=torch.int64), 1
    )
    _, metrics = policy_loss(clip(0.2, 0.28, 3.0), inputs)
    ratio = new.exp() / old.exp()
    counts = {key: float(metrics[key]) for key in ("clip_low_sum", "clip_high_sum", "dual_clip_sum", "num_tokens")}
    assert counts == {"clip_low_sum": 1, "clip_high_sum": 1, "dual_clip_sum": 1, "num_tokens": 4}
    assert float(metrics["ratio_sum"]) == pytest.approx(float(ratio.sum()))
    assert float(metrics["approx_kl_k1_sum"]) == pytest.approx(float(-ratio.log().sum()))
    assert float(metrics["approx_kl_k3_sum"]) == pytest.approx(float((ratio - 1 - ratio.log()).sum()))
    assert float(metrics["policy_loss_sum"]) == pytest.approx(-1.28 + 0.8 - 1.0 + 3.0)


def test_gradient_passes_at_the_bound():
    # 0.5 and 1.5 and their logs' exponentials are exact enough to meet the bound: exp(log 1.5) == 1.5 in float64.
    logprobs = torch.tensor([math.log(1.5), math.log(0.5)], dtype=torch.float64).requires_grad_()
    assert logprobs.exp().tolist() == [1.5, 0.5]
    inputs = PolicyLossInputs(
        logprobs, torch.zeros(2, dtype=torch.float64), torch.tensor([1.0, -1.0], dtype=torch.float64),
        torch.ones(2), torch.zeros(2, dtype=torch.int64), 1,
    )  # fmt: skip
    assert gradient_of(clip(0.5, 0.5), inputs, torch.ones(2)).tolist() == [-1.5, 0.5]


def test_an_exploded_ratio_stays_finite():
    inputs = replace(packed([4]), old_logprobs=torch.full((4,), -5000.0, dtype=torch.float64))
    token_loss, metrics = policy_loss(clip(0.2, 0.28), replace(inputs, advantages=-torch.ones(4, dtype=torch.float64)))
    assert torch.isfinite(token_loss).all() and all(torch.isfinite(value) for value in metrics.values())
    assert float(token_loss.detach().max()) == pytest.approx(math.exp(20))


def test_every_loss_of_the_configuration_has_its_function_and_its_papers_bounds():
    assert SECTIONS.keys() == POLICY_LOSSES.keys()
    published = {name: loss for name, loss in SECTIONS.items() if hasattr(loss, "clip_ratio_low")}
    bounds = {name: (loss.clip_ratio_low, loss.clip_ratio_high, loss.aggregation) for name, loss in published.items()}
    assert bounds == {
        "ppo_clip": (0.2, 0.28, "token_mean"),  # DAPO, arXiv 2503.14476
        "gspo": (3e-4, 4e-4, "sample_mean"),  # arXiv 2507.18071, sec. 5.1
        "gspo_token": (3e-4, 4e-4, "sample_mean"),
        "luspo": (3e-4, 4e-4, "seq_sum_mean"),  # GSPO's, arXiv 2602.05261
        "fipo": (0.2, 0.28, "token_mean"),  # arXiv 2603.19835
        "dis": (0.8, 3.0, "token_mean"),  # ratios in [0.2, 4]
        "cispo": (1.0, 4.0, "token_mean"),  # no lower bound, arXiv 2506.13585, Eq 4
    }
    assert SECTIONS["ppo_clip"].dual_clip == "off"
