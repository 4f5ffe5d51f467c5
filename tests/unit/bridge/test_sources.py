"""Sources of a weight sync: one rank's live parameters, as they are or in FP8."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_dapo.bridge.sources import SOURCES
from megatron_dapo.checkpoints.layouts.fp8 import Fp8EngineLayout, expected_parameters
from megatron_dapo.checkpoints.layouts.megatron import megatron_layout
from megatron_dapo.checkpoints.layouts.sglang import sglang_layout
from megatron_dapo.models.config_json import parse_architecture
from megatron_dapo.ops.fp8 import quantize_weight
from megatron_dapo.parallel.layout import ParallelLayout

CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 301,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
DOWN = "0.decoder.layers.0.mlp.linear_fc2.weight"


@pytest.fixture
def live():
    """(layout, live parameters, engines) of one rank; the parameters require gradients, as an actor's do."""
    architecture = parse_architecture(CONFIG)
    trainer = megatron_layout(architecture, ParallelLayout(1), torch.float32)
    torch.manual_seed(0)
    parameters = {name: torch.nn.Parameter(torch.randn(shape)) for name, shape in trainer.local_shapes(0).items()}
    return trainer, parameters, sglang_layout(architecture, 1, torch.bfloat16)


def _actor(tensors, parameters) -> SimpleNamespace:
    return SimpleNamespace(tensors=tensors, served_parameters=lambda: {name: each.detach() for name, each in parameters.items()})


def test_unquantized_parameters_are_sent_as_they_are(live):
    trainer, parameters, engines = live
    weights = SOURCES["none"](_actor(trainer, parameters), 0, None)
    assert not weights.needs_description and weights.layouts(engines) == (trainer, engines)
    current = weights.current()
    assert current.keys() == parameters.keys()
    assert current[DOWN].data_ptr() == parameters[DOWN].data_ptr() and not current[DOWN].requires_grad


def test_fp8_follows_the_parameters_and_gives_them_back(live):
    trainer, parameters, engines = live
    weights = SOURCES["fp8"](_actor(trainer, parameters), 0, None)
    served = Fp8EngineLayout(engines, expected_parameters(engines))
    source, destination = weights.layouts(engines, [served.local_specs(0)])
    assert destination.tensors == served.tensors and source.num_ranks == 1
    for _ in range(2):
        quantized = quantize_weight(parameters[DOWN].detach())
        current = weights.current()
        assert torch.equal(current[DOWN].view(torch.uint8), quantized.values.view(torch.uint8))
        assert torch.equal(current["model.layers.0.mlp.down_proj.weight_scale_inv"], quantized.scales)
        assert set(current) == source.buffer_names(0) and len(current) == len(set(current))
        with torch.no_grad():
            parameters[DOWN].mul_(3.0)  # the next version
    before = {name: tensor.detach().clone() for name, tensor in parameters.items()}
    with weights.as_served():
        assert torch.equal(parameters[DOWN].detach(), quantize_weight(before[DOWN]).widened())
        head = "0.output_layer.weight"
        assert torch.equal(parameters[head].detach(), before[head])
    assert all(torch.equal(tensor.detach(), before[name]) for name, tensor in parameters.items())


def test_an_unknown_name_is_a_key_error(live):
    trainer, parameters, engines = live
    weights = SOURCES["fp8"](_actor(trainer, parameters), 0, None)
    weights.layouts(engines, [Fp8EngineLayout(engines, expected_parameters(engines)).local_specs(0)])
    with pytest.raises(KeyError):
        weights.current()["no.such.weight"]
