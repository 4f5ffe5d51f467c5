"""Random weights are the same model under every layout."""

import torch

from megatron_dapo.checkpoints.layouts.megatron import megatron_layout
from megatron_dapo.checkpoints.load import initialize_randomly
from megatron_dapo.models.config_json import parse_architecture
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.reshard.layout import SingleHolderLayout, TensorSpec
from megatron_dapo.reshard.planner import plan
from tests.reshard_oracles import execute_in_memory

CONFIG = {
    "model_type": "qwen2",
    "vocab_size": 301,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [],
}


def _whole_model(parallel: ParallelLayout, seed: int, config: dict = CONFIG) -> dict[str, torch.Tensor]:
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


def test_layouts_start_from_the_same_model():
    one = _whole_model(ParallelLayout(1), seed=3)
    other = _whole_model(ParallelLayout(4, tensor=2, pipeline=2), seed=3)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_expert_ranks_start_from_the_same_model():
    config = {**CONFIG, **EXPERTS}
    one = _whole_model(ParallelLayout(1), seed=3, config=config)
    for parallel in (ParallelLayout(4, expert=4), ParallelLayout(4, tensor=2, pipeline=2, expert=2, expert_tensor=1)):
        other = _whole_model(parallel, seed=3, config=config)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    experts = [one[f"model.layers.1.mlp.experts.{expert}.up_proj.weight"] for expert in range(4)]
    assert not torch.equal(experts[0], experts[1]) and not torch.equal(experts[2], experts[3])


def test_values_match_their_names():
    model = _whole_model(ParallelLayout(1), seed=3)
    assert bool((model["model.norm.weight"] == 1).all())
    assert bool((model["model.layers.0.self_attn.q_proj.bias"] == 0).all())
    matrix = model["model.layers.0.mlp.gate_proj.weight"]
    assert 0.015 < float(matrix.std()) < 0.025
    assert not torch.equal(matrix, model["model.layers.1.mlp.gate_proj.weight"])
    assert not torch.equal(matrix, _whole_model(ParallelLayout(1), seed=4)["model.layers.0.mlp.gate_proj.weight"])
