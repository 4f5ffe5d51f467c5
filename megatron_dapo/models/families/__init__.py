"""Supported families of decoders by model_type; a module describes one family and its variants."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_dapo.hooks import FAMILY, load_hook
from megatron_dapo.models.families import deepseek, gemma3, glm, gpt_oss, kimi, llama, qwen, qwen3_next
from megatron_dapo.models.family import Family
from megatron_dapo.untrusted import read_json

FAMILIES: dict[str, Family] = {
    **llama.FAMILIES,
    **qwen.FAMILIES,
    **gemma3.FAMILIES,
    **qwen3_next.FAMILIES,
    **deepseek.FAMILIES,
    **kimi.FAMILIES,
    **glm.FAMILIES,
    **gpt_oss.FAMILIES,
}
_SPARSE = "its attention reads only the tokens that an indexer chooses, which neither is trained here nor served"
# Types that users may expect next to supported ones -> the reason why they are not.
UNSUPPORTED = {"glm_moe_dsa": _SPARSE, "deepseek_v32": _SPARSE}
_BUILT_IN = frozenset(FAMILIES)


def language_model_fields(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the language model's fields of a parsed config.json, with those defaults that published configs of the family
    leave out. ValueError if two places disagree."""
    if not isinstance(document, Mapping):
        raise ValueError(f"config.json is no object but {type(document).__name__}")
    family = FAMILIES.get(str(document.get("model_type")))
    return dict(document) if family is None else family.language_model(document)


def add_family(path: str, directory: Path) -> None:
    """Add the `Family` that `path` names (model.family) under the model_type of the model in `directory`.

    ValueError if it cannot be imported, is not a Family, or the model_type already has one.
    """
    family = load_hook(path, FAMILY)
    if not isinstance(family, Family):
        raise ValueError(f"{FAMILY} = {path!r}: it is a {type(family).__name__}, not a megatron_dapo.Family")
    model_type = str(read_json(directory / "config.json").get("model_type"))
    if model_type in _BUILT_IN:
        raise ValueError(f'{FAMILY} = {path!r}: model_type {model_type!r} is supported without it; set {FAMILY} = ""')
    FAMILIES[model_type] = family
