"""The state of Transformer Engine's delayed scaling: scales and the maxima they come from, of every FP8 module.

Other recipes have none. A pass that trains nothing must leave it as it was, or log-probs would change what the next
training pass computes; a checkpoint must hold it, or a resumed run would begin with scales of 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

DIRECTIONS = ("scaling_fwd", "scaling_bwd")
VALUES_A_PRODUCT = 3  # scales forward: of input, weight and output
NEW = {"scale": 1.0, "amax_history": 0.0}  # of a module that has not multiplied yet


def scales(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """Live tensors by "{chunk}.{path of the module}.{direction}.{scale or amax_history}"; none for other recipes."""
    return {
        f"{path}.{direction}.{name}": getattr(state, name)
        for path, module in _modules(chunks)
        for direction in DIRECTIONS
        if (state := module.fp8_meta.get(direction)) is not None
        for name in NEW
        if hasattr(state, name)
    }


@contextmanager
def keeping_scales(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Puts every scale and history back at the end; those that came into being are as if new."""
    before = {name: tensor.clone() for name, tensor in scales(chunks).items()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, tensor in scales(chunks).items():
                if name in before:
                    tensor.copy_(before[name])
                else:
                    tensor.fill_(NEW[name.rpartition(".")[2]])


def load_scales(
    chunks: Sequence[torch.nn.Module], tensors: Mapping[str, torch.Tensor], prepare: Callable[[Any], None]
) -> None:
    """Put back what `scales` gave. `prepare` makes the state of a module that has not multiplied yet. ValueError where
    the modules are others."""
    for path, module in _modules(chunks):
        forward = tensors.get(f"{path}.{DIRECTIONS[0]}.scale")
        if forward is not None and not any(direction in module.fp8_meta for direction in DIRECTIONS):
            # A module learns it in its first pass, and cannot make its state before.
            module.fp8_meta["num_gemms"] = forward.numel() // VALUES_A_PRODUCT
            prepare(module)
    here = scales(chunks)
    if set(here) != set(tensors):
        difference = sorted(set(here) ^ set(tensors))
        raise ValueError(f"state: scales of FP8 modules differ from the saved ones, first at {difference[0]!r}")
    with torch.no_grad():
        for name, tensor in here.items():
            tensor.copy_(tensors[name])


def _modules(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, Any]]:
    for index, chunk in enumerate(chunks):
        for path, module in chunk.named_modules():
            if isinstance(getattr(module, "fp8_meta", None), dict):
                yield f"{index}.{path}", module
