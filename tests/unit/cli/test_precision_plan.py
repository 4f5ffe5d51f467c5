"""The lines about precision: counted from facts of shape, held against the layout of every parameter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dapo.checkpoints.architecture import ModelArchitecture
from megatron_dapo.checkpoints.megatron_layout import megatron_layout
from megatron_dapo.cli.precision_plan import fullest_rank, precision_lines
from megatron_dapo.config import Config, config_from_dict, read_architecture
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


@pytest.mark.parametrize(
    ("document", "layout"),
    [
        (DENSE, ParallelLayout(1)),
        ({**DENSE, "tie_word_embeddings": True}, ParallelLayout(2, tensor=2)),
        (DENSE, ParallelLayout(8, tensor=2, pipeline=2, context=2)),
        ({**DENSE, "tie_word_embeddings": True}, ParallelLayout(4, pipeline=4)),
        (EXPERTS, ParallelLayout(8, expert=8)),
        (EXPERTS, ParallelLayout(8, **SEQUENCE, expert=4, expert_tensor=1)),
        (EXPERTS, ParallelLayout(16, **SEQUENCE, pipeline=2, expert=2)),
    ],
)
def test_matrices_are_those_of_the_layout(document: dict[str, Any], layout: ParallelLayout, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(document))
    tensors = megatron_layout(ModelArchitecture.from_config(document), layout, torch.bfloat16)
    right = {}
    for rank in range(layout.world_size):
        matrices = {name: spec for name, spec in tensors.local_specs(rank).items() if len(spec.shape) > 1}
        parts = {"experts": 0, "vocabulary": 0, "dense": 0}
        for name, spec in matrices.items():
            parts[_kind(name)] += spec.num_elements
        right[rank] = parts
    found = fullest_rank(read_architecture(tmp_path), layout)
    fullest = max(right.values(), key=lambda parts: sum(parts.values()))
    assert {"dense": found.dense, "experts": found.experts, "vocabulary": found.vocabulary} == fullest


def _kind(name: str) -> str:
    if ".experts." in name:
        return "experts"
    return "vocabulary" if "embedding" in name or "output_layer" in name else "dense"


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
    return precision_lines(config, read_architecture(tmp_path), layout)


def test_layers_padding_and_main_params_of_experts_in_fp8(tmp_path: Path) -> None:
    layout = ParallelLayout(8, **SEQUENCE, expert=4, expert_tensor=1, token_multiple=128)
    config = run_of(recipe="fp8_blockwise", num_layers_at_start_in_bf16=1)
    precision, padding, memory = lines_of(EXPERTS, config, layout, tmp_path)
    assert "fp8_blockwise: projections of attention and experts in layers 2 to 4 of 4, e4m3 x e4m3" in precision
    assert "layer 1, embedding, norms, router, attention in bfloat16" in precision
    assert "to a multiple of 256 tokens (128 on a rank); an expert's tokens where it multiplies them" in padding
    held = fullest_rank(read_architecture(tmp_path), layout)
    own = (held.dense + held.vocabulary) // 4 + held.experts // 2
    assert f"weights {2 * held.total / 1e6:.3g} MB (bfloat16)" in memory
    assert f"fp32 main params {4 * own / 1e6:.3g} MB (cut over 4 ranks, of experts 2)" in memory
    assert f"fp32 moments {8 * own / 1e6:.3g} MB" in memory


def test_a_float32_parameter_is_its_own_main_param(tmp_path: Path) -> None:
    config = run_of("float32", {"use_distributed_optimizer": False})
    precision, memory = lines_of(DENSE, config, ParallelLayout(2), tmp_path)
    assert precision == "precision: fp32 in all layers, in the type of the operands"
    assert "which are their own main params" in memory and "cut over" not in memory


def test_weights_held_as_fp8_take_a_byte(tmp_path: Path) -> None:
    config = run_of(recipe="fp8_blockwise", fp8_param=True)
    memory = lines_of(DENSE, config, ParallelLayout(1, token_multiple=128), tmp_path)[-1]
    held = fullest_rank(read_architecture(tmp_path), ParallelLayout(1))
    assert f"weights {held.dense / 1e6:.3g} MB (FP8) and {2 * held.vocabulary / 1e6:.3g} MB (bfloat16)" in memory
