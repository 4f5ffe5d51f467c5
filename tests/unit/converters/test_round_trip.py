"""Hugging Face -> Megatron -> Hugging Face through the programs: bit-identical, or an error and nothing left behind."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.main import get_command

from megatron_dapo.cli.main import app
from megatron_dapo.models.config_json import read_architecture

LAYOUTS = [(1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 2, 1), (2, 2, 1), (4, 2, 1), (1, 2, 2), (2, 2, 2)]


def _program(name: str):
    return lambda *arguments: get_command(app).main(["convert", name, *map(str, arguments)], standalone_mode=False) or 0


hf_to_megatron, megatron_to_hf, verify = (_program(name) for name in ("hf-to-megatron", "megatron-to-hf", "verify"))


def _stored(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in sorted(directory.glob("model*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def _change(file: Path, name: str) -> None:
    """Flips the lowest bit of the last element of a stored tensor."""
    tensors = load_file(file)
    tensors[name].view(-1).view(torch.uint8)[-1] ^= 1
    save_file(tensors, file)


FAMILIES = list(product(["llama", "qwen2", "qwen3", "gemma3_text", "gemma3"], [False, True]))
# Every family through one layout and every layout with some family; all of them through all in `make test-all`.
SOME = [(*family, [LAYOUTS[index % len(LAYOUTS)]]) for index, family in enumerate(FAMILIES)]
ALL = [pytest.param(*family, LAYOUTS, marks=pytest.mark.long) for family in FAMILIES]


@pytest.mark.parametrize(("family", "tied", "layouts"), SOME + ALL)
def test_bit_identical_through_every_layout(family, tied, layouts, make_model_directory, tmp_path, capsys):
    directory = make_model_directory(family, tied=tied, dtype=torch.bfloat16, shard="20KB")
    before = _stored(directory)
    for tensor, pipeline, virtual in layouts:
        cut, back = (tmp_path / f"{name}{tensor}{pipeline}{virtual}" for name in ("cut", "back"))
        sizes = ("--tensor", tensor, "--pipeline", pipeline, "--virtual-pipeline", virtual)
        assert hf_to_megatron(directory, cut, *sizes) == 0
        assert verify(directory, cut) == 0 and verify(cut, directory) == 0
        assert megatron_to_hf(cut, back, "--shard-bytes", 40_000) == 0
        assert verify(directory, back) == 0
        after = _stored(back)
        assert before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)
        assert (back / "config.json").read_bytes() == (directory / "config.json").read_bytes()
    assert any(name.startswith("vision_tower.") for name in before) == (family == "gemma3")
    assert "different" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "sizes",
    [
        "--expert 4",
        "--tensor 2 --expert 2",
        "--tensor 2 --expert 2 --expert-tensor 1",
        "--tensor 4 --expert 2 --expert-tensor 2 --pipeline 2 --virtual-pipeline 2",
    ],
)
def test_experts_are_bit_identical(sizes, make_model_directory, tmp_path, capsys):
    directory = make_model_directory("qwen3_moe", dtype=torch.bfloat16, shard="20KB")
    assert hf_to_megatron(directory, tmp_path / "cut", *sizes.split()) == 0
    assert verify(directory, tmp_path / "cut") == 0
    assert megatron_to_hf(tmp_path / "cut", tmp_path / "back") == 0
    before, after = _stored(directory), _stored(tmp_path / "back")
    assert before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)
    assert any("mlp.experts.7.up_proj" in name for name in after)


def test_a_change_in_the_last_expert_is_found(make_model_directory, tmp_path, capsys):
    directory = make_model_directory("qwen3_moe")
    assert hf_to_megatron(directory, tmp_path / "cut", "--expert", 2) == 0
    _change(directory / "model.safetensors", "model.layers.3.mlp.experts.7.down_proj.weight")
    assert verify(directory, tmp_path / "cut") == 1
    assert (
        "rank_00001.safetensors 0.decoder.layers.3.mlp.experts.local_experts.3.linear_fc2.weight: 1 of"
        in capsys.readouterr().out
    )


def test_a_directory_from_before_experts_is_read(make_model_directory, tmp_path):
    directory = make_model_directory("qwen2")
    assert hf_to_megatron(directory, tmp_path / "cut", "--tensor", 2) == 0
    layout = json.loads((tmp_path / "cut" / "layout.json").read_text())
    del layout["parallel"]["expert"], layout["parallel"]["expert_tensor"]
    (tmp_path / "cut" / "layout.json").write_text(json.dumps(layout))
    assert verify(directory, tmp_path / "cut") == 0


def test_bytes_are_read_once(make_model_directory, tmp_path, capsys):
    """Norms and their biases, which every tensor rank holds, are the only ones read more than once."""
    directory = make_model_directory("llama")
    architecture = read_architecture(directory)
    hf_to_megatron(directory, tmp_path / "cut", "--tensor", 4)
    norms = sum(shape[0] for name, shape in architecture.shapes().items() if "norm" in name)
    assert f"{4 * (architecture.num_parameters + 3 * norms):,} bytes read" in capsys.readouterr().out


def test_aliases_and_derived_buffers_survive(make_model_directory, tmp_path):
    directory = make_model_directory("llama", tied=True)
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = torch.arange(4.0)
    save_file(tensors, directory / "model.safetensors")
    assert hf_to_megatron(directory, tmp_path / "cut", "--pipeline", 2) == 0
    assert verify(tmp_path / "cut", directory) == 0
    assert megatron_to_hf(tmp_path / "cut", tmp_path / "back") == 0
    assert _stored(tmp_path / "back").keys() == tensors.keys()
    assert verify(tmp_path / "back", directory) == 0


@pytest.mark.parametrize(
    ("file", "buffer"),
    [
        ("rank_00001.safetensors", "0.embedding.word_embeddings.weight"),  # a row of padding
        ("rank_00003.safetensors", "0.output_layer.weight"),  # the tied copy's padding
        ("rank_00003.safetensors", "0.decoder.final_layernorm.weight"),  # a replica
        ("rank_00002.safetensors", "0.decoder.layers.0.self_attention.linear_qkv.bias"),
    ],
)
def test_verify_finds_one_bit_anywhere(file, buffer, make_model_directory, tmp_path, capsys):
    directory = make_model_directory("qwen2", tied=True)
    hf_to_megatron(directory, tmp_path / "cut", "--tensor", 2, "--pipeline", 2)
    tensors = load_file(tmp_path / "cut" / file)
    tensors[buffer].view(-1)[-1] += 1
    # In place, so that the header and the file's size stay as they are.
    data = (tmp_path / "cut" / file).read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    end = 8 + int.from_bytes(data[:8], "little") + header[buffer]["data_offsets"][1]
    changed = data[: end - 4] + tensors[buffer].view(-1)[-1:].numpy().tobytes() + data[end:]
    (tmp_path / "cut" / file).write_bytes(changed)
    assert verify(directory, tmp_path / "cut") == 1
    assert f"different: {file} {buffer}: 1 of" in capsys.readouterr().out


def test_verify_names_the_first_difference(make_model_directory, tmp_path, capsys):
    first, second = make_model_directory("llama", name="a"), make_model_directory("llama", name="b")
    _change(second / "model.safetensors", "model.norm.weight")
    assert verify(first, second) == 1
    assert "model.norm.weight: 1 of 32 elements differ in their bits, first at flat index 31" in capsys.readouterr().out
    third = make_model_directory("llama", name="c", dtype=torch.bfloat16)
    assert verify(first, third) == 1 and "torch.float32 and torch.bfloat16" in capsys.readouterr().out
    fourth = make_model_directory("llama", name="d", tied=True)
    assert verify(first, fourth) == 1 and "lm_head.weight: only in" in capsys.readouterr().out
    fifth = make_model_directory("llama", name="e", intermediate_size=64)
    assert verify(first, fifth) == 1 and "down_proj.weight: shape (32, 48) and (32, 64)" in capsys.readouterr().out
    assert verify(first, tmp_path / "nowhere") == 2


def test_incomplete_input_fails_and_leaves_nothing(make_model_directory, tmp_path, capsys):
    directory = make_model_directory("llama", shard="20KB")
    shard = sorted(directory.glob("model-*.safetensors"))[2]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    assert hf_to_megatron(directory, tmp_path / "cut") == 2
    message = capsys.readouterr().err
    assert shard.name in message and f"{len(whole) - 1} bytes" in message and str(len(whole)) in message
    shard.unlink()
    assert hf_to_megatron(directory, tmp_path / "cut") == 2
    assert f"{shard.name}: the file is missing" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


def test_incomplete_megatron_directory_fails(make_model_directory, tmp_path, capsys):
    directory = make_model_directory("llama")
    hf_to_megatron(directory, tmp_path / "cut", "--tensor", 2)
    path = tmp_path / "cut" / "layout.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "files": {**manifest["files"], "rank_00001.safetensors": 17}}))
    assert megatron_to_hf(tmp_path / "cut", tmp_path / "back") == 2
    assert "the manifest says 17" in capsys.readouterr().err
    path.write_text(json.dumps({**manifest, "files": {**manifest["files"], "../x": 17}}))
    assert megatron_to_hf(tmp_path / "cut", tmp_path / "back") == 2
    assert "'../x'" in capsys.readouterr().err
    path.write_text(json.dumps({**manifest, "parallel": {**manifest["parallel"], "tensor": 4}}))
    assert megatron_to_hf(tmp_path / "cut", tmp_path / "back") == 2
    path.write_text(json.dumps({**manifest, "version": 2}))
    assert megatron_to_hf(tmp_path / "cut", tmp_path / "back") == 2
    path.write_text(json.dumps(manifest))
    (tmp_path / "cut" / "rank_00001.safetensors").unlink()
    assert megatron_to_hf(tmp_path / "cut", tmp_path / "back") == 2
    assert "rank_00001.safetensors: the file is missing" in capsys.readouterr().err
    assert not (tmp_path / "back").exists()


def test_layout_or_target_that_does_not_fit(make_model_directory, tmp_path, capsys):
    directory = make_model_directory("llama")
    assert hf_to_megatron(directory, tmp_path / "cut", "--tensor", 3) == 2
    assert "3 is neither a multiple nor a divisor of num_key_value_heads 4" in capsys.readouterr().err
    (tmp_path / "cut").mkdir()
    assert hf_to_megatron(directory, tmp_path / "cut") == 2
    assert "exists already" in capsys.readouterr().err
    assert list((tmp_path / "cut").iterdir()) == []


def test_fused_tensors_of_two_types_are_refused(make_model_directory, tmp_path, capsys):
    directory = make_model_directory("llama")
    tensors = load_file(directory / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**tensors, name: tensors[name].bfloat16()}, directory / "model.safetensors")
    assert hf_to_megatron(directory, tmp_path / "cut") == 2
    assert "fuses tensors of different types" in capsys.readouterr().err and not (tmp_path / "cut").exists()


def test_norms_may_have_another_type(make_model_directory, tmp_path):
    directory = make_model_directory("llama", dtype=torch.bfloat16)
    tensors = load_file(directory / "model.safetensors")
    save_file({n: t.float() if "norm" in n else t for n, t in tensors.items()}, directory / "model.safetensors")
    assert hf_to_megatron(directory, tmp_path / "cut", "--tensor", 2) == 0
    assert megatron_to_hf(tmp_path / "cut", tmp_path / "back") == 0
    assert verify(directory, tmp_path / "back") == 0
