"""The formats' definitions, against brute force over all values of the small types."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from megatron_dapo.quantization.probe import compare, logprobs_of
from megatron_dapo.quantization.stored import (
    ALGORITHMS,
    E2M1,
    load_dequantized,
    round_to_e2m1,
    unpack_nibbles,
)


def test_e2m1_rounds_to_the_nearest_and_ties_to_even() -> None:
    values = torch.arange(-900, 901, dtype=torch.float64) / 128  # every tie is among them
    for value, found in zip(values.tolist(), round_to_e2m1(values.float()).tolist(), strict=True):
        nearest = min(range(8), key=lambda code: (abs(abs(value) - float(E2M1[code])), code % 2))
        assert abs(found) == float(E2M1[nearest]), value
        assert found == 0 or (found < 0) == (value < 0)


def test_nibbles() -> None:
    assert unpack_nibbles(torch.tensor([0x21, 0xF8], dtype=torch.uint8)).tolist() == [[1, 2], [8, 15]]


def test_four_bit_integers() -> None:
    """Rows 0 and 1 share bytes; -8 to 7; a scale for 128 of a row; scaled inputs."""
    integers = torch.randint(-8, 8, (4, 256), generator=torch.Generator().manual_seed(0))
    low, high = integers[0::2] & 0xF, integers[1::2] & 0xF
    scales, inputs = torch.rand(4, 2) + 0.5, torch.rand(256) + 0.5
    tensors = {"weight": (low | (high << 4)).to(torch.uint8), "weight_scale": scales, "pre_quant_scale": inputs}
    widened = ALGORITHMS["int4_awq"][0](tensors)
    for row, column in ((0, 0), (1, 127), (2, 128), (3, 255)):
        expected = int(integers[row, column]) * float(scales[row, column // 128]) * float(inputs[column])
        assert float(widened[row, column]) == pytest.approx(expected, rel=1e-6)


def test_nvfp4_weights_and_inputs() -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (3, 64), generator=generator)
    scales = (torch.rand(3, 4, generator=generator) * 400).to(torch.float8_e4m3fn)
    tensors = {
        "weight": (codes[:, 0::2] | (codes[:, 1::2] << 4)).to(torch.uint8),
        "weight_scale": scales,
        "weight_scale_2": torch.tensor(0.01),
        "input_scale": torch.tensor(0.002),
    }
    widen, round_inputs = ALGORITHMS["nvfp4"]
    widened = widen(tensors)
    for row, column in ((0, 0), (1, 17), (2, 63)):
        expected = float(E2M1[codes[row, column]]) * float(scales[row, column // 16].float()) * 0.01
        assert float(widened[row, column]) == pytest.approx(expected, rel=1e-6)
    inputs = torch.randn(5, 64, generator=generator)
    rounded = round_inputs(inputs, tensors)
    amax = inputs.unflatten(1, (-1, 16)).abs().amax(2).repeat_interleave(16, 1)
    # Half of e2m1's widest step, 1/6 of the block's largest, and what rounding the scale to e4m3 adds.
    assert ((rounded - inputs).abs() <= amax * (1 / 6 + 1 / 16)).all() and not torch.equal(rounded, inputs)


def _store_fp8(model, directory, change=lambda tensors: None) -> None:
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        base = name.removesuffix("weight")
        scale = tensors[name].abs().max() / 448
        tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
        tensors |= {base + "weight_scale": scale, base + "input_scale": torch.tensor(0.05)}
    change(tensors)
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict() | {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")


def test_a_directory_is_the_model_of_its_stored_numbers(model, samples, tmp_path) -> None:
    _store_fp8(model, tmp_path / "fp8")
    read = load_dequantized(tmp_path / "fp8", "fp8", torch.float32, torch.device("cpu"))
    found = compare([logprobs_of(model, s) for s in samples], [logprobs_of(read, s) for s in samples])
    assert 1e-4 < found.mean_abs < 0.2  # rounded, and by no more than rounding does
    weight = model.model.layers[1].mlp.up_proj.weight
    assert ((read.model.layers[1].mlp.up_proj.weight - weight).abs() <= 2**-4 * weight.abs() + 1e-4).all()
    assert torch.equal(read.model.layers[0].self_attn.q_proj.bias, model.model.layers[0].self_attn.q_proj.bias)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "1 tensors are missing, first model.norm.weight"),
        (lambda tensors: tensors.update({"model.other.weight": torch.zeros(2)}), "no module model.other"),
        (lambda tensors: tensors.update({"lm_head.weight": torch.zeros(3, 256)}), r"lm_head.weight is \(3, 256\)"),
    ],
)
def test_a_directory_that_does_not_fit_is_refused(model, tmp_path, change, what) -> None:
    _store_fp8(model, tmp_path / "fp8", change)
    with pytest.raises(ValueError, match=what):
        load_dequantized(tmp_path / "fp8", "fp8", torch.float32, torch.device("cpu"))
