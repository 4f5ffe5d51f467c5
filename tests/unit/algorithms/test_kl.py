from __future__ import annotations

import math

import pytest
import torch

from megatron_dapo.algorithms.kl import k3, kl_loss
from megatron_dapo.algorithms.objective import entropy_loss


def test_kl_loss_is_masked_and_reports_every_estimator():
    logprobs = torch.tensor([-1.0, -2.0, math.nan], dtype=torch.float64).requires_grad_()
    ref_logprobs = torch.tensor([-1.5, -1.0, -1.0], dtype=torch.float64)
    token_loss, metrics = kl_loss("k2", logprobs, ref_logprobs, torch.tensor([1.0, 1.0, 0.0]))
    assert token_loss.tolist() == [0.125, 0.5, 0.0]
    assert torch.autograd.grad(token_loss.sum(), logprobs)[0].tolist() == [0.5, -1.0, 0.0]
    assert float(metrics["kl_k1_sum"]) == -0.5
    assert float(metrics["kl_k2_sum"]) == 0.625
    assert float(metrics["kl_k3_sum"]) == pytest.approx(math.exp(-0.5) - 0.5 + math.e - 2)


def test_k3_keeps_its_digits_for_a_small_difference_in_fp32():
    value = k3(torch.tensor([-1e-4]), torch.tensor([0.0]))
    assert float(value) == pytest.approx(5e-9, rel=1e-2)


def test_k3_of_an_absurd_reference_is_finite():
    assert torch.isfinite(k3(torch.tensor([-1000.0]), torch.tensor([0.0]))).all()


def test_k1_is_refused_as_a_loss():
    zeros = torch.zeros(1)
    with pytest.raises(ValueError, match="zero mean"):
        kl_loss("k1", zeros, zeros, torch.ones(1))


def test_entropy_is_measured_with_coefficient_zero():
    entropy = torch.tensor([1.0, 3.0, math.nan])
    mask = torch.tensor([1.0, 1.0, 0.0])
    token_loss, metrics = entropy_loss(entropy, mask, 0.0)
    assert token_loss.tolist() == [0.0, 0.0, 0.0] and float(metrics["entropy_sum"]) == 4.0
    assert entropy_loss(entropy, mask, 0.5)[0].tolist() == [-0.5, -1.5, 0.0]
