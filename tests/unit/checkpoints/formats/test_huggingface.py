"""Directories: index and headers agree, names stay inside, the writer's result is the source's or nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron_dapo.checkpoints.formats.huggingface import HFCheckpoint, untouched_names
from megatron_dapo.checkpoints.formats.huggingface_writer import hf_checkpoint_writer
from megatron_dapo.checkpoints.formats.safetensors import SafetensorsWriter
from megatron_dapo.models.architecture import ModelArchitecture
from megatron_dapo.models.config_json import read_architecture


def _copy(source: HFCheckpoint, architecture: ModelArchitecture, target: Path, **options) -> None:
    with hf_checkpoint_writer(target, source, architecture, **options) as writer:
        for name in architecture.shapes():
            writer.write(name, source.read_tensor(name))


def _stored(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor for file in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(file).items()
    }


@pytest.mark.parametrize(
    ("shard_in", "shard_out", "num_files"), [("50GB", 10**9, 1), ("20KB", 10**9, 1), ("20KB", 30_000, 5)]
)
def test_copy_is_bit_identical_and_loads(shard_in, shard_out, num_files, make_model_directory, tmp_path):
    directory = make_model_directory("qwen3", dtype=torch.bfloat16, shard=shard_in)
    architecture = read_architecture(directory)
    with HFCheckpoint(directory) as source:
        assert source.num_bytes == 2 * architecture.num_parameters
        _copy(source, architecture, tmp_path / "out", shard_bytes=shard_out)
    before, after = _stored(directory), _stored(tmp_path / "out")
    assert before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)
    files = list((tmp_path / "out").glob("*.safetensors"))
    assert len(files) == num_files
    # A shard may exceed the bound only if it is one tensor.
    assert all(file.stat().st_size <= shard_out + 4096 for file in files)
    models = [AutoModelForCausalLM.from_pretrained(f, dtype=torch.bfloat16) for f in (directory, tmp_path / "out")]
    tokens = torch.arange(7)[None]
    assert torch.equal(models[0](tokens).logits, models[1](tokens).logits)
    assert not list(tmp_path.glob("*.incomplete"))


def test_aliases_and_derived_buffers_are_taken_over(make_model_directory, tmp_path):
    directory = make_model_directory("llama", tied=True)
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = torch.arange(4.0)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    architecture = read_architecture(directory)
    with HFCheckpoint(directory) as source:
        assert untouched_names(source.specs, architecture) == ("model.layers.1.self_attn.rotary_emb.inv_freq",)
        _copy(source, architecture, tmp_path / "out", dtype=torch.bfloat16)
    after = _stored(tmp_path / "out")
    assert after.keys() == tensors.keys()
    assert after["model.layers.1.self_attn.rotary_emb.inv_freq"].dtype == torch.float32
    assert torch.equal(after["lm_head.weight"], tensors["lm_head.weight"].bfloat16())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_tokenizer_files_come_along_and_nothing_else(make_model_directory, tmp_path):
    directory = make_model_directory("llama")
    for name in ("tokenizer.json", "tokenizer_config.json", "optimizer.bin", "train.py"):
        (directory / name).write_text("{}")
    with HFCheckpoint(directory) as source:
        _copy(source, read_architecture(directory), tmp_path / "out")
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "model.safetensors",
    } == names


def test_incomplete_export_leaves_nothing(make_model_directory, tmp_path):
    directory = make_model_directory("llama")
    architecture = read_architecture(directory)
    with HFCheckpoint(directory) as source:
        with pytest.raises(ValueError, match="38 tensors were not written"):
            with hf_checkpoint_writer(tmp_path / "out", source, architecture) as writer:
                writer.write("model.norm.weight", source.read_tensor("model.norm.weight"))
        with pytest.raises(ValueError, match="score.weight is not a tensor of the source"):
            with hf_checkpoint_writer(tmp_path / "out", source, architecture) as writer:
                writer.write("score.weight", torch.zeros(1))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


def test_full_disk_leaves_nothing(make_model_directory, tmp_path, monkeypatch):
    """The kernel's own error for a full disk, raised in the middle of a shard."""
    directory = make_model_directory("llama")
    write, calls = SafetensorsWriter._write_at, []

    def fail_late(self, offset, data):
        calls.append(offset)
        if len(calls) == 9:
            raise OSError(28, os.strerror(28))
        write(self, offset, data)

    monkeypatch.setattr(SafetensorsWriter, "_write_at", fail_late)
    with HFCheckpoint(directory) as source, pytest.raises(OSError, match="No space left"):
        _copy(source, read_architecture(directory), tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", "", 3, "a\\b"])
def test_index_that_leads_outside_is_refused(name, make_model_directory):
    directory = make_model_directory("llama", shard="20KB")
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = name
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="is not a plain file name"):
        HFCheckpoint(directory)


def test_missing_shard_is_named(make_model_directory):
    directory = make_model_directory("llama", shard="20KB")
    lost = sorted(directory.glob("model-*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(ValueError, match=f"{lost.name}: the file is missing"):
        HFCheckpoint(directory)


def test_index_and_headers_disagree(make_model_directory):
    directory = make_model_directory("llama", shard="20KB")
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    weight_map = index["weight_map"]
    other = next(f for f in weight_map.values() if f != weight_map["model.norm.weight"])
    path.write_text(json.dumps({"weight_map": {**weight_map, "model.norm.weight": other}}))
    with pytest.raises(ValueError, match=f"'model.norm.weight' is in {other}, whose header does not have it"):
        HFCheckpoint(directory)
    path.write_text(json.dumps({"weight_map": {n: f for n, f in weight_map.items() if n != "model.norm.weight"}}))
    with pytest.raises(ValueError, match="1 tensors are not in the index: model.norm.weight"):
        HFCheckpoint(directory)
    for text in ("{", "{}", '{"weight_map": []}', '{"weight_map": {}}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="index"):
            HFCheckpoint(directory)


def test_directory_without_safetensors(tmp_path):
    with pytest.raises(ValueError, match="neither model.safetensors nor"):
        HFCheckpoint(tmp_path / "nowhere")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="pytorch_model.bin is a pickle"):
        HFCheckpoint(tmp_path)


def test_quantized_weights_without_a_quantization_config_are_refused(make_model_directory):
    """Their codes would load silently as floats."""
    directory = make_model_directory("qwen2")
    name = "model.layers.1.mlp.down_proj.weight"
    # The file is written over, and older versions of safetensors leave tensors mapped to it.
    tensors = {name: tensor.clone() for name, tensor in load_file(directory / "model.safetensors").items()}
    architecture = read_architecture(directory)
    for dtype in (torch.int8, torch.uint8, torch.float8_e4m3fn):
        save_file({**tensors, name: tensors[name].to(dtype)}, directory / "model.safetensors")
        message = f"{name} is {str(dtype)[6:]} .1 of {len(tensors)} .*no quantization_config: start from the original"
        with HFCheckpoint(directory) as stored, pytest.raises(ValueError, match=message):
            stored.layout(architecture)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_float_type_is_read(dtype, make_model_directory):
    directory = make_model_directory("qwen2", dtype=dtype)
    with HFCheckpoint(directory) as stored:
        stored.check(read_architecture(directory))


def test_both_a_single_file_and_an_index(make_model_directory):
    directory = make_model_directory("llama")
    (directory / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b"}}')
    with pytest.raises(ValueError, match="has both"):
        HFCheckpoint(directory)
