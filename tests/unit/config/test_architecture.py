"""Facts are read from config.json alone, and what is missing is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_dapo.config import config_from_dict, missing_inputs, read_architecture

DOCUMENT = {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
}


def test_facts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**DOCUMENT, "num_key_value_heads": 2, "num_experts": 8}))
    facts = read_architecture(tmp_path)
    assert (facts.num_layers, facts.num_attention_heads, facts.num_key_value_heads, facts.num_experts) == (4, 8, 2, 8)


def test_heads_without_groups(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DOCUMENT))
    assert read_architecture(tmp_path).num_key_value_heads == 8


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "no config.json"), ("{", "not JSON"), (json.dumps({"hidden_size": 3}), "num_hidden_layers")],
)
def test_errors_name_the_problem(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_architecture(tmp_path)


def test_missing_inputs_are_all_named(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("")
    tree = {
        "model": {"path": "model"},
        "data": {"train_paths": ["train.jsonl", "trian.jsonl"], "eval_paths": ["held.jsonl"]},
    }
    found = missing_inputs(config_from_dict(tree, directory=tmp_path))
    assert [violation.path for violation in found] == ["model.path", "data.train_paths", "data.eval_paths"]
    assert str(tmp_path / "train.jsonl") in found[1].suggestion
