"""The emulated linear layer against the products written out, with rounding by a search over all values of e4m3."""

from __future__ import annotations

import pytest
import torch
from fp8_bounds import rounded, rounding_bound

from megatron_dapo.ops.fp8 import blockwise_linear, blockwise_linear_padded, quantize_hidden, quantize_weight


@pytest.fixture
def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(256, 128, generator=generator) * 10.0 ** torch.randint(-3, 2, (256, 1), generator=generator)
    weight = torch.randn(256, 128, generator=generator) * 0.05
    gradient = torch.randn(256, 256, generator=generator) * 10.0 ** torch.randint(-6, 0, (256, 1), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), gradient


def close(found: torch.Tensor, want: torch.Tensor) -> None:
    assert float((found.detach() - want).norm() / want.norm()) < 1e-6


def test_the_three_products_are_those_of_the_rounded_values(inputs) -> None:
    hidden, weight, gradient = inputs
    output = blockwise_linear(hidden, weight)
    output.backward(gradient)
    h, w = hidden.detach(), weight.detach()
    close(output, rounded(h, 1, 128) @ rounded(w, 128, 128).T)
    close(hidden.grad, rounded(gradient, 1, 128) @ rounded(w, 128, 128))
    close(weight.grad, rounded(gradient, 128, 1).T @ rounded(h, 128, 1))
    exact = h.double() @ w.double().T
    assert 1e-3 < float((output - exact).norm() / exact.norm()) < 0.1


def test_errors_are_within_the_bound_of_the_format(inputs) -> None:
    h, w = (part.detach() for part in inputs[:2])
    of_h, of_w = rounding_bound(h, quantize_hidden(h)), rounding_bound(w, quantize_weight(w))
    bound = of_h @ w.double().abs().T + h.double().abs() @ of_w.T + of_h @ of_w.T
    error = (blockwise_linear(h, w).double() - h.double() @ w.double().T).abs()
    share = error / bound
    assert 0.05 < share.max() <= 1.0


def test_other_tokens_change_nothing(inputs) -> None:
    hidden, weight, _ = inputs
    alone = blockwise_linear(hidden[:128], weight)
    loud = torch.cat((hidden[:128], 1e4 * hidden[128:]))
    torch.testing.assert_close(blockwise_linear(loud, weight)[:128], alone, rtol=0, atol=1e-6)


def test_tokens_without_gradient_add_nothing_to_the_weight(inputs) -> None:
    hidden, weight, gradient = inputs
    h = torch.cat((hidden.detach()[:128], torch.zeros(128, 128)))
    found = []
    for rows in (128, 256):
        own = weight.detach().clone().requires_grad_()
        blockwise_linear(h[:rows], own).backward(torch.cat((gradient[:128], torch.zeros(128, 256)))[:rows])
        found.append(own.grad)
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-12)


def test_types_are_those_of_the_inputs(inputs) -> None:
    hidden, weight, gradient = (part.detach().bfloat16() for part in inputs)
    hidden.requires_grad_()
    weight.requires_grad_()
    output = blockwise_linear(hidden, weight)
    output.backward(gradient)
    assert output.dtype == hidden.grad.dtype == weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((127, 128, 128), "127 tokens on this rank are no multiple of 128"),
        ((128, 64, 128), "64 inputs on this rank are no multiple of 128"),
        ((128, 128, 200), "200 outputs on this rank are no multiple of 16"),
    ],
)
def test_sizes_without_whole_blocks_are_errors_that_name_them(sizes: tuple[int, int, int], words: str) -> None:
    tokens, inputs, outputs = sizes
    with pytest.raises(ValueError, match=words):
        blockwise_linear(torch.ones(tokens, inputs), torch.ones(outputs, inputs))


@pytest.mark.parametrize("num_outputs", [16, 192])
def test_the_last_block_of_outputs_may_be_smaller(inputs, num_outputs: int) -> None:
    hidden, (w, g) = inputs[0], (part.detach() for part in inputs[1:])
    weight, gradient = w[:num_outputs].requires_grad_(), g[:, :num_outputs]
    output, h = blockwise_linear(hidden, weight), hidden.detach()
    output.backward(gradient)
    close(output, rounded(h, 1, 128) @ rounded(weight.detach(), 128, 128).T)
    close(hidden.grad, rounded(gradient, 1, 128) @ rounded(weight.detach(), 128, 128))
    close(weight.grad, rounded(gradient, 128, 1).T @ rounded(h, 128, 1))


def test_no_token() -> None:
    assert blockwise_linear(torch.ones(0, 128), torch.ones(128, 128)).shape == (0, 128)


@pytest.mark.parametrize("num_tokens", [1, 16, 127, 128, 200])
def test_any_number_of_tokens_gives_the_products_of_those_tokens(inputs, num_tokens: int) -> None:
    """The last block of tokens is the shorter one that is there: the oracle knows no padding."""
    hidden, weight, gradient = inputs
    h, w, g = hidden.detach()[:num_tokens].requires_grad_(), weight.detach(), gradient[:num_tokens]
    output = blockwise_linear_padded(h, weight)
    output.backward(g)
    close(output, rounded(h.detach(), 1, 128) @ rounded(w, 128, 128).T)
    close(h.grad, rounded(g, 1, 128) @ rounded(w, 128, 128))
    close(weight.grad, rounded(g, 128, 1).T @ rounded(h.detach(), 128, 1))


def test_an_expert_without_tokens_has_a_gradient_of_zeros(inputs) -> None:
    weight = inputs[1]
    output = blockwise_linear_padded(torch.ones(0, 128), weight)
    output.sum().backward()
    assert output.shape == (0, 256) and torch.equal(weight.grad, torch.zeros(256, 128))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nonfinite_values_stay_visible_in_their_row_alone(bad: float) -> None:
    hidden = torch.ones(128, 128)
    hidden[5, 7] = bad
    finite = torch.isfinite(blockwise_linear(hidden, torch.ones(128, 128))).all(1)
    assert not finite[5] and finite.sum() == 127


def test_a_gradient_that_is_not_finite_reaches_the_weight(inputs) -> None:
    hidden, weight, gradient = inputs
    gradient[3, 9] = float("inf")
    blockwise_linear(hidden, weight).backward(gradient)
    assert not torch.isfinite(weight.grad[9]).any() and torch.isfinite(weight.grad[:9]).all()
    assert not torch.isfinite(hidden.grad[3]).any() and torch.isfinite(hidden.grad[4:]).all()
