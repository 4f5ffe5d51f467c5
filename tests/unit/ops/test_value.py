"""Values of tokens against a plain product in fp64."""

from __future__ import annotations

import pytest
import torch

from megatron_dapo.ops.value import CHUNK_TOKENS, token_values


def inputs(num_tokens: int, dtype: torch.dtype, width: int = 24) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((num_tokens, width), (1, width), (1,))
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def exact(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, upstream: torch.Tensor) -> list[torch.Tensor]:
    """Values and gradients in fp64, without autograd."""
    hidden, weight, bias, upstream = (t.detach().double() for t in (hidden, weight, bias, upstream))
    values = (hidden * weight).sum(1) + bias
    return [values, upstream[:, None] * weight, (upstream[:, None] * hidden).sum(0, keepdim=True), upstream.sum()[None]]


@pytest.mark.parametrize("num_tokens", [0, 1, 33, CHUNK_TOKENS + 5])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 4e-3)]
)
def test_values_and_gradients_are_the_product_in_fp64(num_tokens, dtype, tolerance) -> None:
    leaves = inputs(num_tokens, dtype)
    values = token_values(*leaves)
    assert values.dtype == torch.promote_types(dtype, torch.float32)
    upstream = torch.rand(num_tokens, generator=torch.Generator().manual_seed(1)).to(values.dtype)
    values.backward(upstream)
    want = exact(*leaves, upstream)
    # Values are not rounded to the model's type; gradients have their leaf's.
    assert (values.double() - want[0]).norm() <= min(tolerance, 1e-6) * want[0].norm()
    for leaf, expected in zip(leaves, want[1:], strict=True):
        assert leaf.grad.dtype == dtype
        assert (leaf.grad.double() - expected).norm() <= tolerance * expected.norm()


def test_numerical_gradients() -> None:
    assert torch.autograd.gradcheck(token_values, inputs(5, torch.float64))
