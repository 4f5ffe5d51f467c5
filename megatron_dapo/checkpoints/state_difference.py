"""Comparison of two saved training states, tensor by tensor, independent of the layouts that saved them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron_dapo.checkpoints.formats.saved_model import STEP, SavedModel


@dataclass(frozen=True)
class StateDifference:
    """Differences of one kind of tensor (parameter, master, exp_avg, exp_avg_sq, step) between two states."""

    kind: str
    num_elements: int  # compared
    num_different: int  # bitwise: NaN equals itself, -0.0 differs from 0.0
    largest: float  # absolute difference, infinite if one is NaN
    first: str = ""  # tensor and index of the first difference, or what is only in one state; "": equal


def compare_states(first: SavedModel, second: SavedModel) -> Iterator[StateDifference]:
    """Yield the differences of each kind, one tensor of both in memory at a time."""
    steps = [STEP] if first.is_trained and second.is_trained else []
    for kind in (*dict.fromkeys((*first.kinds, *second.kinds)), *steps):
        number = different = 0
        largest, where = 0.0, _only_in_one(first, second, kind)
        for name in (each for each in first.specs if not where and (kind == STEP or kind in first.kinds_of(each))):
            a, b = (_read(model, name, kind) for model in (first, second))
            unequal = (_bits(a) != _bits(b)).flatten()
            number += a.numel()
            if bool(unequal.any()):
                different += int(unequal.sum())
                largest = max(largest, _largest(a.flatten()[unequal], b.flatten()[unequal]))
                where = where or _place(name, a, b, int(unequal.nonzero()[0, 0]))
        yield StateDifference(kind, number, different, largest, where)


def _only_in_one(first: SavedModel, second: SavedModel, kind: str) -> str:
    """Return the first tensor that is only in one state or has a different shape or type there."""
    if kind != STEP and first.kinds.get(kind) != second.kinds.get(kind):
        return f"{kind} is {first.kinds.get(kind, 'missing')} and {second.kinds.get(kind, 'missing')}"
    for name in (*first.specs, *(name for name in second.specs if name not in first.specs)):
        a, b = first.specs.get(name), second.specs.get(name)
        if a != b:
            there = ["missing" if spec is None else f"{tuple(spec.shape)} {spec.dtype}" for spec in (a, b)]
            return f"{name} is {there[0]} and {there[1]}"
    return ""


def _read(model: SavedModel, name: str, kind: str) -> torch.Tensor:
    if kind != STEP:
        return model.read_tensor(name, kind)
    begin = next(stored for stored in model.slices_of(name) if not any(stored.bounds.offset))
    return torch.tensor(model.read_step(name, begin.file))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def _place(name: str, a: torch.Tensor, b: torch.Tensor, position: int) -> str:
    index = [int(each) for each in torch.unravel_index(torch.tensor(position), a.shape)] if a.dim() else []
    return f"{name}{index}: {a.flatten()[position].item():.9g} and {b.flatten()[position].item():.9g}"


def _largest(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).abs().nan_to_num(nan=torch.inf).max())
