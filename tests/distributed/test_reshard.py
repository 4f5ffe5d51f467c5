"""Load, sync, Megatron -> Megatron and export across four gloo processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from launcher import run_distributed
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

WORKER = Path(__file__).with_name("reshard_worker.py")
WORLD_SIZE = 4


def _model(directory: Path, config_class, model_class, *, tied: bool) -> Path:
    torch.manual_seed(0)
    config = config_class(
        vocab_size=301,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=8,
        tie_word_embeddings=tied,
    )
    model = model_class(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model.save_pretrained(directory)
    return directory


@pytest.mark.parametrize(
    ("tied", "scenarios"),
    [(True, ["sync", "export", "replicas"]), (False, ["megatron", "ranges", "subgroup", "mismatch"])],
)
def test_four_ranks(tied, scenarios, tmp_path):
    classes = (Qwen2Config, Qwen2ForCausalLM) if tied else (Qwen3Config, Qwen3ForCausalLM)
    directory = _model(tmp_path / "model", *classes, tied=tied)
    arguments = {"scenarios": scenarios, "directory": str(directory), "output": str(tmp_path)}
    run_distributed(str(WORKER) + ":run", WORLD_SIZE, arguments)
