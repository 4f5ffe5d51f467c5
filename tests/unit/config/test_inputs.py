"""Inputs that are not there are all named at once."""

from __future__ import annotations

from pathlib import Path

from megatron_dapo.config import config_from_dict, missing_inputs


def test_missing_inputs_are_all_named(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("")
    tree = {
        "model": {"path": "model"},
        "data": {"train_paths": ["train.jsonl", "trian.jsonl"], "eval_paths": ["held.jsonl"]},
    }
    found = missing_inputs(config_from_dict(tree, directory=tmp_path))
    assert [violation.path for violation in found] == ["model.path", "data.train_paths", "data.eval_paths"]
    assert str(tmp_path / "train.jsonl") in found[1].suggestion
