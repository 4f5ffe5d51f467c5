"""The few facts of a model's shape that the validator needs, read from config.json without any model library."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ArchitectureFacts:
    """Sizes the parallel layout and the sequence lengths must fit."""

    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    hidden_size: int
    intermediate_size: int
    max_position_embeddings: int
    num_experts: int = 0  # 0: dense
    moe_intermediate_size: int = 0  # of one expert
    has_dense_layers: bool = True
    head_dim: int = 0  # 0: hidden_size / num_attention_heads
    vocab_size: int = 0  # 0: not said
    tie_word_embeddings: bool = True

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads


_KEYS = {
    "num_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "max_position_embeddings": "max_position_embeddings",
}


def read_architecture(folder: str | Path) -> ArchitectureFacts:
    """Facts of the Hugging Face model in `folder`. Raises ValueError naming what the folder lacks."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"model.path {folder}: no config.json there; name a Hugging Face model folder")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid JSON ({error}); copy the model folder again") from None
    document = document if isinstance(document, dict) else {}
    missing = [key for key in _KEYS.values() if not isinstance(document.get(key), int)]
    if missing:
        raise ValueError(f"{path}: no whole number under {', '.join(missing)}; not a decoder this package knows")
    facts = {name: document[key] for name, key in _KEYS.items()}
    kv_heads = document.get("num_key_value_heads") or facts["num_attention_heads"]
    experts = document.get("num_experts") or document.get("num_local_experts") or 0
    sparse_step = document.get("decoder_sparse_step") or 1
    return ArchitectureFacts(
        **facts,
        num_key_value_heads=kv_heads,
        num_experts=experts,
        moe_intermediate_size=document.get("moe_intermediate_size") or 0,
        has_dense_layers=not experts or sparse_step > 1 or bool(document.get("mlp_only_layers")),
        head_dim=document.get("head_dim") or 0,
        vocab_size=document.get("vocab_size") or 0,
        tie_word_embeddings=bool(document.get("tie_word_embeddings", True)),
    )
