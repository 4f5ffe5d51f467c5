"""A recipe needs only a model and data: every other key has a default that fits."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from megatron_dapo.cli.main import app

SHAPE = {
    "model_type": "qwen2",
    "vocab_size": 128,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 4096,
}


def test_a_recipe_of_model_and_data_is_valid(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(SHAPE))
    (tmp_path / "train.jsonl").write_text("")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[model]\npath = "model"\n[data]\ntrain_paths = ["train.jsonl"]\n')
    result = CliRunner().invoke(app, ["train", str(recipe), "--dry-run", "--no-inputs"])
    assert result.exit_code == 0, result.output
    assert "512 prompts x 16 responses" in result.output


def test_a_requested_evaluation_needs_its_data(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[model]\npath = "model"\n[data]\ntrain_paths = ["t"]\n[evaluation]\ninterval = 5\n')
    result = CliRunner().invoke(app, ["train", str(recipe), "--dry-run"])
    assert result.exit_code == 2 and "data.eval_paths != () where evaluation.interval > 0" in result.output
