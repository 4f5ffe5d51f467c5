"""The assembled loss against the formula written out token by token."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_dapo.algorithms.objective import BehaviorTerms, PolicyObjective
from megatron_dapo.config import load_config
from megatron_dapo.config.algorithm_schema import AlgorithmConfig, GeneralizedKlConfig, OffPolicyConfig
from megatron_dapo.config.loss_schema import PpoClipLossConfig
from megatron_dapo.types import MicroBatch


@pytest.fixture
def micro_batch():
    lengths = (3, 4)
    size = sum(lengths)
    generator = torch.Generator().manual_seed(0)
    mask = torch.tensor([0, 1, 0, 1, 1, 0, 1.0])
    return MicroBatch(
        token_ids=torch.arange(size),
        position_ids=torch.cat([torch.arange(n) for n in lengths]),
        targets=torch.arange(size),
        cu_seqlens=torch.tensor([0, 3, 7], dtype=torch.int32),
        sequence_lengths=lengths,
        sequence_ids=torch.tensor([0, 0, 0, 1, 1, 1, 1]),
        loss_mask=mask,
        loss_weights=torch.full((size,), 0.25),
        advantages=torch.randn(size, generator=generator),
        rollout_logprobs=-torch.rand(size, generator=generator),
        sample_ids=("a/0", "a/1"),
    )


def test_loss_is_the_weighted_sum_of_all_terms(micro_batch):
    generator = torch.Generator().manual_seed(1)
    old, new, ref, entropy = (-torch.rand(7, generator=generator) for _ in range(4))
    objective = PolicyObjective(
        AlgorithmConfig(
            loss=PpoClipLossConfig(clip_ratio_low=0.2, clip_ratio_high=0.28, dual_clip=10.0),
            off_policy=OffPolicyConfig(correction="tis", high=1.2),
            entropy_coefficient=0.01,
            kl_loss_coefficient=0.1,
            kl_estimator="k3",
        )
    )
    weights, _ = objective.importance(micro_batch, old)
    loss, metrics = objective(micro_batch, new, -entropy, BehaviorTerms(old, weights, ref))
    expected = 0.0
    for t in range(7):
        if not micro_batch.loss_mask[t]:
            continue
        ratio = math.exp(new[t] - old[t])
        advantage = float(micro_batch.advantages[t])
        policy = max(-advantage * ratio, -advantage * min(max(ratio, 0.8), 1.28))
        correction = min(math.exp(old[t] - micro_batch.rollout_logprobs[t]), 1.2)
        gap = float(ref[t] - new[t])
        expected += 0.25 * (correction * policy + 0.1 * (math.exp(gap) - 1 - gap) + 0.01 * float(entropy[t]))
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    assert float(metrics["num_tokens"]) == 4


def test_masked_positions_may_hold_anything(micro_batch):
    objective = PolicyObjective(AlgorithmConfig())
    logprobs = torch.full((7,), -1.0, requires_grad=True)
    old = torch.where(micro_batch.loss_mask > 0, -1.0, float("nan"))
    loss, _ = objective(micro_batch, logprobs, torch.zeros(7), BehaviorTerms(old))
    loss.backward()
    assert torch.isfinite(loss)
    assert bool((logprobs.grad[micro_batch.loss_mask == 0] == 0).all())
    expected = -micro_batch.advantages * 0.25 * micro_batch.loss_mask
    assert torch.allclose(logprobs.grad, expected)


def test_without_a_coefficient_entropy_stays_out_of_the_graph(micro_batch):
    objective = PolicyObjective(AlgorithmConfig())
    entropy = torch.ones(7, requires_grad=True)
    logprobs = torch.full((7,), -1.0, requires_grad=True)
    loss, metrics = objective(micro_batch, logprobs, entropy, BehaviorTerms(logprobs.detach()))
    loss.backward()
    assert entropy.grad is None
    assert float(metrics["entropy_sum"]) == 4.0


@pytest.mark.parametrize(("loss", "clipped"), [("gspo", 1.0), ("cispo", 0.0), ("ppo_clip", 0.0)])
def test_a_recipes_loss_has_its_papers_bounds(micro_batch, loss, clipped):
    """Ratios of 1.01 are inside PPO's bounds and outside GSPO's, which are about 700 times tighter."""
    recipe = Path(__file__).resolve().parents[3] / "examples" / "recipes" / "dapo_qwen2.5_32b.toml"
    objective = PolicyObjective(load_config(recipe, [f"algorithm.loss={loss}"]).config.algorithm)
    old = torch.full((7,), -1.0)
    batch = replace(micro_batch, advantages=torch.ones(7))
    _, metrics = objective(batch, old + math.log(1.01), torch.zeros(7), BehaviorTerms(old))
    assert float(metrics["clip_high_sum"] / metrics["num_tokens"]) == clipped


def test_the_generalized_kl_adds_both_terms_with_the_policy_loss_weights(micro_batch):
    generator = torch.Generator().manual_seed(3)
    old, new, mse, cross = (torch.rand(7, generator=generator) for _ in range(4))
    mse[0] = float("nan")  # masked
    section = GeneralizedKlConfig(coefficient=0.01, weighted_mse=2.0, cross_entropy=0.5)
    with_gkl = PolicyObjective(AlgorithmConfig(gkl=section))
    loss, metrics = with_gkl(micro_batch, -new, new, BehaviorTerms(-old), (mse, cross))
    plain, _ = PolicyObjective(AlgorithmConfig())(micro_batch, -new, new, BehaviorTerms(-old))
    trained = micro_batch.loss_mask > 0
    expected = plain + 0.25 * 0.01 * (2.0 * mse[trained] + 0.5 * cross[trained]).sum()
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    assert float(metrics["gkl_weighted_mse_sum"]) == pytest.approx(float(mse[trained].sum()))
    assert float(metrics["gkl_cross_entropy_sum"]) == pytest.approx(float(cross[trained].sum()))
