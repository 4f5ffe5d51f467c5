"""The oracle's own formulas against hand-made values and finite differences."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_dapo.proof import oracle
from megatron_dapo.proof.cases import ProofBatch, make_batch
from megatron_dapo.proof.losses import PROOF_LOSSES, ppo_clip

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "golden.json").read_text())["loss"]["loss_aggregation"]
VALUES = {
    "token_mean": "token_mean_global (DAPO/blog GA-level): sum/total_tokens",
    "sample_mean": "sample_mean (GRPO/VAPO-vanilla): mean_i(sum_i/len_i)",
    "per_group": "per_group_eq8 then mean over prompts: E_q[1/sum_i|o_i| sum]",
    "seq_sum_mean": "sequence_sum_mean: mean_i sum_i",
}


@pytest.mark.parametrize("mode", VALUES)
def test_weights_give_the_golden_losses(mode) -> None:
    weights = oracle.WEIGHTS[mode](GOLDEN["lengths"], [0, 0, 1, 1])
    assert sum(w * s for w, s in zip(weights, GOLDEN["sums"], strict=True)) == pytest.approx(
        GOLDEN[VALUES[mode]], rel=1e-9
    )


def test_dr_grpo_divides_by_a_constant() -> None:
    weights = oracle.WEIGHTS["dr_grpo"](GOLDEN["lengths"], [0, 0, 1, 1])
    value = sum(w * s for w, s in zip(weights, GOLDEN["sums"], strict=True))
    assert value == pytest.approx(GOLDEN["dr_grpo const L=8: sum/(N*8)"] * 8 / oracle.MAX_RESPONSE_TOKENS, rel=1e-9)


def test_token_losses_by_hand() -> None:
    ratios = torch.tensor([0.5, 0.9, 1.25, 1.35, 3.1, 0.5, 0.9, 1.35, 3.1], dtype=torch.float64)
    advantages = torch.tensor([1.0, 1, 1, 1, 1, -1, -1, -1, -1])
    logprobs = ratios.log().requires_grad_()
    losses = ppo_clip(logprobs, torch.zeros(9, dtype=torch.float64), advantages.double(), torch.ones(9))
    expected = [-0.5, -0.9, -1.25, -1.28, -1.28, 0.8, 0.9, 1.35, 3.0]
    torch.testing.assert_close(losses.detach(), torch.tensor(expected, dtype=torch.float64))
    losses.sum().backward()
    torch.testing.assert_close(
        logprobs.grad, torch.tensor([-0.5, -0.9, -1.25, 0, 0, 0, 0.9, 1.35, 0], dtype=torch.float64)
    )


def test_answer_has_the_chosen_ratios_and_the_gradient_of_its_loss() -> None:
    model = oracle.make_model()
    whole = make_batch(oracle.MODEL_FIELDS["vocab_size"])
    batch = ProofBatch(whole.samples[:4], whole.ratios[:4])
    samples, answers = oracle.solve(model, batch, PROOF_LOSSES["ppo_clip"])
    for sample, ratios in zip(samples, batch.ratios, strict=True):
        ours = (oracle._response_logprobs(model, sample).detach() - sample.rollout_logprobs.double()).exp()
        torch.testing.assert_close(ours, ratios, rtol=1e-5, atol=1e-5)

    def loss(mode: str) -> float:
        with torch.no_grad():
            parts = [
                ppo_clip(
                    oracle._response_logprobs(model, sample),
                    sample.rollout_logprobs.double(),
                    sample.advantages.double(),
                    sample.loss_mask,
                )
                * sample.loss_mask
                for sample in samples
            ]
        lengths = [int(sample.loss_mask.sum()) for sample in samples]
        weights = oracle.WEIGHTS[mode](lengths, [sample.group_index for sample in samples])
        return float(sum(w * part.sum() for w, part in zip(weights, parts, strict=True)))

    name, parameter = next((n, p) for n, p in model.named_parameters() if n.endswith("layers.1.mlp.down_proj.weight"))
    direction = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for mode, answer in answers.items():
        assert answer.loss == pytest.approx(loss(mode), rel=1e-9)
        values = []
        for sign in (1, -1):
            parameter.data.add_(direction, alpha=sign * 1e-6)
            values.append(loss(mode))
            parameter.data.sub_(direction, alpha=sign * 1e-6)
        slope = float((answer.gradients[name] * direction).sum())
        assert (values[0] - values[1]) / 2e-6 == pytest.approx(slope, rel=1e-5, abs=1e-9)


def test_masked_tokens_do_not_affect_the_result() -> None:
    model = oracle.make_model()
    whole = make_batch(oracle.MODEL_FIELDS["vocab_size"])
    batch = ProofBatch(whole.samples[1:2], whole.ratios[1:2])
    sample = batch.samples[0]
    assert sample.loss_mask.min() == 0
    changed = replace(sample, advantages=sample.advantages + 5 * (1 - sample.loss_mask))
    first, second = (
        oracle.solve(model, ProofBatch((one,), batch.ratios), PROOF_LOSSES["ppo_clip"])[1]["token_mean"] for one in (sample, changed)
    )
    assert first.loss == second.loss
    assert all(torch.equal(first.gradients[name], second.gradients[name]) for name in first.gradients)
