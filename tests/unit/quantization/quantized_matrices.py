"""The quantized matrices of a directory, read without the code under test."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open


def quantized_matrices(directory: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Return module name -> its stored tensors, for every quantized matrix."""
    modules: dict[str, dict[str, torch.Tensor]] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():
                module, _, key = name.rpartition(".")
                modules.setdefault(module, {})[key] = file.get_tensor(name)
    return {name: each for name, each in modules.items() if each.keys() & {"weight_scale", "weight_scale_inv"}}
