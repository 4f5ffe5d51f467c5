"""The road of one sample: a traced train step against the list in docs/architecture.md."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from launcher import run_distributed
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.architecture_page import listed

WORKER = Path(__file__).with_name("sample_trace.py")
SECTION = "One sample, from the prompt to the micro-batch"


def documented() -> tuple[list[str], list[str]]:
    """Types and files that the document lists."""
    items = listed(SECTION)
    return [re.findall(r"`(\w+)`", item)[0] for item in items], re.findall(r"`([\w/]+\.py)`", "\n".join(items))


def test_a_sample_passes_the_documented_types_and_files(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("{}\n")
    arguments = {"model": str(tmp_path / "model"), "output": str(tmp_path / "run")}
    traced = run_distributed(f"{WORKER}:trace", 1, arguments)
    types, files = documented()
    assert traced["types"] == types
    assert sorted(traced["files"]) == sorted(set(files))


def test_the_road_is_short() -> None:
    types, files = documented()
    assert len(types) == len(set(types)) <= 12
    assert len(set(files)) <= 22
