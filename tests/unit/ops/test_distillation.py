"""The divergence from a teacher against fp64 from all logits: values and gradients of the three kinds, in any tiles."""

from __future__ import annotations

import math

import pytest
import torch
from lm_head_cases import make

from megatron_dapo.ops.distillation import DIVERGENCES, vocab_parallel_distillation

BETA = 0.3


def plain(logits: torch.Tensor, teacher_logits: torch.Tensor, divergence: str, beta: float) -> torch.Tensor:
    """From the definitions, by autograd."""
    log_s, log_p = torch.log_softmax(logits, 1), torch.log_softmax(teacher_logits, 1)
    if divergence == "forward":
        return (log_p.exp() * (log_p - log_s)).sum(1)
    if divergence == "reverse":
        return (log_s.exp() * (log_s - log_p)).sum(1)
    log_m = torch.logaddexp(log_p + math.log(beta), log_s + math.log(1 - beta))
    return beta * (log_p.exp() * (log_p - log_m)).sum(1) + (1 - beta) * (log_s.exp() * (log_s - log_m)).sum(1)


def both(divergence: str, dtype: torch.dtype, tiles=(None, None), scale: float = 0.4, vocab_size: int = 37, temperature=1.0):
    """Return (value, gradients of hidden and weight) of the tiled pass in `dtype`, and of all logits in fp64."""
    hidden, weight, _ = make(20, 16, vocab_size, 48, scale=scale, dtype=dtype)
    teacher = hidden[:, :12] * 0.9, weight[:, :12] * 1.1
    # The last tokens are masked: their upstream gradient is 0.
    upstream = torch.randn(20, generator=torch.Generator().manual_seed(3)).where(torch.arange(20) < 15, 0.0)
    leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    found = vocab_parallel_distillation(
        *leaves,
        *teacher,
        vocab_size=vocab_size,
        divergence=divergence,
        beta=BETA,
        temperature=temperature,
        chunk_tokens=tiles[0],
        chunk_columns=tiles[1],
    )
    (upstream * found).sum().backward()
    wide = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logits = wide[0] @ wide[1][:vocab_size].T / temperature
    teacher_logits = teacher[0].double() @ teacher[1][:vocab_size].double().T / temperature
    right = plain(logits, teacher_logits, divergence, BETA)
    (upstream * right).sum().backward()
    return (found, *(leaf.grad for leaf in leaves)), (right, *(leaf.grad for leaf in wide))


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("tiles", [(None, None), (7, 5), (20, 1), (1, 48)])
@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_values_and_gradients_against_all_logits(divergence, tiles, temperature) -> None:
    for ours, right in zip(*both(divergence, torch.float64, tiles, temperature=temperature), strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-10, atol=1e-12)
    for ours, right in zip(*both(divergence, torch.float32, tiles, temperature=temperature), strict=True):
        torch.testing.assert_close(ours.double(), right, rtol=1e-4, atol=5e-6)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_far_apart_distributions_stay_finite(divergence) -> None:
    # Log-ratios of hundreds of nats: no overflow, no NaN, and still the right gradients.
    for ours, right in zip(*both(divergence, torch.float32, (8, 5), scale=8.0), strict=True):
        torch.testing.assert_close(ours.double(), right, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_a_model_is_at_distance_zero_from_itself(divergence) -> None:
    hidden, weight, _ = make(20, 16, 37, 48, scale=0.4)
    leaf = hidden.clone().requires_grad_()
    found = vocab_parallel_distillation(leaf, weight, hidden, weight, vocab_size=37, divergence=divergence)
    found.sum().backward()
    assert 0 <= float(found.detach().max()) < 1e-6
    assert float(leaf.grad.abs().max()) < 1e-6


def test_no_gradient_flows_into_the_teacher_or_to_padding_rows() -> None:
    hidden, weight, _ = make(20, 16, 37, 48, scale=0.4)
    leaves = [tensor.clone().requires_grad_() for tensor in (hidden, weight, hidden, weight)]
    vocab_parallel_distillation(*leaves, vocab_size=37).sum().backward()
    assert leaves[2].grad is None and leaves[3].grad is None
    assert not leaves[1].grad[37:].any()


def test_an_empty_batch_has_no_divergence() -> None:
    hidden, weight, _ = make(0, 16, 37, 48)
    leaf = weight.clone().requires_grad_()
    found = vocab_parallel_distillation(hidden, leaf, hidden, weight, vocab_size=37, divergence="js")
    found.sum().backward()
    assert found.shape == (0,) and not leaf.grad.any()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"divergence": "sideways"}, "'sideways' is none of forward, reverse, js"),
        ({"divergence": "js", "beta": 1.0}, "beta 1.0 must be above 0 and below 1"),
        ({"temperature": 0.0}, "temperature 0.0 must be positive"),
        ({"chunk_columns": 0}, "chunk_columns 0 must be at least 1"),
    ],
)
def test_bad_arguments(change, words) -> None:
    hidden, weight, _ = make(4, 16, 37, 48)
    with pytest.raises(ValueError, match=words):
        vocab_parallel_distillation(hidden, weight, hidden, weight, **({"vocab_size": 37} | change))
