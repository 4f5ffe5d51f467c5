"""Log-probs and entropy against log_softmax in fp64."""

from __future__ import annotations

import pytest
import torch

from megatron_dapo.ops.logprob import vocab_parallel_logprobs


def naive(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = torch.log_softmax(hidden.double() @ weight[:vocab_size].double().T / temperature, dim=-1)
    return log_p.gather(1, targets[:, None])[:, 0], -torch.special.xlogy(log_p.exp(), log_p.exp()).sum(-1)


def make(
    num_tokens: int, width: int = 16, vocab_size: int = 37, rows: int | None = None, scale: float = 1.0, seed: int = 0
):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, width, generator=generator)
    weight = torch.randn(rows or vocab_size, width, generator=generator) * scale
    targets = torch.randint(0, vocab_size, (num_tokens,), generator=generator)
    return hidden, weight, targets


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 33])
@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.0, 10.0])
@pytest.mark.parametrize(("vocab_size", "rows"), [(1, 1), (37, 37), (101, 128), (127, 256)])
def test_values_and_gradients_match_log_softmax_in_fp64(num_tokens, temperature, vocab_size, rows) -> None:
    hidden, weight, targets = make(num_tokens, vocab_size=vocab_size, rows=rows)
    upstream = torch.randn(2, num_tokens, generator=torch.Generator().manual_seed(1))
    grads = []
    for function, dtype in ((vocab_parallel_logprobs, torch.float32), (naive, torch.float64)):
        leaves = [tensor.to(dtype, copy=True).requires_grad_() for tensor in (hidden, weight)]
        logprobs, entropy = function(*leaves, targets, temperature=temperature, vocab_size=vocab_size)
        (upstream[0] * logprobs + upstream[1] * entropy).sum().backward()
        grads.append([logprobs.detach(), entropy.detach(), leaves[0].grad, leaves[1].grad])
    for ours, exact in zip(*grads, strict=True):
        torch.testing.assert_close(ours.double(), exact.double(), rtol=2e-5, atol=2e-5 / min(temperature, 1.0))
    assert torch.equal(grads[0][3][vocab_size:], torch.zeros(rows - vocab_size, 16))


@pytest.mark.parametrize("upstream", [(1.0, 0.0), (0.0, 1.0), (0.7, -0.3)])
def test_gradcheck_in_fp64(upstream) -> None:
    hidden, weight, targets = make(5, width=4, vocab_size=7, rows=9)
    leaves = hidden.double().requires_grad_(), weight.double().requires_grad_()

    def weighted(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        outputs = vocab_parallel_logprobs(hidden, weight, targets, temperature=0.8, vocab_size=7, chunk_tokens=2)
        return sum(factor * output for factor, output in zip(upstream, outputs, strict=True) if factor)

    assert torch.autograd.gradcheck(weighted, leaves)


@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_extreme_logits_stay_finite_and_exact(offset) -> None:
    # One-hot hidden states make the logits the entries of `weight`, exact in fp32.
    weight = torch.tensor([[offset], [offset - 1.0], [offset - 2e4], [offset - 0.5]])
    hidden = torch.ones(4, 1, requires_grad=True)
    logprobs, entropy = vocab_parallel_logprobs(hidden, weight, torch.arange(4), vocab_size=4)
    exact, exact_entropy = naive(hidden.detach(), weight, torch.arange(4), 1.0, 4)
    torch.testing.assert_close(logprobs.detach().double(), exact, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entropy.detach().double(), exact_entropy, rtol=1e-6, atol=1e-6)
    (logprobs + entropy).sum().backward()
    assert torch.isfinite(hidden.grad).all()


def test_values_never_mean_a_probability_above_one_nor_a_negative_entropy() -> None:
    hidden, weight, _ = make(4096, vocab_size=11, scale=8.0)
    targets = (hidden @ weight.T).argmax(1)
    logprobs, entropy = vocab_parallel_logprobs(hidden, weight, targets, vocab_size=11)
    assert logprobs.max() <= 0.0 and entropy.min() >= 0.0


@pytest.mark.parametrize("chunk_tokens", [1, 7, 64, 1000, None])
def test_result_does_not_depend_on_the_chunk(chunk_tokens) -> None:
    hidden, weight, targets = make(100, vocab_size=61)
    results = []
    for chunk in (100, chunk_tokens):
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        outputs = vocab_parallel_logprobs(*leaves, targets, temperature=0.9, vocab_size=61, chunk_tokens=chunk)
        (outputs[0] * hidden[:, 0] + 0.1 * outputs[1]).sum().backward()
        results.append([*(output.detach() for output in outputs), leaves[0].grad, leaves[1].grad])
    for whole, chunked in zip(*results, strict=True):
        assert (whole - chunked).abs().max() <= 1e-6 * whole.abs().max().clamp(min=1.0)


def test_bf16_inputs_are_summed_in_fp32() -> None:
    hidden, weight, targets = make(50, width=64, vocab_size=301, scale=0.2)
    hidden, weight = hidden.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_()
    logprobs, entropy = vocab_parallel_logprobs(hidden, weight, targets, vocab_size=301, chunk_tokens=8)
    assert logprobs.dtype == entropy.dtype == torch.float32
    wide = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    exact, exact_entropy = naive(*wide, targets, 1.0, 301)
    torch.testing.assert_close(logprobs.detach().double(), exact.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.detach().double(), exact_entropy.detach(), rtol=1e-5, atol=1e-5)
    (logprobs - entropy).sum().backward()
    (exact - exact_entropy).sum().backward()
    assert weight.grad.dtype == torch.bfloat16
    # The only rounding left is the last one to bf16, half a unit in the last of 8 bits; accumulating in bf16 would show
    # over 7 chunks.
    torch.testing.assert_close(weight.grad.double(), wide[1].grad, rtol=2**-8, atol=1e-5)
    torch.testing.assert_close(hidden.grad.double(), wide[0].grad, rtol=2**-8, atol=1e-5)


def test_output_without_use_gets_no_gradient_and_frozen_inputs_none() -> None:
    hidden, weight, targets = make(10)
    hidden.requires_grad_()
    _, entropy = vocab_parallel_logprobs(hidden, weight, targets, vocab_size=37)
    entropy.sum().backward()
    only_entropy = hidden.grad.clone()
    assert weight.grad is None
    oracle = hidden.detach().double().requires_grad_()
    naive(oracle, weight, targets, 1.0, 37)[1].sum().backward()
    torch.testing.assert_close(only_entropy.double(), oracle.grad, rtol=1e-5, atol=1e-5)


def test_nothing_as_large_as_the_logits_is_allocated() -> None:
    hidden, weight, targets = make(2048, width=8, vocab_size=500)
    hidden.requires_grad_(), weight.requires_grad_()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        logprobs, entropy = vocab_parallel_logprobs(hidden, weight, targets, vocab_size=500, chunk_tokens=64)
        (logprobs + entropy).sum().backward()
    largest = max(event.self_cpu_memory_usage / max(event.count, 1) for event in profile.key_averages())
    assert 0 < largest < 2048 * 500 * 4 / 8, f"one allocation of {largest} bytes"


@pytest.mark.parametrize("bad", [-1, 37, 40])
def test_target_outside_the_vocabulary_is_an_error(bad) -> None:
    hidden, weight, targets = make(4, rows=48)
    targets[2] = bad
    with pytest.raises(ValueError, match=rf"targets span .*{bad}.*outside the vocabulary \[0, 37\)"):
        vocab_parallel_logprobs(hidden, weight, targets, vocab_size=37)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "temperature 0.0 must be positive"),
        ({"vocab_size": 38}, "vocab_size 38 is not in"),
        ({"chunk_tokens": 0}, "chunk_tokens 0"),
    ],
)
def test_bad_settings_are_errors(change, message) -> None:
    hidden, weight, targets = make(4)
    with pytest.raises(ValueError, match=message):
        vocab_parallel_logprobs(hidden, weight, targets, **({"vocab_size": 37} | change))


def test_shapes_that_do_not_fit_are_errors() -> None:
    hidden, weight, targets = make(4)
    with pytest.raises(ValueError, match=r"hidden \(4, 16\).*targets \(3,\) do not fit"):
        vocab_parallel_logprobs(hidden, weight, targets[:3], vocab_size=37)
