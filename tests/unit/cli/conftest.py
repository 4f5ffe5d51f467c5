"""A recipe whose model directory has only a config.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.config.architectures import QWEN_7B

FACTS = {
    **QWEN_7B,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
}
RECIPE = """
[run]
total_steps = 7
[model]
path = "model"
[data]
train_paths = ["train.jsonl"]
eval_paths = ["heldout.jsonl"]
max_prompt_tokens = 64
[rollout]
prompts_per_step = 8
group_size = 4
max_response_tokens = 128
[reward.overlong_punishment]
enabled = true
max_length = 112
cache_length = 32
[training]
mini_batch_prompts = 2
micro_batch_tokens = 512
"""


QUICKSTART = Path(__file__).resolve().parents[3] / "examples" / "quickstart"


@pytest.fixture
def whole_recipe(recipe: Path) -> Path:
    """The same with a real model and real rows, which commands that start something read first."""
    (recipe.parent / "model" / "config.json").unlink()
    (recipe.parent / "model").rmdir()
    (recipe.parent / "model").symlink_to(QUICKSTART / "base_model")
    for name in ("train.jsonl", "heldout.jsonl"):
        lines = (QUICKSTART / name).read_text(encoding="utf-8").splitlines(keepends=True)
        (recipe.parent / name).write_text("".join(lines[:64]), encoding="utf-8")
    return recipe


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(FACTS))
    for name in ("train.jsonl", "heldout.jsonl"):
        (tmp_path / name).write_text("{}\n")
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path
