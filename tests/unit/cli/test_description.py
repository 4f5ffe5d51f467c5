"""The lines about precision: formats of layers and multiples of tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_dapo.cli.description import precision_lines
from megatron_dapo.config import Config, config_from_dict
from megatron_dapo.models.config_json import read_architecture
from megatron_dapo.parallel.layout import ParallelLayout

DENSE = {
    "model_type": "qwen3",
    "vocab_size": 1024,
    "hidden_size": 256,
    "head_dim": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
EXPERTS = {
    **DENSE,
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
SEQUENCE = {"tensor": 2, "sequence_parallel": True}


def run_of(dtype: str = "bfloat16", parallel: dict[str, Any] | None = None, **precision: Any) -> Config:
    return config_from_dict(
        {
            "model": {"path": "/m", "dtype": dtype},
            "precision": precision,
            "parallel": parallel or {},
            "data": {"train_paths": ["/t"], "eval_paths": ["/e"]},
        }
    )


def lines_of(document: dict[str, Any], config: Config, layout: ParallelLayout, tmp_path: Path) -> list[str]:
    (tmp_path / "config.json").write_text(json.dumps(document))
    return list(precision_lines(config, read_architecture(tmp_path), layout))


def test_layers_padding_and_main_params_of_experts_in_fp8(tmp_path: Path) -> None:
    layout = ParallelLayout(8, **SEQUENCE, expert=4, expert_tensor=1, token_multiple=128)
    config = run_of(recipe="fp8_blockwise", num_layers_at_start_in_bf16=1)
    precision, padding = lines_of(EXPERTS, config, layout, tmp_path)
    assert "fp8_blockwise: projections of attention and experts in layers 2 to 4 of 4, e4m3 x e4m3" in precision
    assert "layer 1, embedding, norms, router, attention in bfloat16" in precision
    assert "to a multiple of 256 tokens (128 on a rank); an expert's tokens where it multiplies them" in padding


def test_a_float32_model_is_named_by_its_type(tmp_path: Path) -> None:
    lines = lines_of(DENSE, run_of("float32"), ParallelLayout(2), tmp_path)
    assert lines == ["precision: fp32 in all layers, in the type of the operands"]
