"""The generalized KL against fp64 from all logits, the golden values, and the gradients it stands for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from lm_head_cases import make

from megatron_dapo.ops.divergence import vocab_parallel_divergence

GOLDEN = json.loads((Path(__file__).resolve().parents[2] / "golden" / "golden.json").read_text())["kl"]


def one_hot_model(logits: list[list[float]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and weight whose products are these logits."""
    table = torch.tensor(logits, dtype=torch.float64)
    return torch.eye(len(logits), dtype=torch.float64), table.T.contiguous()


def plain(logits: torch.Tensor, reference_logits: torch.Tensor, gamma: float, weigh_by: str):
    log_s, log_p = torch.log_softmax(logits, 1), torch.log_softmax(reference_logits, 1)
    q = torch.softmax(gamma * {"reference": log_p, "actor": log_s}[weigh_by].detach(), 1)
    d = log_p - log_s
    return 0.5 * ((q * d.square()).sum(1) - (q * d).sum(1).square()), -(log_p.exp() * log_s).sum(1)


@pytest.mark.parametrize("weigh_by", ["reference", "actor"])
@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("tiles", [(None, None), (7, 5)])
def test_values_and_gradients_against_all_logits_in_fp64(weigh_by, gamma, tiles) -> None:
    hidden, weight, _ = make(20, 16, 37, 48, scale=0.4)
    reference_hidden, reference_weight = hidden[:, :12] * 0.9, weight[:, :12] * 1.1
    upstream = torch.randn(2, 20, generator=torch.Generator().manual_seed(3))
    leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    found = vocab_parallel_divergence(
        *leaves,
        reference_hidden,
        reference_weight,
        vocab_size=37,
        gamma=gamma,
        weigh_by=weigh_by,
        temperature=0.8,
        chunk_tokens=tiles[0],
        chunk_columns=tiles[1],
    )
    (upstream[0] * found.weighted_mse + upstream[1] * found.cross_entropy).sum().backward()
    wide = hidden.double().requires_grad_(), weight.double().requires_grad_()
    reference = reference_hidden.double() @ reference_weight[:37].double().T / 0.8
    mse, cross = plain(wide[0] @ wide[1][:37].T / 0.8, reference, gamma, weigh_by)
    (upstream[0] * mse + upstream[1] * cross).sum().backward()
    torch.testing.assert_close(found.weighted_mse.double(), mse, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.cross_entropy.double(), cross, rtol=1e-5, atol=1e-5)
    for leaf, right in zip(leaves, wide, strict=True):
        torch.testing.assert_close(leaf.grad.double(), right.grad, rtol=1e-4, atol=2e-5)


def golden(gamma: float = 1.0, weigh_by: str = "reference"):
    hidden, weight = one_hot_model(GOLDEN["student_logits"])
    leaf = weight.requires_grad_()
    reference = one_hot_model(GOLDEN["teacher_logits"])
    return leaf, vocab_parallel_divergence(hidden, leaf, *reference, vocab_size=3, gamma=gamma, weigh_by=weigh_by)


@torch.no_grad()
def test_golden_values() -> None:
    check = GOLDEN["theorem1_grad_check"]
    _, found = golden()
    assert float(found.weighted_mse[0]) == pytest.approx(check["value_wMSE"], rel=1e-9)
    assert float(found.cross_entropy[0]) == pytest.approx(check["value_SCE"], rel=1e-9)
    assert float(found.weighted_mse.mean()) == pytest.approx(GOLDEN["gkl_batch_of_2"]["a1_b1_g1_T1"]["wmse"], rel=1e-9)
    assert float(found.cross_entropy.mean()) == pytest.approx(GOLDEN["gkl_batch_of_2"]["a1_b1_g1_T1"]["sce"], rel=1e-9)
    _, half = golden(gamma=0.5)
    per_sample = GOLDEN["wmse_normaliser"]["gamma=.5 mean of per-sample"]
    assert float(half.weighted_mse.mean()) == pytest.approx(per_sample, rel=1e-9)
    _, uniform = golden(gamma=0.0)
    assert float(uniform.weighted_mse.mean()) == pytest.approx(
        GOLDEN["gkl_batch_of_2"]["a1_b1_g0(uniform)"]["wmse"], rel=1e-9
    )


@torch.no_grad()
def test_golden_values_of_a_wider_vocabulary() -> None:
    case = GOLDEN["topk"]
    models = [one_hot_model(case[f"{name}_logits"]) for name in ("student", "teacher")]
    found = vocab_parallel_divergence(*models[0], *models[1], vocab_size=6, gamma=1.0, weigh_by="reference")
    assert float(found.weighted_mse[0]) == pytest.approx(case["wmse_full"], rel=1e-9)
    assert float(found.cross_entropy[0]) == pytest.approx(case["sce_full"], rel=1e-9)


def test_cross_entropy_has_the_gradient_of_the_forward_kl() -> None:
    leaf, found = golden()
    found.cross_entropy[0].backward()
    torch.testing.assert_close(
        leaf.grad[:, 0], torch.tensor(GOLDEN["kd_student_grad"]["KL"], dtype=torch.float64), rtol=0, atol=1e-8
    )


def test_weighted_mse_has_the_golden_gradient() -> None:
    leaf, found = golden()
    found.weighted_mse[0].backward()
    right = torch.tensor(GOLDEN["kd_student_grad"]["extra_wMSE"], dtype=torch.float64)
    torch.testing.assert_close(leaf.grad[:, 0], right, rtol=0, atol=1e-8)


def test_weighted_mse_under_the_actor_s_weights_has_the_gradient_of_the_reverse_kl() -> None:
    leaf, found = golden(weigh_by="actor")
    found.weighted_mse[0].backward()
    other = one_hot_model(GOLDEN["student_logits"])[1].requires_grad_()
    log_s = torch.log_softmax(other[:, 0], 0)
    log_p = torch.log_softmax(torch.tensor(GOLDEN["teacher_logits"][0], dtype=torch.float64), 0)
    (log_s.exp() * (log_s - log_p)).sum().backward()
    torch.testing.assert_close(leaf.grad[:, 0], other.grad[:, 0], rtol=1e-12, atol=1e-12)
    right = torch.tensor(GOLDEN["rl_reverse_kl_is_wmse_only"]["grad_reverse_KL"], dtype=torch.float64)
    torch.testing.assert_close(leaf.grad[:, 0], right, rtol=0, atol=1e-8)


def test_a_model_from_itself_has_no_divergence_and_no_gradient() -> None:
    hidden, weight, _ = make(9, scale=3.0)
    leaf = weight.clone().requires_grad_()
    found = vocab_parallel_divergence(hidden, leaf, hidden, weight, vocab_size=37, gamma=0.5)
    (found.weighted_mse + found.cross_entropy).sum().backward()
    assert not found.weighted_mse.any() and leaf.grad.abs().max() < 1e-6


def test_no_tokens() -> None:
    hidden, weight, _ = make(0)
    found = vocab_parallel_divergence(hidden, weight, hidden, weight, vocab_size=37)
    assert found.weighted_mse.shape == found.cross_entropy.shape == (0,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weigh_by": "teacher"}, "weigh_by 'teacher' is none of reference, actor"),
        ({"gamma": -0.5}, "gamma -0.5 must be at least 0"),
        ({"vocab_size": 99}, "vocab_size 99 is not in"),
    ],
)
def test_bad_settings_are_errors(change, message) -> None:
    hidden, weight, _ = make(4)
    with pytest.raises(ValueError, match=message):
        vocab_parallel_divergence(hidden, weight, hidden, weight, **({"vocab_size": 37} | change))


def test_models_of_different_vocabularies_are_an_error() -> None:
    hidden, weight, _ = make(4)
    with pytest.raises(ValueError, match="actor has 4 tokens and 37 rows, the reference 4 and 30"):
        vocab_parallel_divergence(hidden, weight, hidden, weight[:30], vocab_size=30)
