"""Names in a PEFT directory against the modules of transformers' model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_dapo.checkpoints.formats.peft import AdapterDescription, PeftAdapters, write_peft
from megatron_dapo.checkpoints.layouts.lora import LoraLayout
from megatron_dapo.checkpoints.layouts.megatron import megatron_layout
from megatron_dapo.models.config_json import read_architecture
from megatron_dapo.models.peft import CONFIG_FILE, PREFIX, TENSORS_FILE
from megatron_dapo.parallel.layout import ParallelLayout

TARGETS = ("q_proj", "down_proj")


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "gemma3"])
def test_adapters_are_of_the_decoder_s_modules_and_no_others(
    family: str, tmp_path: Path, make_model_directory: Callable[..., Path]
) -> None:
    """`target_modules` is read as PEFT reads it: a list names the ends of modules, a string is an expression for all of a name."""
    from transformers import AutoModelForCausalLM

    base = make_model_directory(family)
    specs = LoraLayout(megatron_layout(read_architecture(base), ParallelLayout(world_size=1), torch.float32), 2, TARGETS).tensors
    write_peft(tmp_path / "adapter", AdapterDescription(2, 4.0, TARGETS, str(base), ""), specs, lambda name: torch.ones(specs[name].shape))

    model = AutoModelForCausalLM.from_pretrained(base)
    layers = [name for name, _ in model.named_modules() if ".layers." in name and name.endswith(TARGETS)]
    decoder = {name for name in layers if "vision" not in name}
    assert len(decoder) == 8 and (len(layers) > 8) == (family == "gemma3")
    targets = json.loads((tmp_path / "adapter" / CONFIG_FILE).read_text())["target_modules"]
    adapted = {name for name in layers if isinstance(targets, list) or re.fullmatch(targets, name)}
    tensors = load_file(tmp_path / "adapter" / TENSORS_FILE)
    assert adapted == decoder
    with PeftAdapters(tmp_path / "adapter") as stored:
        stored.check(read_architecture(base).shapes(), TARGETS)
        assert stored.specs == specs
    assert set(tensors) == {f"{PREFIX}{name}.{kind}.weight" for name in decoder for kind in ("lora_A", "lora_B")}
