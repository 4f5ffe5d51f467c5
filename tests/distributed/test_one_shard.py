"""The path of one shard: a traced weight sync against the list in docs/architecture.md."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from launcher import run_distributed
from transformers import Qwen3Config, Qwen3ForCausalLM

from megatron_dapo.ops.native_checksum import library
from tests.architecture_page import listed_files

WORKER = Path(__file__).with_name("shard_trace.py")
SECTION = "One shard, from the actor to the engine"


@pytest.mark.skipif(library() is None, reason="without a C compiler NumPy counts, in reshard/checksum.py")
def test_a_shard_passes_the_documented_files(tmp_path: Path) -> None:
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
    (tmp_path / "arenas").mkdir()
    arguments = {"model": str(tmp_path / "model"), "arenas": str(tmp_path / "arenas")}
    traced = run_distributed(f"{WORKER}:trace", 1, arguments)
    assert traced == listed_files(SECTION)


def test_the_path_is_short() -> None:
    files = listed_files(SECTION)
    assert len(files) == len(set(files)) <= 12
    assert len({file.split("/")[0] for file in files}) <= 3
