"""Experts as separate linear layers: the same function, under the names of the checkpoint."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers.core_model_loading import revert_weight_conversion

from megatron_dapo.quantization.experts import SeparateExperts, separate_experts
from megatron_dapo.quantization.probe import compare, logprobs_of

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
