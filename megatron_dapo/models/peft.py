"""PEFT's directory format of LoRA adapters: adapter_config.json, and the names of the tensors next to it. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dapo.models.architecture import tensor_name
from megatron_dapo.models.lora import ADAPTED, LORA_A, adapter_shapes, chosen_targets, matrix_name
from megatron_dapo.untrusted import one_line, read_json

CONFIG_FILE, TENSORS_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # before the names of the adapted model
# Settings of peft.LoraConfig (0.21) with which adapters are not W + scale B A with one scale and rank.
_OTHER_SUMS = (
    *("use_dora", "lora_bias", "rank_pattern", "alpha_pattern", "modules_to_save", "layer_replication", "target_parameters"),
    *("trainable_token_indices", "alora_invocation_tokens", "use_qalora", "use_bdlora", "arrow_config", "kasa_config"),
)
_INITIALIZATIONS = (True, False, None, "gaussian", "eva", "orthogonal")  # others (pissa, olora, ...) change W as well


@dataclass(frozen=True)
class StoredAdapters:
    """What an adapter_config.json says."""

    rank: int
    scale: float  # the factor of B A
    base: str  # name or directory of the model that the adapters belong to, as their author wrote it; "": unknown


def read_adapter_config(directory: Path) -> StoredAdapters:
    """Read adapter_config.json. Raises ValueError, with the setting, for adapters that are not plain LoRA."""
    path = directory / CONFIG_FILE
    if not path.is_file():
        raise ValueError(f"{directory}: no {CONFIG_FILE}; name a directory that PEFT's save_pretrained wrote")
    document = read_json(path)
    if not isinstance(document, dict) or document.get("peft_type") != "LORA":
        raise ValueError(f"{path}: adapters of another kind than LoRA; merge them into the model and start from that")
    wanted: Mapping[str, Any] = {name: None for name in _OTHER_SUMS} | {"bias": "none"}
    others = [name for name, plain in wanted.items() if document.get(name, plain) not in (plain, None, False, {}, [])]
    if document.get("init_lora_weights", True) not in _INITIALIZATIONS:
        others.append("init_lora_weights")
    if others:
        settings = ", ".join(f"{name} = {one_line(document[name], 80)}" for name in others)
        raise ValueError(f"{path}: {settings}: not plain LoRA; merge them into the model (merge_and_unload) and start from that")
    rank: Any = document.get("r")
    alpha: Any = document.get("lora_alpha")
    if type(rank) is not int or rank < 1 or type(alpha) not in (int, float) or not 0 < alpha < math.inf:
        raise ValueError(f"{path}: r = {one_line(rank, 50)} and lora_alpha = {one_line(alpha, 50)} are not a rank and a factor")
    scale = alpha / (math.sqrt(rank) if document.get("use_rslora") else rank)
    return StoredAdapters(rank, scale, str(document.get("base_model_name_or_path") or ""))


def adapter_name(stored: str) -> str:
    """Return our name of a tensor in adapter_model.safetensors."""
    return tensor_name(stored.removeprefix(PREFIX))


def require_adapters(
    source: Path,
    stored: Mapping[str, tuple[int, ...]],
    shapes: Mapping[str, tuple[int, ...]],
    lora_rank: int,
    targets: Sequence[str] | None = None,
) -> None:
    """Raise ValueError unless `stored`, by our names, are adapters for the matrices of `shapes`: those named `targets`, all if
    it is empty, or with None any."""
    adapted = {matrix_name(name.removesuffix(LORA_A)) for name in stored if name.endswith(LORA_A)}
    found = tuple(name for name in ADAPTED if name in adapted)
    if not found:
        raise ValueError(f"{source}: none of its {len(stored)} tensors is an adapter of a linear layer")
    if targets is not None and set(found) != set(chosen_targets(shapes, targets)):
        listed = ", ".join(f'"{name}"' for name in found)
        raise ValueError(f"{source}: it has adapters for {', '.join(found)}; set model.lora.targets = [{listed}]")
    wanted = adapter_shapes(shapes, lora_rank, found)
    if different := [name for name in {**wanted, **stored} if stored.get(name) != wanted.get(name)]:
        name = different[0]
        words = f"{name} {stored.get(name, 'is missing')} there, {wanted.get(name, 'not in the model')} for model.path"
        raise ValueError(f"{source}: adapters of another model: {len(different)} tensors of {len(wanted)} differ, first {words}")
