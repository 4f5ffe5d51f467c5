"""Published models and recipes that are planned, and small configurations of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_dapo.config import Config, config_from_dict
from tests.unit.config.architectures import QWEN_7B, QWEN_14B, QWEN_32B, published

RECIPES = Path(__file__).resolve().parents[3] / "examples" / "recipes"


MODELS: Mapping[str, Mapping[str, Any]] = {
    "7B": QWEN_7B,
    "14B": QWEN_14B,
    "32B": QWEN_32B,
    "30B-A3B": published("Qwen3-30B-A3B-Base"),
    "235B-A22B": published("Qwen3-235B-A22B"),
}


def size_of(recipe: Path) -> str:
    """Return the name in MODELS of the model that a shipped recipe or layout is for, 32B where its name has none."""
    name = recipe.read_text(encoding="utf-8").partition("[run]")[2][:60]
    return next((size for size in MODELS if size.lower().replace("-", "_") in name), "32B")


# Of huggingface.co/Qwen/Qwen2.5-1.5B, whose steps and servers were measured.
QWEN_1_5B: Mapping[str, Any] = {
    **QWEN_7B,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}


def run_of(**sections: dict[str, Any]) -> Config:
    """A run of a bfloat16 model, with sections in addition."""
    model = {"path": "/m", "dtype": "bfloat16", **sections.pop("model", {})}
    data = {"train_paths": ["/t"], **sections.pop("data", {})}
    return config_from_dict({"model": model, "data": data, **sections})


def colocated(mem_fraction_static: float = 0.5, **settings: Any) -> dict[str, dict[str, Any]]:
    """The sections of servers on the trainer's GPUs."""
    sglang = {"placement": "colocated", "mem_fraction_static": mem_fraction_static, **settings}
    return {"rollout": {"engine": "sglang"}, "sglang": sglang}
