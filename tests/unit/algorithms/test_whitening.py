from __future__ import annotations

import pytest
import torch

from megatron_dapo.algorithms.whitening import limited, moments, whiten


def drawn() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(60, generator=generator, dtype=torch.float64) * 3 + 5
    return values, (torch.rand(60, generator=generator) > 0.3).float()


@pytest.mark.parametrize("std", ["biased", "unbiased"])
def test_moments_of_parts_give_those_of_the_whole(std):
    values, mask = drawn()
    total = moments(values[:13], mask[:13]).combine(moments(values[13:], mask[13:]))
    counted = values[mask > 0]
    assert total.mean() == pytest.approx(float(counted.mean()))
    assert total.variance(std) == pytest.approx(float(counted.var(correction=int(std == "unbiased"))))


def test_whitening_in_shards_equals_whitening_the_whole():
    values, mask = drawn()
    total = moments(values, mask)
    parts = [whiten(values[s], mask[s], total.mean(), total.variance()) for s in (slice(0, 20), slice(20, 60))]
    actual = torch.cat(parts)
    counted = values[mask > 0]
    direct = (counted - counted.mean()) / counted.std(correction=0)
    torch.testing.assert_close(actual[mask > 0], direct, rtol=1e-9, atol=1e-9)
    assert float(actual[mask > 0].mean()) == pytest.approx(0, abs=1e-12)
    assert not actual[mask == 0].any()


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_no_spread_gives_the_values_back(num_tokens):
    values, mask = torch.full((6,), 0.1, dtype=torch.float64), (torch.arange(6) < num_tokens).float()
    total = moments(values, mask)
    for std in ("biased", "unbiased"):
        assert torch.equal(whiten(values, mask, total.mean(), total.variance(std)), values * mask)


def test_values_at_masked_tokens_do_not_matter():
    values, mask = drawn()
    dirty = values.masked_fill(mask == 0, torch.nan)
    total = moments(dirty, mask)
    assert torch.equal(
        whiten(dirty, mask, total.mean(), total.variance()), whiten(values, mask, total.mean(), total.variance())
    )


def test_limits():
    assert limited(torch.tensor([-20.0, 3.0, 11.0])).tolist() == [-10.0, 3.0, 10.0]
    with pytest.raises(ValueError, match="above 0"):
        limited(torch.ones(1), 0.0)
