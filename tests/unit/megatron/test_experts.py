"""The router bit for bit against transformers' own, and what a mixture needs of a layout."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from megatron_dapo.megatron.experts import SoftmaxFirstRouter
from megatron_dapo.megatron.model_config import ModelSettings, transformer_config
from megatron_dapo.models.architecture import ModelArchitecture
from megatron_dapo.models.config_json import parse_architecture
from megatron_dapo.parallel.layout import ParallelLayout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normalize", [True, False])
def test_weights_and_choices_are_those_of_transformers(normalize: bool, dtype: torch.dtype) -> None:
    """Large logits too, whose probabilities underflow: there the order of softmax and choice decides."""
    theirs = Qwen3MoeTopKRouter(
        Qwen3MoeConfig(hidden_size=16, num_experts=12, num_experts_per_tok=4, norm_topk_prob=normalize)
    )
    ours = SoftmaxFirstRouter.__new__(SoftmaxFirstRouter)
    torch.nn.Module.__init__(ours)
    ours.topk, ours.normalize = 4, normalize
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        theirs.weight.copy_(torch.randn(12, 16, generator=generator))
    theirs.to(dtype)
    ours.weight = theirs.weight
    hidden = torch.randn(50, 1, 16, generator=generator) * torch.logspace(-2, 2.5, 50)[:, None, None]
    weights, chosen = ours(hidden.to(dtype))
    _, expected, experts = theirs(hidden.to(dtype))
    assert weights.dtype == torch.float32 and weights.shape == chosen.shape == (50, 12)
    assert torch.equal(chosen, torch.zeros_like(chosen).scatter(1, experts, True))
    assert torch.equal(weights.gather(1, experts).to(dtype), expected)
    assert torch.equal(weights != 0, chosen & (weights != 0)) and (~chosen).sum() == 50 * 8


@pytest.fixture
def architecture(references: str) -> ModelArchitecture:
    return parse_architecture(json.loads((Path(references) / "qwen3-moe-mixed.json").read_text()))


def test_tensor_parallelism_of_experts_needs_sequence_parallelism(architecture: ModelArchitecture) -> None:
    with pytest.raises(ValueError, match=r"tensor parallelism \(2\) need sequence parallelism"):
        transformer_config(architecture, ParallelLayout(2, tensor=2), ModelSettings())
    dense = dataclasses.replace(architecture, experts=None)
    assert transformer_config(dense, ParallelLayout(2, tensor=2), ModelSettings()).num_moe_experts is None


def test_experts_train_on_the_policy_loss_alone(architecture: ModelArchitecture) -> None:
    layout = ParallelLayout(4, tensor=2, expert=4, expert_tensor=1, sequence_parallel=True)
    config = transformer_config(architecture, layout, ModelSettings())
    assert config.moe_aux_loss_coeff == 0 and config.moe_z_loss_coeff is None and config.moe_input_jitter_eps is None
    assert config.moe_expert_capacity_factor is None  # no token is dropped
    assert config.moe_layer_freq == [1, 0, 1, 1]
    assert (config.expert_model_parallel_size, config.expert_tensor_parallel_size) == (4, 1)
