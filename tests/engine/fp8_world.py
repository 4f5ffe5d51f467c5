"""A small model whose layers divide into blocks of 128, and trainer ranks as threads that sync it in FP8."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from sync_simulation import World
from test_sglang_layout import SGLANG_FIELDS, YARN
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from megatron_dapo.bridge.fp8_weights import Fp8Weights
from megatron_dapo.bridge.sync_plan import SyncPlan
from megatron_dapo.checkpoints.layouts.fp8 import Fp8EngineLayout, Fp8SourceLayout, read_parameters
from megatron_dapo.ops.fp8 import quantize_weight
from megatron_dapo.reshard.planner import plan
from tools.prove_resume import QUICKSTART

# Two layers, the second of experts in two groups.
GROUPED = {
    "moe_intermediate_size": 256,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT = {
    "q_lora_rank": 256,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "rope_parameters": {**YARN, "original_max_position_embeddings": 256},
}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True}
FAMILIES = {
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM, {**GROUPED, **LATENT, **SGLANG_FIELDS}),
    "glm4_moe": (Glm4MoeConfig, Glm4MoeForCausalLM, {**GROUPED, "n_group": 1, "attention_bias": True, "use_qk_norm": True}),
    "glm4_moe_lite": (Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM, {**GROUPED, "n_group": 1, **LATENT}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, EXPERTS),
    "qwen3_next": (Qwen3NextConfig, Qwen3NextForCausalLM, {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 256}),
    "qwen3_5_text": (Qwen3_5TextConfig, Qwen3_5ForCausalLM, DELTA),
    "gemma3_text": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {"tie_word_embeddings": True, "query_pre_attn_scalar": 64, "sliding_window": 6, "sliding_window_pattern": 2},
    ),
}


def save_model(directory: Path, family: str = "qwen3", **changes: Any) -> Path:
    """A model with random weights far from uniform: hidden 256, 2 layers, 4 heads of 64, an odd vocabulary."""
    config_class, model_class, of_family = FAMILIES[family]
    config = config_class(
        **{
            "vocab_size": 301,
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "max_position_embeddings": 1024,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "dtype": "float32",
            **of_family,
            **changes,
        }
    )
    torch.manual_seed(0)
    model = model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.mul_(3.0)
    model.save_pretrained(directory)
    if family == "qwen3_next":
        add_rope_theta(directory)
    return directory


def add_rope_theta(directory: Path) -> None:
    """Write rope_theta at the top level of config.json, as published configs of Qwen3-Next do. SGLang reads it only there, and
    transformers 5 writes it into rope_parameters."""
    config = json.loads((directory / "config.json").read_text())
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    (directory / "config.json").write_text(json.dumps(config))


CUT_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 6}  # heads of 64 rows: TP 2 cuts them inside blocks


def save_quickstart_model(directory: Path, family: str = "qwen3", **changes: Any) -> Path:
    """The same with the quickstart's tokenizer."""
    base = QUICKSTART / "base_model"
    vocab_size = json.loads((base / "config.json").read_text())["vocab_size"]
    save_model(directory, family, **{"vocab_size": vocab_size, "pad_token_id": 0, **changes})
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(base / name, directory / name)
    return directory


# Settings of a run with that model: its weights are untrained and solve nothing.
RANDOM_MODEL_SETTINGS = (
    'sglang.quantization="fp8"',
    "sglang.parity_interval=1",
    "rollout.filter_groups=false",
    "rollout.oversample=1.0",
    "rollout.max_staleness=0",
    "sglang.fp8_step0_max_mean_abs=0.2",
)
# Servers against the trainer with the same FP8 weights, and against what is trained: mean and largest in nats.
PARITY = re.compile(r"parity with server 0 on \d+ prompts: mean \|d log-prob\| (\S+), max (\S+)$", re.M)
ROUNDING = re.compile(r"server 0 serves quantized weights: mean \|d log-prob\| (\S+), max (\S+) against", re.M)


def in_fp8(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Projections with the values they have in FP8; norms, biases, routers, gates, embedding and head as they are."""
    matrices = ("_proj.weight", "_proj_with_mqa.weight", "_qkvz.weight", "_qkv.weight", "_z.weight")
    return {n: _in_blocks(w) if n.endswith(matrices) else w for n, w in weights.items()}


def _in_blocks(weight: torch.Tensor) -> torch.Tensor:
    """Rows of zeros fill the last block."""
    rows = len(weight)
    return quantize_weight(torch.nn.functional.pad(weight, (0, 0, 0, -rows % 128))).widened()[:rows]


class Fp8World(World):
    """A `World` for an engine that has described its parameters."""

    def __init__(self, *arguments: Any, described: Sequence[Any], **fields: Any) -> None:
        super().__init__(*arguments, **fields)
        self.layout = Fp8EngineLayout(self.layout, read_parameters(self.layout, described))
        self.fp8 = Fp8SourceLayout(self.source, self.layout)
        self.reshard = plan(self.fp8, self.layout, ranks_per_node=self.nodes.ranks_per_node)
        self.plan = SyncPlan(self.reshard, self.layout, self.plan.bucket_bytes)

    def sources(self, model: dict[str, torch.Tensor]) -> list[Fp8Weights]:
        """Return the weights that each trainer rank sends. Ranks are built one after the other: the first round collects
        the magnitudes that they exchange, and the second one uses them."""
        largest: list[torch.Tensor] = []

        def exchange(magnitudes: torch.Tensor) -> None:
            largest.append(torch.maximum(largest[-1], magnitudes) if largest else magnitudes.clone())
            magnitudes.copy_(largest[-1])

        shards = [self.shards(model, rank) for rank in range(self.size)]
        for _ in range(2):
            made = [Fp8Weights(self.fp8, rank, own, exchange) for rank, own in enumerate(shards)]
        return made
