"""Widened products against those of float32 and float64, in a separate process: they replace torch's in all of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_dapo.ops import bf16_products
from megatron_dapo.ops.bf16_products import prepare_bf16

CHECKS = """
import torch
from torch.nn.functional import linear
from megatron_dapo.ops.bf16_products import widen_bf16_products

torch.manual_seed(0)
DTYPES = (torch.bfloat16, torch.float32, torch.float64)
sizes = {"x": (5, 7, 33), "w": (19, 33), "b": (19,), "left": (3, 4, 9), "right": (3, 9, 6), "sum": (3, 4, 6), "empty": (0, 33)}
exact = {name: torch.randn(size).bfloat16() for name, size in sizes.items()}


def results(dtype):
    t = {name: value.to(dtype).requires_grad_() for name, value in exact.items()}
    found = [
        linear(t["x"], t["w"], t["b"]), linear(t["x"], t["w"]), linear(t["empty"], t["w"]), t["x"][0] @ t["w"].t(),
        t["left"] @ t["right"], torch.baddbmm(t["sum"], t["left"], t["right"], beta=0.5, alpha=2.0),
        torch.addmm(t["b"], t["x"][0], t["w"].t(), alpha=0.5), torch.einsum("bij,bjk->bik", t["left"], t["right"]),
    ]
    gradients = torch.autograd.grad(sum(each.sum() for each in found), [t[name] for name in ("x", "w", "b", "left", "right", "sum")])
    return [*found, *gradients]


before = {dtype: results(dtype) for dtype in DTYPES}
integers = torch.arange(12).view(3, 4) @ torch.arange(8).view(4, 2)
widen_bf16_products()
after = {dtype: results(dtype) for dtype in DTYPES}
for dtype in DTYPES[1:]:
    assert all(torch.equal(new, old) for new, old in zip(after[dtype], before[dtype], strict=True)), dtype
assert torch.equal(torch.arange(12).view(3, 4) @ torch.arange(8).view(4, 2), integers)
for number, (narrow, wide) in enumerate(zip(after[torch.bfloat16], after[torch.float64], strict=True)):
    assert narrow.dtype == torch.bfloat16 and narrow.shape == wide.shape
    if number < 8:  # A product is rounded once, to 8 bits.
        torch.testing.assert_close(narrow.double(), wide, rtol=2.0**-8 + 1e-6, atol=1e-5)
    else:
        torch.testing.assert_close(narrow.double(), wide, rtol=0.02, atol=0.1)
try:
    exact["w"] @ torch.ones(33, 2)
except RuntimeError as error:
    assert "dtype" in str(error), error
else:
    raise AssertionError("operands of two types were multiplied")
"""


def test_products_are_those_of_float32_rounded_once() -> None:
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-W", "error", "-c", CHECKS], cwd=root, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("dtype", "device", "has_instructions", "widened"),
    [
        (torch.bfloat16, "cpu", False, 1),
        (torch.bfloat16, "cpu", True, 0),
        (torch.bfloat16, "cuda:0", False, 0),
        (torch.float32, "cpu", False, 0),
    ],
)
def test_only_bf16_models_on_cores_without_instructions_need_it(
    dtype: torch.dtype, device: str, has_instructions: bool, widened: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[None] = []
    monkeypatch.setattr(bf16_products, "multiplies_bf16", lambda: has_instructions)
    monkeypatch.setattr(bf16_products, "widen_bf16_products", lambda: calls.append(None))
    prepare_bf16(dtype, device)
    assert len(calls) == widened
