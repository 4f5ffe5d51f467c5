"""Experts as linear layers of their own: the same function, under the names of the checkpoint; and what ModelOpt makes of
them."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers.core_model_loading import revert_weight_conversion

from megatron_dapo.ops.fp8 import quantize_weight
from megatron_dapo.quantization import calibrate
from megatron_dapo.quantization.experts import SeparateExperts, separate_experts
from megatron_dapo.quantization.formats import FORMATS
from megatron_dapo.quantization.probe import compare, logprobs_of
from megatron_dapo.quantization.stored import ALGORITHMS, load_dequantized
from tests.unit.quantization.quantized_matrices import quantized_matrices

CPU = torch.device("cpu")
NUM_MATRICES = 2 * (4 + 3 * 4)  # a layer: attention, and gate, up and down of 4 experts


@pytest.fixture
def separated(expert_model):
    model = copy.deepcopy(expert_model)
    separate_experts(model)
    return model


def test_experts_by_themselves_are_the_same_function(expert_model, separated, samples) -> None:
    assert sum(isinstance(module, SeparateExperts) for module in separated.modules()) == 2
    found = compare(*([logprobs_of(model, sample) for sample in samples] for model in (expert_model, separated)))
    assert found.max_abs < 1e-6


def test_names_and_values_are_those_that_transformers_stores(expert_model, separated) -> None:
    stored = revert_weight_conversion(expert_model, expert_model.state_dict())
    ours = separated.state_dict()
    assert stored.keys() == ours.keys() and all(torch.equal(ours[name], stored[name]) for name in ours)


def test_a_dense_model_stays_as_it_is(model) -> None:
    names = [name for name, _ in model.named_parameters()]
    separate_experts(model)
    assert [name for name, _ in model.named_parameters()] == names


@pytest.fixture
def written(modelopt, separated, samples, tmp_path):
    """`written(format)`: the directory."""

    def write(name: str):
        quantized = copy.deepcopy(separated)
        calibrate.quantize_model(quantized, FORMATS[name], [sample.token_ids for sample in samples])
        calibrate.export(quantized, FORMATS[name], tmp_path / name)
        return tmp_path / name

    return write


@pytest.mark.parametrize("name", ["fp8", "fp8_blockwise"])
def test_every_expert_s_matrix_is_rounded_to_the_nearest(written, separated, name) -> None:
    stored = quantized_matrices(written(name))
    assert len(stored) == NUM_MATRICES
    for module, tensors in stored.items():
        weight = separated.get_submodule(module).weight
        if name == "fp8":
            right = (weight / tensors["weight_scale"]).to(torch.float8_e4m3fn)
            assert float(tensors["input_scale"]) > 0, module
        else:
            ours = quantize_weight(weight)
            right = ours.values
            assert torch.equal(tensors["weight_scale_inv"], ours.scales)
        assert torch.equal(tensors["weight"].float(), right.float()), module


def test_four_bits_give_every_expert_s_matrix_back(written, separated) -> None:
    """The scales of an expert's inputs lie beside its matrix, or in the norm that all experts and the router share."""
    directory = written("int4_awq")
    stored, widen = quantized_matrices(directory), ALGORITHMS["int4_awq"][0]
    experts = {name: tensors for name, tensors in stored.items() if ".experts." in name}
    assert len(experts) == NUM_MATRICES - 8
    for name, tensors in experts.items():
        exact = separated.get_submodule(name).weight
        assert float(((widen(tensors) - exact).norm() / exact.norm()).detach()) < 0.16, name


@pytest.mark.parametrize("name", ["fp8", "fp8_blockwise", "int4_awq"])
def test_what_is_read_back_is_the_model(written, expert_model, samples, name) -> None:
    read = load_dequantized(written(name), name, torch.float32, CPU)
    found = compare(*([logprobs_of(model, sample) for sample in samples] for model in (expert_model, read)))
    assert 1e-3 < found.mean_abs < 2 * FORMATS[name].tolerance.mean_abs
