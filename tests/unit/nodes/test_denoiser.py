"""Denoisers: they remove noise and spikes, keep levels, and come back from JSON."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_dapo.nodes.denoiser import ANY_METRIC, Denoiser, from_json, reference_denoisers
from megatron_dapo.nodes.samples import METRICS, PUBLISHED_ORDER
from tools.make_node_models import fit, to_json

REFERENCE = reference_denoisers()


def waves(num: int = 400, noise: float = 0.0) -> np.ndarray:
    rng = np.random.default_rng(0)
    phases = rng.uniform(0, 2 * np.pi, (num, 1))
    return (0.5 + 0.3 * np.sin(phases + np.arange(8) / 3) + rng.normal(0, noise, (num, 8))).astype(np.float32)


def test_training_learns_a_pattern_and_repeats() -> None:
    _, first = fit(waves(), num_steps=1)
    trained, error = fit(waves(), num_steps=150)
    again, same = fit(waves(), num_steps=150)
    assert error < 0.5 * first and error == same
    assert all(torch.equal(left, right) for left, right in zip(trained.parameters(), again.parameters()))


def test_training_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    fit(waves(20), num_steps=1)
    assert torch.equal(torch.rand(3), expected)


def test_the_reference_keeps_levels_and_weakens_spikes() -> None:
    assert set(PUBLISHED_ORDER) < set(REFERENCE) and ANY_METRIC in REFERENCE
    levels = torch.linspace(0.05, 0.95, 10)[:, None].expand(10, 8).contiguous()
    for metric in METRICS:
        denoiser = REFERENCE.get(metric.name, REFERENCE[ANY_METRIC])
        found = denoiser.denoise(levels)
        assert (found.mean(1) - levels[:, 0]).abs().max() < 0.12, metric.name
        spiky = levels.clone()
        spiky[:, 3] = 1 - spiky[:, 3]
        assert (denoiser.denoise(spiky) - found).square().sum() < (spiky - levels).square().sum()


def test_any_shape_of_windows() -> None:
    batch = torch.rand(2, 5, 8)
    model = Denoiser()
    assert torch.allclose(model.denoise(batch)[1, 2], model.denoise(batch[1, 2]), atol=1e-6)


def test_json_keeps_what_a_denoiser_does() -> None:
    model = Denoiser().eval()
    batch = torch.from_numpy(waves(10))
    found = from_json(to_json({"one": model}, {"data": "none"}))["one"]
    assert torch.allclose(found.denoise(batch), model.denoise(batch), atol=1e-4)


@pytest.mark.parametrize("text", ["", "{}", '{"models": {"one": {"output.bias": [1]}}}', '{"models": {"one": 3}}'])
def test_other_texts_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(ValueError, match="make them with tools/make_node_models.py") as caught:
        from_json(text)
    assert "\n" not in str(caught.value)


def test_bad_windows_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 rows"):
        fit(waves(1), num_steps=1)
    with pytest.raises(ValueError, match="NaN"):
        fit(np.full((4, 8), np.nan, np.float32), num_steps=1)
