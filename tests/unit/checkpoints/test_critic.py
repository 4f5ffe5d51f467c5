"""Sources of a critic and the directory it becomes, compared with transformers."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatron_dapo.checkpoints.critic import ValueHeadInit, critic_architecture, initialize_critic_randomly, load_critic
from megatron_dapo.checkpoints.export import export_to_huggingface
from megatron_dapo.checkpoints.layouts.megatron import MegatronLayout, megatron_layout
from megatron_dapo.checkpoints.load import initialize_randomly
from megatron_dapo.converters.convert import (
    first_difference,
    huggingface_to_megatron,
    megatron_to_huggingface,
)
from megatron_dapo.models.config_json import read_architecture
from megatron_dapo.parallel.layout import ParallelLayout

SIZES = {
    "vocab_size": 301,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    "tie_word_embeddings": False,
}
START = ValueHeadInit(seed=5, scale=0.02)
SINGLE = ParallelLayout(world_size=1)


def make(directory: Path, head: str = "ForCausalLM", family: str = "Qwen2", dtype=torch.float32, **fields: Any) -> Path:
    """A directory of a transformers model with random weights, biases included."""
    torch.manual_seed(0)
    model = getattr(transformers, family + head)(getattr(transformers, f"{family}Config")(**{**SIZES, **fields}))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model.to(dtype).save_pretrained(directory)
    return directory


def load(directory: Path, parallel: ParallelLayout = SINGLE, start: ValueHeadInit = START):
    """(layout, each rank's parameters, rank 0's report)."""
    layout = megatron_layout(critic_architecture(directory), parallel, torch.float32)
    ranks = [empty(layout, rank) for rank in range(parallel.world_size)]
    reports = [load_critic(directory, layout, rank, buffers, start) for rank, buffers in enumerate(ranks)]
    return layout, ranks, reports[0]


def empty(layout: MegatronLayout, rank: int) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, torch.nan) for name, shape in layout.local_shapes(rank).items()}


@pytest.mark.parametrize("tied", [False, True])
def test_from_a_policy_only_the_head_is_fresh_small_and_logged(tmp_path, tied, caplog) -> None:
    directory = make(tmp_path / "policy", tie_word_embeddings=tied)
    stored = load_file(directory / "model.safetensors")
    with caplog.at_level(logging.WARNING):
        layout, ranks, report = load(directory, ParallelLayout(world_size=4, tensor=2, pipeline=2))
    assert "fresh value head, standard deviation 0.02 / sqrt(hidden size) from seed 5" in caplog.text
    assert report.fresh == ("score.weight", "score.bias")
    assert "lm_head.weight" not in layout.tensors and layout.tensors["score.weight"].shape == (1, 32)
    for rank, buffers in enumerate(ranks):
        assert all(torch.isfinite(buffer).all() for buffer in buffers.values())
        held = {shard.tensor for shard in layout.shards(rank)}
        assert ("model.embed_tokens.weight" in held) == (rank < 2)  # a tied policy's critic has no second copy
        for shard in layout.shards(rank):
            if shard.tensor.startswith("score"):
                continue
            there = tuple(slice(s, s + n) for s, n in zip(shard.global_offset, shard.shape, strict=True))
            here = tuple(slice(s, s + n) for s, n in zip(shard.local_offset, shard.shape, strict=True))
            assert torch.equal(buffers[shard.local][here], stored[shard.tensor][there]), shard
    [first, second] = [ranks[rank]["0.output_layer.weight"] for rank in (2, 3)]
    assert torch.equal(first, second) and "0.output_layer.weight" not in ranks[0]
    assert 0.5 < first.std() * 32**0.5 / 0.02 < 1.5
    assert torch.equal(ranks[2]["0.output_layer.bias"], torch.zeros(1))
    [again] = load(directory)[1]
    assert torch.equal(again["0.output_layer.weight"], first)  # Only the seed decides, not the layout.
    [other] = load(directory, start=ValueHeadInit(seed=6))[1]
    assert not torch.equal(other["0.output_layer.weight"], first)


def test_a_reward_models_head_is_taken_and_its_bias_is_zero(tmp_path, caplog) -> None:
    directory = make(tmp_path / "reward", "ForSequenceClassification", "Llama", num_labels=1)
    with caplog.at_level(logging.INFO):
        _, [buffers], report = load(directory)
    assert report.fresh == ("score.bias",) and "has no bias, which starts at 0" in caplog.text
    stored = load_file(directory / "model.safetensors")
    assert torch.equal(buffers["0.output_layer.weight"], stored["score.weight"])
    assert report.bytes_read == sum(tensor.nbytes for tensor in stored.values())


@pytest.mark.parametrize(("family", "dtype"), [("Qwen2", torch.float32), ("Qwen3", torch.bfloat16)])
def test_a_critic_is_loaded_and_exported_bit_for_bit(tmp_path, family, dtype) -> None:
    directory = make(tmp_path / "critic", "ForTokenClassification", family, dtype, num_labels=1)
    layout, [buffers], report = load(directory)
    assert report.fresh == ()
    export_to_huggingface(tmp_path / "again", directory, layout, buffers, None)
    assert first_difference(directory, tmp_path / "again") is None
    huggingface_to_megatron(directory, tmp_path / "megatron", tensor=2, pipeline=2)
    megatron_to_huggingface(tmp_path / "megatron", tmp_path / "back")
    assert first_difference(directory, tmp_path / "back") is None
    assert first_difference(directory, tmp_path / "megatron") is None


def test_a_reward_model_of_gemma_3_becomes_a_critic_bit_for_bit(tmp_path) -> None:
    """transformers has no class for the tokens of a Gemma 3: the critic's is named after that for sequences."""
    rope = {"rope_type": "default", "rope_theta": 1000.0}
    fields = {"head_dim": 8, "rope_parameters": {"full_attention": rope, "sliding_attention": rope}}
    fields |= {"sliding_window_pattern": 2, "num_labels": 1}
    directory = make(tmp_path / "reward", "ForSequenceClassification", "Gemma3Text", **fields)
    layout, [buffers], report = load(directory)
    assert report.fresh == ("score.bias",)
    export_to_huggingface(tmp_path / "critic", directory, layout, buffers, None)
    config = json.loads((tmp_path / "critic" / "config.json").read_text())
    assert config["architectures"] == ["Gemma3TextForTokenClassification"]
    again, [read], _ = load(tmp_path / "critic", ParallelLayout(world_size=1))
    assert again.architecture == layout.architecture and all(torch.equal(read[name], buffers[name]) for name in buffers)


@pytest.mark.parametrize(
    ("head", "fields"),
    [
        ("ForCausalLM", {"tie_word_embeddings": True}),
        ("ForCausalLM", {}),
        ("ForSequenceClassification", {"num_labels": 1}),
    ],
)
def test_a_critic_from_another_model_is_exported_as_transformers_loads_it(tmp_path, head, fields) -> None:
    directory = make(tmp_path / "source", head, dtype=torch.bfloat16, **fields)
    layout, [buffers], _ = load(directory)
    report = export_to_huggingface(tmp_path / "critic", directory, layout, buffers, None)
    assert report.num_tensors == len(layout.tensors)
    model, found = transformers.AutoModelForTokenClassification.from_pretrained(
        tmp_path / "critic", output_loading_info=True
    )
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), found
    assert model.config.num_labels == 1 and model.config.architectures == ["Qwen2ForTokenClassification"]
    before, after = load_file(directory / "model.safetensors"), load_file(tmp_path / "critic" / "model.safetensors")
    assert after.keys() == layout.tensors.keys() and all(t.dtype == torch.bfloat16 for t in after.values())
    assert all(torch.equal(after[name], before[name]) for name in after.keys() & before.keys())
    assert torch.equal(after["score.weight"], buffers["0.output_layer.weight"].to(torch.bfloat16))
    assert critic_architecture(tmp_path / "critic", directory if head == "ForCausalLM" else None)
    _, [again], _ = load(tmp_path / "critic")
    assert torch.equal(again["0.decoder.final_layernorm.weight"], buffers["0.decoder.final_layernorm.weight"])


def test_random_layers_are_the_random_policys(tmp_path) -> None:
    policy = read_architecture(make(tmp_path / "policy"))
    layouts = [megatron_layout(a, SINGLE, torch.float32) for a in (policy, policy.with_value_head())]
    buffers = [empty(layout, 0) for layout in layouts]
    initialize_randomly(3, layouts[0], 0, buffers[0])
    assert initialize_critic_randomly(3, layouts[1], 0, buffers[1], START).fresh == ("score.weight", "score.bias")
    shared = buffers[0].keys() & buffers[1].keys() - {"0.output_layer.weight"}
    assert len(shared) == len(buffers[0]) - 1
    assert all(torch.equal(buffers[0][name], buffers[1][name]) for name in shared)


@pytest.mark.parametrize("head", ["ForSequenceClassification", "ForTokenClassification"])
def test_a_head_of_several_labels_is_refused(tmp_path, head) -> None:
    directory = make(tmp_path / "many", head, num_labels=3)
    with pytest.raises(ValueError, match=r"score.weight is \(3, 32\), a critic's is \(1, 32\)"):
        critic_architecture(directory)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": 64}, "hidden_size 64 and 32"),
        ({"num_hidden_layers": 2}, "num_layers 2 and 4"),
        ({"vocab_size": 300}, "vocab_size 300 and 301"),
        ({"family": "Qwen3", "head_dim": 4}, "model_type qwen3 and qwen2"),
    ],
)
def test_a_critic_of_another_model_is_refused_with_both_numbers(tmp_path, fields, message) -> None:
    policy = make(tmp_path / "policy")
    other = make(tmp_path / "other", "ForTokenClassification", num_labels=1, **fields)
    with pytest.raises(ValueError, match=message):
        critic_architecture(other, policy)
    same = make(tmp_path / "same", "ForTokenClassification", num_labels=1, tie_word_embeddings=True)
    assert critic_architecture(same, policy).hidden_size == 32


def test_a_critic_with_another_tokenizer_is_refused_with_both_numbers(tmp_path) -> None:
    policy, critic = make(tmp_path / "policy"), make(tmp_path / "critic", "ForTokenClassification", num_labels=1)

    def tokenizer(directory: Path, words: list[str]) -> None:
        content = {"model": {"vocab": {word: i for i, word in enumerate(words)}}, "added_tokens": []}
        content["added_tokens"] = [{"id": len(words), "content": "<end>"}]
        (directory / "tokenizer.json").write_text(json.dumps(content))

    tokenizer(policy, ["a", "b", "c"])
    assert critic_architecture(critic, policy)  # a directory without a tokenizer says nothing about it
    tokenizer(critic, ["a", "b", "c"])
    assert critic_architecture(critic, policy)
    tokenizer(critic, ["a", "c"])
    with pytest.raises(ValueError, match="3 and 4 tokens, 3 of them not the same"):
        critic_architecture(critic, policy)


def test_broken_directories_are_refused(tmp_path) -> None:
    directory = make(tmp_path / "critic", "ForTokenClassification", num_labels=1)
    tensors = load_file(directory / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if n != "score.weight"}, directory / "model.safetensors")
    with pytest.raises(ValueError, match="Qwen2ForTokenClassification without score.weight"):
        critic_architecture(directory)
    save_file({n: t for n, t in tensors.items() if n != "model.norm.weight"}, directory / "model.safetensors")
    with pytest.raises(ValueError, match="1 missing: model.norm.weight"):
        load(directory)
    with pytest.raises(ValueError, match="no config.json"):
        critic_architecture(tmp_path / "nowhere")


def test_a_critic_is_no_policy(tmp_path) -> None:
    directory = make(tmp_path / "critic", "ForTokenClassification", num_labels=1)
    with pytest.raises(ValueError, match="Qwen2ForTokenClassification.*only"):
        read_architecture(directory)
