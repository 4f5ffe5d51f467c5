"""Rounding to FP8 in blocks, against a search over all values of the format."""

from __future__ import annotations

import pytest
import torch

from megatron_dapo.ops.fp8 import quantize_hidden, quantize_weight


def e4m3_values() -> torch.Tensor:
    """All values of e4m3 from 0 up, from its definition: 4 bits of exponent with bias 7, 3 of mantissa, no infinity."""
    normal = [2.0 ** (e - 7) * (1 + m / 8) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)]
    return torch.tensor([m / 8 * 2.0**-6 for m in range(8)] + normal, dtype=torch.float64)


def nearest_by_search(values: torch.Tensor) -> torch.Tensor:
    grid = e4m3_values()
    return values.double().sign() * grid[(values.double().abs()[..., None] - grid).abs().argmin(-1)]


def test_hidden_states_are_rounded_to_the_nearest_of_the_format_under_a_scale_a_token_block() -> None:
    hidden = (
        torch.randn(5, 256, generator=torch.Generator().manual_seed(0))
        * torch.tensor([1e-6, 1e-2, 1, 77, 1e5])[:, None]
    )
    quantized = quantize_hidden(hidden)
    assert quantized.scales.shape == (5, 2)
    for token in range(5):
        for block in range(2):
            values, scale = hidden[token, block * 128 : block * 128 + 128], float(quantized.scales[token, block])
            multiplier = 1 / scale
            assert 2.0 ** round(torch.tensor(multiplier).log2().item()) == multiplier
            assert 224 < float(values.abs().max()) * multiplier <= 448
            right = nearest_by_search(values.double() * multiplier) * scale
            # Ties, of which random fp32 has none, apart.
            assert torch.equal(quantized.widened()[token, block * 128 : block * 128 + 128].double(), right)


def test_the_weight_has_a_scale_for_128_by_128() -> None:
    weight = torch.randn(256, 384, generator=torch.Generator().manual_seed(0))
    weight[130, 300] = 1000.0
    quantized = quantize_weight(weight)
    assert quantized.scales.shape == (2, 3)
    one, loud = quantized.scales[0, 0], quantized.scales[1, 2]
    assert loud / one == 2.0 ** round(float((loud / one).log2())) and loud > 100 * one
    block = weight[128:256, 256:384]
    right = nearest_by_search(block.double() / float(loud)) * float(loud)
    assert torch.equal(quantized.widened()[128:256, 256:384].double(), right)


def test_values_of_the_format_and_blocks_of_zeros_come_back_as_they_are() -> None:
    hidden = torch.zeros(2, 256)
    hidden[0, :120] = e4m3_values()[:120].float() * 2.0**-9
    hidden[0, 120] = 448 * 2.0**-9
    assert torch.equal(quantize_hidden(hidden).widened(), hidden)


@pytest.mark.parametrize("amax", [2.0**-126, 1e-30, 448.0, 449.0, 3e38])
def test_any_magnitude_fits(amax) -> None:
    quantized = quantize_hidden(torch.full((1, 128), amax))
    assert torch.isfinite(quantized.widened()).all()
    assert abs(float(quantized.widened()[0, 0]) - amax) <= 2**-4 * amax
