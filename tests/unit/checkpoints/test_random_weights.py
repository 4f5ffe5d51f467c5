"""Random weights are the same model under every layout."""

import pytest
import torch

from megatron_dapo.checkpoints.layouts.megatron import megatron_layout
from megatron_dapo.checkpoints.load import initialize_randomly
from megatron_dapo.models.config_json import parse_architecture
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.reshard.layout import SingleHolderLayout, TensorSpec
from megatron_dapo.reshard.planner import plan
from tests.reshard_oracles import execute_in_memory
from tests.unit.checkpoints.layouts.test_state import DENSE, EXPERTS


def _whole_model(parallel: ParallelLayout, seed: int, config: dict = DENSE) -> dict[str, torch.Tensor]:
    architecture = parse_architecture(config)
    layout = megatron_layout(architecture, parallel, torch.float32)
    ranks = []
    for rank in range(parallel.world_size):
        parameters = {name: torch.full(shape, float("nan")) for name, shape in layout.local_shapes(rank).items()}
        initialize_randomly(seed, layout, rank, parameters)
        assert all(bool(torch.isfinite(tensor).all()) for tensor in parameters.values())
        ranks.append(parameters)
    specs = {name: TensorSpec(shape, torch.float32) for name, shape in architecture.shapes().items()}
    destination = SingleHolderLayout(specs, parallel.world_size)
    whole = {name: torch.zeros(shape) for name, shape in architecture.shapes().items()}
    execute_in_memory(plan(layout, destination), ranks, [whole, *({} for _ in ranks[1:])])
    return whole


@pytest.mark.parametrize(
    ("config", "layouts"),
    [
        (DENSE, [ParallelLayout(4, tensor=2, pipeline=2)]),
        (
            {**EXPERTS, "decoder_sparse_step": 2},
            [ParallelLayout(4, expert=4), ParallelLayout(4, tensor=2, pipeline=2, expert=2, expert_tensor=1)],
        ),
    ],
    ids=["dense", "experts"],
)
def test_layouts_start_from_the_same_model(config: dict, layouts: list[ParallelLayout]):
    one = _whole_model(ParallelLayout(1), seed=3, config=config)
    for parallel in layouts:
        other = _whole_model(parallel, seed=3, config=config)
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    experts = [tensor for name, tensor in one.items() if "layers.1.mlp.experts" in name and "up_proj" in name]
    assert all(not torch.equal(first, second) for first, second in zip(experts, experts[1:]))


def test_values_match_their_names():
    model = _whole_model(ParallelLayout(1), seed=3)
    assert bool((model["model.norm.weight"] == 1).all())
    assert bool((model["model.layers.0.self_attn.q_proj.bias"] == 0).all())
    matrix = model["model.layers.0.mlp.gate_proj.weight"]
    assert 0.015 < float(matrix.std()) < 0.025
    assert not torch.equal(matrix, model["model.layers.1.mlp.gate_proj.weight"])
    assert not torch.equal(matrix, _whole_model(ParallelLayout(1), seed=4)["model.layers.0.mlp.gate_proj.weight"])
