"""ModelOpt's output against this package's rounding, ModelOpt's own simulation and transformers' reader."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from megatron_dapo.ops.fp8 import quantize_weight
from megatron_dapo.quantization import calibrate
from megatron_dapo.quantization.experts import separate_experts
from megatron_dapo.quantization.formats import FORMATS
from megatron_dapo.quantization.probe import compare, logprobs_of
from megatron_dapo.quantization.stored import ALGORITHMS, load_dequantized
from tests.unit.quantization.quantized_matrices import quantized_matrices

pytestmark = pytest.mark.usefixtures("modelopt")

CPU = torch.device("cpu")
# 2 layers: attention, and an MLP or gate, up and down of 4 experts.
NUM_MATRICES = {"model": 2 * (4 + 3), "expert_model": 2 * (4 + 3 * 4)}


class Written(NamedTuple):
    """What ModelOpt has written of a model."""

    before: Any  # the model, not quantized
    simulated: list[list[float]]  # log-probs of ModelOpt's simulation
    directory: Path
    matrices: dict[str, dict[str, torch.Tensor]]  # quantized ones


@pytest.fixture(params=["model", "expert_model"])
def written(request, samples, tmp_path):
    """`written(format)` of a dense model, and of one with experts."""

    def write(name: str) -> Written:
        model = request.getfixturevalue(request.param)
        separate_experts(model)
        before = copy.deepcopy(model)
        calibrate.quantize_model(model, FORMATS[name], [sample.token_ids for sample in samples])
        simulated = [logprobs_of(model, sample) for sample in samples]
        calibrate.export(model, FORMATS[name], tmp_path / name)
        matrices = quantized_matrices(tmp_path / name)
        assert len(matrices) == NUM_MATRICES[request.param]
        return Written(before, simulated, tmp_path / name, matrices)

    return write


@pytest.mark.parametrize("written", ["model"], indirect=True)
def test_one_scale_a_matrix_is_what_modelopt_simulates(written, samples) -> None:
    before, simulated, directory, _ = written("fp8")
    read = load_dequantized(directory, "fp8", torch.float32, CPU)
    found = compare(simulated, [logprobs_of(read, sample) for sample in samples])
    rounding = compare(simulated, [logprobs_of(before, sample) for sample in samples])
    # The rest are values next to a tie, which round to either side depending on division or multiplication.
    assert found.mean_abs < 0.05 * rounding.mean_abs


def test_one_scale_a_matrix_rounds_to_the_nearest(written) -> None:
    before, _, _, matrices = written("fp8")
    for name, tensors in matrices.items():
        nearest = (before.get_submodule(name).weight / tensors["weight_scale"]).to(torch.float8_e4m3fn)
        assert torch.equal(tensors["weight"].float(), nearest.float())
        # gate_proj and up_proj of an expert share the larger scale.
        assert ".experts." in name or float(tensors["weight"].float().abs().max()) == 448
        assert float(tensors["input_scale"]) > 0, name


def test_blocks_are_the_trainers_bit_for_bit(written) -> None:
    before, _, _, matrices = written("fp8_blockwise")
    for name, tensors in matrices.items():
        ours = quantize_weight(before.get_submodule(name).weight)
        assert torch.equal(tensors["weight"].float(), ours.values.float())
        assert torch.equal(tensors["weight_scale_inv"], ours.scales)


@pytest.mark.parametrize("written", ["model"], indirect=True)
def test_transformers_own_reader_sees_the_same_blocks(written) -> None:
    pytest.importorskip("accelerate", reason="transformers reads FP8 directories with accelerate only")
    directory = written("fp8_blockwise").directory
    theirs = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, quantization_config=FineGrainedFP8Config(dequantize=True)
    )
    ours = load_dequantized(directory, "fp8_blockwise", torch.float32, CPU)
    expected = dict(ours.named_parameters())
    for name, parameter in theirs.named_parameters():
        assert torch.equal(parameter, expected[name]), name


def test_four_bits_with_their_scaled_inputs_give_the_matrix_back(written) -> None:
    """Scales of inputs lie in the norm before their matrix if no other matrix reads it, otherwise next to the matrix."""
    before, _, directory, matrices = written("int4_awq")
    widen, read = ALGORITHMS["int4_awq"][0], load_dequantized(directory, "int4_awq", torch.float32, CPU)
    norms = {"q_proj": "input_layernorm", "k_proj": "input_layernorm", "v_proj": "input_layernorm"}
    norms |= {"gate_proj": "post_attention_layernorm", "up_proj": "post_attention_layernorm"}
    for name, tensors in matrices.items():
        layer, last = ".".join(name.split(".")[:3]), name.split(".")[-1]
        exact, found = before.get_submodule(name).weight, widen(tensors)
        if last in norms and ".experts." not in name:
            path = f"{layer}.{norms[last]}"
            exact, found = exact * before.get_submodule(path).weight, found * read.get_submodule(path).weight
        # Normal values in steps of their group's largest / 7.
        assert float(((found - exact).norm() / exact.norm()).detach()) < 0.16, name


@pytest.mark.parametrize("name", ["fp8", "fp8_blockwise", "int4_awq"])
def test_what_is_read_back_is_the_model(written, samples, name) -> None:
    before, _, directory, _ = written(name)
    read = load_dequantized(directory, name, torch.float32, CPU)
    found = compare(*([logprobs_of(model, sample) for sample in samples] for model in (before, read)))
    assert 1e-3 < found.mean_abs < 2 * FORMATS[name].tolerance.mean_abs


def test_nvfp4_packs_as_the_reader_unpacks() -> None:
    tensor = pytest.importorskip("modelopt.torch.quantization.qtensor.nvfp4_tensor").NVFP4QTensor
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    packed, scales, outer = tensor.quantize(weight, 16)
    tensors = {"weight": packed._quantized_data, "weight_scale": scales, "weight_scale_2": outer}
    widened = ALGORITHMS["nvfp4"][0](tensors)
    assert torch.allclose(widened, packed.dequantize(scale=scales, double_scale=outer, block_sizes={-1: 16}).float())
    assert float((widened - weight).norm() / weight.norm()) < 0.15


def test_without_modelopt_it_says_how_to_install_it(monkeypatch) -> None:
    def missing(name: str) -> str:
        raise calibrate.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(calibrate.importlib.metadata, "version", missing)
    with pytest.raises(ValueError, match="make .venv-modelopt"):
        calibrate.modelopt_version()
