"""Formats on disk are stable: directories of earlier versions load, and today's files have the same names and keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_dapo.converters.convert import first_difference, huggingface_to_megatron, megatron_to_huggingface
from megatron_dapo.converters.megatron_checkpoint import MegatronCheckpoint

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 5,
    "hidden_size": 4,
    "intermediate_size": 6,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 8,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
SHAPES = {
    "model.embed_tokens.weight": [5, 4],
    "model.layers.0.input_layernorm.weight": [4],
    "model.layers.0.self_attn.q_proj.weight": [4, 4],
    "model.layers.0.self_attn.k_proj.weight": [2, 4],
    "model.layers.0.self_attn.v_proj.weight": [2, 4],
    "model.layers.0.self_attn.o_proj.weight": [4, 4],
    "model.layers.0.post_attention_layernorm.weight": [4],
    "model.layers.0.mlp.gate_proj.weight": [6, 4],
    "model.layers.0.mlp.up_proj.weight": [6, 4],
    "model.layers.0.mlp.down_proj.weight": [4, 6],
    "model.norm.weight": [4],
}
# The local buffers of Megatron, written out; the vocabulary is padded to 128 rows.
BUFFERS = {
    "0.embedding.word_embeddings.weight": ["model.embed_tokens.weight"],
    "0.decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": ["model.layers.0.input_layernorm.weight"],
    "0.decoder.layers.0.self_attention.linear_qkv.weight": [
        f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv"
    ],
    "0.decoder.layers.0.self_attention.linear_proj.weight": ["model.layers.0.self_attn.o_proj.weight"],
    "0.decoder.layers.0.mlp.linear_fc1.layer_norm_weight": ["model.layers.0.post_attention_layernorm.weight"],
    "0.decoder.layers.0.mlp.linear_fc1.weight": [f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up")],
    "0.decoder.layers.0.mlp.linear_fc2.weight": ["model.layers.0.mlp.down_proj.weight"],
    "0.decoder.final_layernorm.weight": ["model.norm.weight"],
}
MANIFEST = {
    "format": "megatron_dapo sharded model",
    "version": 1,
    "parallel": {"tensor": 1, "pipeline": 1, "virtual_pipeline": 1, "expert": 1, "expert_tensor": 1},
    "tensors": {name: ["F32", shape] for name, shape in SHAPES.items()},
}


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


@pytest.fixture
def model(tmp_path: Path, weights) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    save_file(weights, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


@pytest.fixture
def earlier(tmp_path: Path, weights) -> Path:
    """A converted model without any code of this package: its files as every version has written them."""
    directory = tmp_path / "earlier"
    directory.mkdir()
    buffers = {local: torch.cat([weights[name] for name in names]) for local, names in BUFFERS.items()}
    name = "0.embedding.word_embeddings.weight"
    buffers[name] = torch.cat([buffers[name], torch.zeros(123, 4)])
    save_file(buffers, directory / "rank_00000.safetensors")
    size = (directory / "rank_00000.safetensors").stat().st_size
    (directory / "layout.json").write_text(json.dumps({**MANIFEST, "files": {"rank_00000.safetensors": size}}))
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


def test_a_converted_model_of_an_earlier_version_is_read(model, earlier, weights, tmp_path):
    assert first_difference(model, earlier) is None
    megatron_to_huggingface(earlier, tmp_path / "back")
    again = load_file(tmp_path / "back" / "model.safetensors")
    assert again.keys() == weights.keys() and all(torch.equal(again[name], weights[name]) for name in weights)


def test_a_converted_model_has_the_same_files_and_keys(model, earlier, tmp_path):
    huggingface_to_megatron(model, tmp_path / "now")
    assert {path.name for path in (tmp_path / "now").iterdir()} == {path.name for path in earlier.iterdir()}
    ours, theirs = (load_file(path / "rank_00000.safetensors") for path in (tmp_path / "now", earlier))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    written = json.loads((tmp_path / "now" / "layout.json").read_text())
    assert {key: value for key, value in written.items() if key != "files"} == MANIFEST


def test_another_version_is_refused_with_what_to_do(earlier):
    manifest = json.loads((earlier / "layout.json").read_text())
    (earlier / "layout.json").write_text(json.dumps({**manifest, "version": 2}))
    with pytest.raises(ValueError, match="version 2, this program reads .* 1: convert the Hugging Face model again"):
        MegatronCheckpoint(earlier)


def test_quantized_buffers_are_refused(earlier):
    manifest = json.loads((earlier / "layout.json").read_text())
    manifest["tensors"]["model.layers.0.self_attn.o_proj.weight"][0] = "I8"
    (earlier / "layout.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="o_proj.weight is int8 .1 of 11 parameters"):
        MegatronCheckpoint(earlier)
