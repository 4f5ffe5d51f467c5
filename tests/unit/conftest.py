"""Tiny model directories made by transformers: six families, tied and untied, a vocabulary that no padding fits."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from tests.examples import examples

# A machine that is busy takes long for an example that is quick.
settings.register_profile("without deadlines", deadline=None, max_examples=examples(100))
settings.load_profile("without deadlines")


@pytest.fixture
def gpu_3(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process uses GPU 3. As CUDA has it, the current device is a property of the thread, and 0 in a new one."""
    current = threading.local()
    current.device = 3
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(current, "device", 0))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(current, "device", device))


# Family -> (its configuration, its model) in transformers, which are imported when a model is made.
MODELS = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
    "gemma3_text": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "gemma3": ("Gemma3Config", "Gemma3ForConditionalGeneration"),
}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
}
GEMMA3_SIZES = {"query_pre_attn_scalar": 12, "sliding_window": 4, "sliding_window_pattern": 2}
EXPERT_SIZES = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}
SIZES = {
    "vocab_size": 301,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "head_dim": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
}


def _beside_vision(text: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a Gemma 3 with a vision tower, as the 4B model is published."""
    vision = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 16, "patch_size": 8, "vision_use_head": False}
    tied = text["tie_word_embeddings"]
    return {"text_config": text, "vision_config": vision, "mm_tokens_per_image": 4, "tie_word_embeddings": tied}


GOLDEN_PATH = Path(__file__).parents[1] / "golden" / "golden.json"


class Section:
    """A section of golden.json. `unread()` lists the leaves that no check has read, except notes."""

    def __init__(self, content: dict[str, Any], path: str) -> None:
        self.content = content
        self.path = path
        self.read: set[str] = set()
        self.children: dict[str, Section] = {}

    def __getitem__(self, key: str) -> Any:
        value = self.content[key]
        if isinstance(value, dict):
            return self.children.setdefault(key, Section(value, f"{self.path}.{key}"))
        self.read.add(key)
        return value

    def __contains__(self, key: str) -> bool:
        return key in self.content

    def keys(self) -> list[str]:
        return list(self.content)

    def unread(self) -> list[str]:
        missing = []
        for key, value in self.content.items():
            if isinstance(value, dict):
                child = self.children.get(key)
                missing += child.unread() if child else [f"{self.path}.{key}"]
            elif key not in self.read and key != "note":
                missing.append(f"{self.path}.{key}")
        return missing


@pytest.fixture(scope="session")
def golden_file() -> dict[str, Any]:
    return json.loads(GOLDEN_PATH.read_text(encoding="utf-8"))


@pytest.fixture
def golden_section() -> type[Section]:
    return Section


@pytest.fixture
def make_model_directory(tmp_path: Path) -> Callable[..., Path]:
    """make_model_directory(family, tied=..., dtype=..., name=..., shard=..., **sizes) -> directory with random weights."""

    def make(
        family: str, *, tied: bool = False, dtype=torch.float32, name: str = "model", shard: str = "50GB", **sizes
    ) -> Path:
        import transformers

        config_class, model_class = (getattr(transformers, each) for each in MODELS[family])
        torch.manual_seed(0)
        fields = {**SIZES, "tie_word_embeddings": tied, **(EXPERT_SIZES if family == "qwen3_moe" else {})}
        if family.startswith("gemma3"):
            fields |= {**GEMMA3_SIZES, "rope_parameters": GEMMA3_ROPE}
        fields |= sizes
        model = model_class(config_class(**(_beside_vision(fields) if family == "gemma3" else fields)))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter)
        directory = tmp_path / name
        model.to(dtype).save_pretrained(directory, max_shard_size=shard)
        return directory

    return make
