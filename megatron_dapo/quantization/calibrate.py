"""Quantize a transformers model in place with NVIDIA ModelOpt and write it. No other file imports ModelOpt."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from megatron_dapo.ops.fp8 import BLOCK, LARGEST, quantize_weight
from megatron_dapo.quantization.formats import Format
from megatron_dapo.quantization.stored import BLOCK_SCALES
from megatron_dapo.untrusted import read_json

logger = logging.getLogger(__name__)

SHARD_SIZE = "5GB"


def modelopt_version() -> str:
    """Return ModelOpt's version. Raises ValueError that says how to install it if it is missing."""
    try:
        return importlib.metadata.version("nvidia-modelopt")
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(
            "nvidia-modelopt is not installed: `make .venv-modelopt` puts it next to the trainer's environment, and "
            "PYTHONPATH=.venv-modelopt makes it visible"
        ) from None


@torch.no_grad()
def quantize_model(model: Any, entry: Format, sequences: Sequence[Sequence[int]]) -> None:
    """Insert ModelOpt's quantizers and calibrate them with the sequences, one at a time."""

    def forward(calibrated: Any) -> None:
        for sequence in sequences:
            calibrated(torch.tensor([list(sequence)], device=model.device), use_cache=False)

    with _quiet():
        from modelopt.torch import quantization

        quantization.quantize(model, getattr(quantization, entry.recipe), forward)
    if entry.name == "fp8_blockwise":
        _round_scales_to_powers_of_two(model)


def export(model: Any, entry: Format, directory: Path) -> None:
    """Write a Hugging Face directory of the quantized model, without its tokenizer."""
    with _quiet(), torch.inference_mode():
        from modelopt.torch.export import export_hf_checkpoint

        export_hf_checkpoint(model, export_dir=directory, max_shard_size=SHARD_SIZE)
    if entry.name == "fp8_blockwise":
        _name_blocks_as_engines_do(directory)


def _round_scales_to_powers_of_two(model: Any) -> None:
    """Set every amax so that the exported values and scales equal those of the trainer and its rollout, bit for bit.

    ModelOpt's scale of a block is amax / 448, the trainer's is the next power of two.
    """
    for module in model.modules():
        quantizer = getattr(module, "weight_quantizer", None)
        if quantizer is None or not quantizer.is_enabled:
            continue
        scales = quantize_weight(module.weight).scales
        quantizer.amax = (scales * LARGEST).reshape(quantizer.amax.shape).to(quantizer.amax.dtype)


def _name_blocks_as_engines_do(directory: Path) -> None:
    """Rewrite block scales in the layout of DeepSeek's checkpoints, which SGLang and transformers read.

    ModelOpt writes [rows / 128, 1, columns / 128, 1] under a name that no engine reads.
    """
    for file in sorted(directory.glob("*.safetensors")):
        _rewrite_scales(file)
    index = directory / "model.safetensors.index.json"
    if index.exists():
        content = read_json(index)
        content["weight_map"] = {_block_name(name): file for name, file in content["weight_map"].items()}
        _write_json(index, content)
    ignored = read_json(directory / "hf_quant_config.json")["quantization"]["exclude_modules"]
    (directory / "hf_quant_config.json").unlink()
    config = read_json(directory / "config.json")
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": [name for name in ignored if name != "model.embed_tokens"],
    }
    _write_json(directory / "config.json", config)


def _rewrite_scales(file: Path) -> None:
    with safe_open(file, "pt") as stored:
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 - no mapping
    renamed = {
        _block_name(name): tensor.float()[:, 0, :, 0].contiguous() if name.endswith(".weight_scale") else tensor
        for name, tensor in tensors.items()
    }
    save_file(renamed, file, metadata={"format": "pt"})


def _block_name(name: str) -> str:
    return f"{name.removesuffix('.weight_scale')}.{BLOCK_SCALES}" if name.endswith(".weight_scale") else name


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@contextlib.contextmanager
def _quiet() -> Any:
    """Keep ModelOpt's progress and warnings off standard output, which carries the result."""
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
