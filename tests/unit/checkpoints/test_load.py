"""Hugging Face directory -> Megatron shards: against tensors chunked, interleaved and padded by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_dapo.checkpoints.formats.huggingface import HFCheckpoint
from megatron_dapo.checkpoints.layouts.megatron import megatron_layout
from megatron_dapo.checkpoints.load import load_from_huggingface
from megatron_dapo.models.architecture import ModelArchitecture
from megatron_dapo.models.config_json import read_architecture
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.plan.memory import padded_vocabulary
from megatron_dapo.reshard.layout import check_layout

PARALLEL = [
    ParallelLayout(1),
    ParallelLayout(2, tensor=2),
    ParallelLayout(4, tensor=4),
    ParallelLayout(2, pipeline=2),
    ParallelLayout(4, tensor=2, pipeline=2),
    ParallelLayout(2, pipeline=2, virtual_pipeline=2),
    ParallelLayout(8, tensor=2, pipeline=2, context=2),
    ParallelLayout(4, tensor=2),
]
EXPERT_PARALLEL = [
    ParallelLayout(1),
    ParallelLayout(2, expert=2),
    ParallelLayout(8, expert=4),  # two replicas of each expert
    ParallelLayout(4, tensor=2, expert=2),  # experts cut as dense layers
    ParallelLayout(2, tensor=2, expert=2, expert_tensor=1),
    ParallelLayout(8, tensor=4, expert=2, expert_tensor=2),
    ParallelLayout(8, context=2, pipeline=2, expert=4),
    ParallelLayout(4, pipeline=2, virtual_pipeline=2, expert=2),
]


def _empty_parameters(layout, rank: int, dtype=torch.float32) -> dict[str, torch.Tensor]:
    """Parameters full of NaN, so that an unwritten element shows."""
    shapes = layout.local_shapes(rank)
    return {name: torch.nn.Parameter(torch.full(shape, float("nan"), dtype=dtype)) for name, shape in shapes.items()}


def _expected(
    hf: dict[str, torch.Tensor], a: ModelArchitecture, parallel: ParallelLayout, rank: int
) -> dict[str, torch.Tensor]:
    """A rank's parameters by cat, chunk and pad on whole tensors: independent of slices."""
    c, size = parallel.coordinates(rank), parallel.tensor

    def shard(tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return tensor.chunk(size, dim)[c.tensor]

    def vocabulary(tensor: torch.Tensor) -> torch.Tensor:
        padding = padded_vocabulary(a.vocab_size, size) - a.vocab_size
        return shard(torch.cat([tensor, torch.zeros(padding, a.hidden_size, dtype=tensor.dtype)]))

    def qkv(prefix: str, suffix: str) -> torch.Tensor:
        heads = [hf[f"{prefix}self_attn.{p}_proj.{suffix}"] for p in "qkv"]
        grouped = [t.view(a.num_key_value_heads, -1, *t.shape[1:]) for t in heads]
        return shard(torch.cat(grouped, dim=1).reshape(-1, *heads[0].shape[1:]))

    result: dict[str, torch.Tensor] = {}
    chunks = parallel.virtual_pipeline
    per_chunk = a.num_layers // (parallel.pipeline * chunks)
    for stage in range(chunks):
        if stage == 0 and c.pipeline == 0:
            result["0.embedding.word_embeddings.weight"] = vocabulary(hf["model.embed_tokens.weight"])
        for index in range(per_chunk):
            prefix = f"model.layers.{(stage * parallel.pipeline + c.pipeline) * per_chunk + index}."
            local = f"{stage}.decoder.layers.{index}."
            result[local + "self_attention.linear_qkv.layer_norm_weight"] = hf[prefix + "input_layernorm.weight"]
            result[local + "self_attention.linear_qkv.weight"] = qkv(prefix, "weight")
            if a.model_type == "qwen2":
                result[local + "self_attention.linear_qkv.bias"] = qkv(prefix, "bias")
            if a.qk_norm:
                for x in "qk":
                    result[local + f"self_attention.{x}_layernorm.weight"] = hf[prefix + f"self_attn.{x}_norm.weight"]
            result[local + "self_attention.linear_proj.weight"] = shard(hf[prefix + "self_attn.o_proj.weight"], 1)
            norm = "post_attention_layernorm.weight"
            if a.model_type == "gemma3_text":
                result[local + "self_attention.linear_proj.post_layernorm.weight"] = hf[prefix + norm]
                norm = "pre_feedforward_layernorm.weight"
            if prefix + "mlp.gate.weight" in hf:
                result |= _expected_experts(hf, parallel, rank, prefix, local)
                continue
            result[local + "mlp.linear_fc1.layer_norm_weight"] = hf[prefix + norm]
            gate, up = (shard(hf[prefix + f"mlp.{x}_proj.weight"]) for x in ("gate", "up"))
            result[local + "mlp.linear_fc1.weight"] = torch.cat([gate, up])
            result[local + "mlp.linear_fc2.weight"] = shard(hf[prefix + "mlp.down_proj.weight"], 1)
            if a.model_type == "gemma3_text":
                post = hf[prefix + "post_feedforward_layernorm.weight"]
                result[local + "mlp.linear_fc2.post_layernorm.weight"] = post
        if stage == chunks - 1 and c.pipeline == parallel.pipeline - 1:
            result[f"{stage}.decoder.final_layernorm.weight"] = hf["model.norm.weight"]
            if not a.tie_word_embeddings:
                result[f"{stage}.output_layer.weight"] = vocabulary(hf["lm_head.weight"])
            elif parallel.pipeline > 1:
                result[f"{stage}.output_layer.weight"] = vocabulary(hf["model.embed_tokens.weight"])
    return result


def _expected_experts(
    hf: dict[str, torch.Tensor], parallel: ParallelLayout, rank: int, prefix: str, local: str
) -> dict[str, torch.Tensor]:
    """Ranks of a stage are assigned to shards of an expert first, then to experts."""
    size = parallel.expert_tensor or parallel.tensor
    in_stage = rank % (parallel.world_size // parallel.pipeline)
    part, place = in_stage % size, in_stage // size % parallel.expert
    result = {
        local + "pre_mlp_layernorm.weight": hf[prefix + "post_attention_layernorm.weight"],
        local + "mlp.router.weight": hf[prefix + "mlp.gate.weight"],
    }
    for index, expert in enumerate(torch.arange(8).chunk(parallel.expert)[place].tolist()):
        gate, up, down = (hf[f"{prefix}mlp.experts.{expert}.{x}_proj.weight"] for x in ("gate", "up", "down"))
        here = f"{local}mlp.experts.local_experts.{index}."
        result[here + "linear_fc1.weight"] = torch.cat([gate.chunk(size)[part], up.chunk(size)[part]])
        result[here + "linear_fc2.weight"] = down.chunk(size, 1)[part]
    return result


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("llama", {}),
        ("qwen2", {}),
        ("qwen2", {"num_key_value_heads": 2}),  # four tensor ranks cut through a head's group
        ("qwen3", {}),
        ("qwen3_moe", {}),
        ("gemma3_text", {}),
    ],
)
def test_every_layout_loads_what_chunking_by_hand_gives(family, sizes, tied, make_model_directory):
    directory = make_model_directory(family, tied=tied, **sizes)
    architecture, hf = read_architecture(directory), load_file(directory / "model.safetensors")
    for parallel in PARALLEL + (EXPERT_PARALLEL if architecture.experts else []):
        layout = megatron_layout(architecture, parallel, torch.float32)
        check_layout(layout)
        for rank in range(parallel.world_size):
            parameters = _empty_parameters(layout, rank)
            report = load_from_huggingface(directory, layout, rank, parameters)
            expected = _expected(hf, architecture, parallel, rank)
            assert list(parameters) == list(expected)
            for name, value in expected.items():
                assert torch.equal(parameters[name], value), f"{parallel.describe()} rank {rank} {name}"
            assert report.num_elements + report.num_padding_elements == sum(p.numel() for p in parameters.values())
            assert report.bytes_read == 4 * report.num_elements


def fuse_experts(directory: Path) -> None:
    """Store the experts of each layer as two tensors."""
    tensors = load_file(directory / "model.safetensors")
    for prefix in sorted({name.partition("experts.")[0] + "experts." for name in tensors if ".experts." in name}):
        parts = {
            kind: torch.stack([tensors.pop(f"{prefix}{expert}.{kind}.weight") for expert in range(8)])
            for kind in ("gate_proj", "up_proj", "down_proj")
        }
        tensors[prefix + "gate_up_proj"] = torch.cat((parts["gate_proj"], parts["up_proj"]), dim=1)
        tensors[prefix + "down_proj"] = parts["down_proj"]
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize("sizes", [{}, {"expert": 2, "tensor": 2, "expert_tensor": 2, "sequence_parallel": True}])
def test_experts_stored_in_one_tensor_are_read_one_by_one(sizes, make_model_directory):
    directory = make_model_directory("qwen3_moe")
    separate = load_file(directory / "model.safetensors")
    world = 4 if sizes else 1
    layout = megatron_layout(read_architecture(directory), ParallelLayout(world, **sizes), torch.float32)
    expected = [_empty_parameters(layout, rank) for rank in range(world)]
    for rank, parameters in enumerate(expected):
        load_from_huggingface(directory, layout, rank, parameters)
    fuse_experts(directory)
    with HFCheckpoint(directory) as stored:
        assert stored.specs.keys() == separate.keys()
        assert all(torch.equal(stored.read_tensor(name), tensor) for name, tensor in separate.items())
    for rank, parameters in enumerate(expected):
        again = _empty_parameters(layout, rank)
        report = load_from_huggingface(directory, layout, rank, again)
        assert all(torch.equal(again[name], values) for name, values in parameters.items())
        assert report.bytes_read == 4 * report.num_elements


def test_experts_of_an_odd_number_of_rows_are_refused(make_model_directory):
    directory = make_model_directory("qwen3_moe")
    fuse_experts(directory)
    tensors = load_file(directory / "model.safetensors")
    name = next(name for name in tensors if name.endswith("gate_up_proj"))
    save_file({**tensors, name: tensors[name][:, 1:].clone()}, directory / "model.safetensors")
    with pytest.raises(ValueError, match="gate_up_proj .* does not hold gate_proj and up_proj"):
        HFCheckpoint(directory)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_numbers_are_named_with_their_file(make_model_directory, value):
    directory = make_model_directory("qwen3")
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.weight"][3, 2] = value
    tensors["model.layers.1.self_attn.k_proj.weight"][3, 3] = -value
    save_file(tensors, directory / "model.safetensors")
    layout = megatron_layout(read_architecture(directory), ParallelLayout(1), torch.float32)
    if value != value:
        words = r"model.safetensors: 2 elements of model.layers.1.self_attn.k_proj.weight are not a number"
        with pytest.raises(ValueError, match=words):
            load_from_huggingface(directory, layout, 0, _empty_parameters(layout, 0))
    else:
        load_from_huggingface(directory, layout, 0, _empty_parameters(layout, 0))


def test_values_are_cast_to_the_parameters_type(make_model_directory):
    directory = make_model_directory("qwen3", dtype=torch.bfloat16, shard="20KB")
    architecture = read_architecture(directory)
    layout = megatron_layout(architecture, ParallelLayout(2, tensor=2), torch.float32)
    parameters = _empty_parameters(layout, 1)
    load_from_huggingface(directory, layout, 1, parameters)
    stored = {k: v for file in directory.glob("*.safetensors") for k, v in load_file(file).items()}
    assert stored["model.norm.weight"].dtype == torch.bfloat16
    columns = stored["model.layers.2.mlp.down_proj.weight"][:, 24:]
    assert torch.equal(parameters["0.decoder.layers.2.mlp.linear_fc2.weight"], columns.float())


@pytest.mark.parametrize(
    ("family", "parallel", "sizes", "message"),
    [
        ("llama", ParallelLayout(3, tensor=3), {}, "3 is neither a multiple nor a divisor of num_key_value_heads 4"),
        ("llama", ParallelLayout(4, tensor=4), {"intermediate_size": 50}, "4 does not divide intermediate_size 50"),
        (
            "llama",
            ParallelLayout(4, tensor=4),
            {"num_key_value_heads": 6, "num_attention_heads": 12, "hidden_size": 48},
            "neither a multiple nor a divisor",
        ),
        ("llama", ParallelLayout(3, pipeline=3), {}, "4 layers do not split"),
        ("qwen3", ParallelLayout(2, expert=2), {}, "size 2 needs a mixture-of-experts model; qwen3 is dense"),
        ("qwen3_moe", ParallelLayout(3, expert=3), {}, "expert parallel size 3 does not divide num_experts 8"),
        ("qwen3_moe", ParallelLayout(8, tensor=8), {}, "size 8 does not divide moe_intermediate_size 20"),
    ],
)
def test_layouts_that_do_not_fit(family, parallel, sizes, message, make_model_directory):
    architecture = read_architecture(make_model_directory(family, **sizes))
    with pytest.raises(ValueError, match=message):
        megatron_layout(architecture, parallel, torch.float32)


def test_parameters_that_are_not_the_layouts(make_model_directory):
    directory = make_model_directory("llama")
    layout = megatron_layout(read_architecture(directory), ParallelLayout(1), torch.float32)
    parameters = _empty_parameters(layout, 0)
    lost = parameters.pop("0.output_layer.weight")
    with pytest.raises(ValueError, match=r"1 parameters of the layout are missing \['0.output_layer.weight'\]"):
        load_from_huggingface(directory, layout, 0, parameters)
    with pytest.raises(ValueError, match=r"not in it \['0.extra'\]"):
        load_from_huggingface(directory, layout, 0, {**parameters, "0.output_layer.weight": lost, "0.extra": lost})
    with pytest.raises(ValueError, match=r"0.output_layer.weight is \(301, 32\), the layout says \(384, 32\)"):
        load_from_huggingface(directory, layout, 0, {**parameters, "0.output_layer.weight": lost[:301]})


def test_tied_model_with_a_stored_head(make_model_directory):
    """Equal copies are accepted; different ones are an error, not a choice."""
    directory = make_model_directory("qwen2", tied=True)
    tensors = load_file(directory / "model.safetensors")
    layout = megatron_layout(read_architecture(directory), ParallelLayout(1), torch.float32)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, directory / "model.safetensors")
    load_from_huggingface(directory, layout, 0, _empty_parameters(layout, 0))
    tensors["lm_head.weight"][300, 31] += 1
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ValueError, match="lm_head.weight and model.embed_tokens.weight differ"):
        load_from_huggingface(directory, layout, 0, _empty_parameters(layout, 0))


def test_missing_and_unknown_tensors_are_named(make_model_directory):
    directory = make_model_directory("qwen2")
    tensors = load_file(directory / "model.safetensors")
    layout = megatron_layout(read_architecture(directory), ParallelLayout(1), torch.float32)
    moved = {("score.weight" if name == "lm_head.weight" else name): tensor for name, tensor in tensors.items()}
    save_file(moved, directory / "model.safetensors")
    with pytest.raises(ValueError, match=r"1 missing: lm_head.weight; 1 unknown: score.weight"):
        load_from_huggingface(directory, layout, 0, _empty_parameters(layout, 0))


def test_config_of_another_size_is_named(make_model_directory):
    directory = make_model_directory("llama")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "intermediate_size": 64}))
    layout = megatron_layout(read_architecture(directory), ParallelLayout(1), torch.float32)
    with pytest.raises(ValueError, match=r"gate_proj.weight \(48, 32\) instead of \(64, 32\)"):
        load_from_huggingface(directory, layout, 0, _empty_parameters(layout, 0))
