"""Tensors of all experts of a layer in a Hugging Face checkpoint, read and written as one tensor an expert.

| stored | content |
|---|---|
| experts.gate_up_proj [experts, 2 inner, hidden] | gate rows above up rows, and down_proj [experts, hidden, inner] (Qwen3.5) |
| experts.gate_up_proj [experts, hidden, 2 inner] | transposed, as is down_proj, if there is a gate_up_proj_bias (gpt-oss) |
| experts.gate_up_proj_blocks, _scales | the latter's values in MXFP4, not transposed |

MXFP4 (OCP Microscaling Formats, version 1.0): 32 neighbors of a row share a power of two, whose exponent is a byte minus 127; each
is one of 16 numbers of 4 bits (e2m1), two in a byte, the first in its lower half.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron_dapo.checkpoints.formats.safetensors import SafetensorsReader
from megatron_dapo.models.parts.biased_experts import stored_expert
from megatron_dapo.reshard.layout import TensorSpec
from megatron_dapo.reshard.slices import Slice

BLOCK = 32  # values that share an exponent
_BLOCKS, _SCALES, _BIAS = "_blocks", "_scales", "_bias"
_STACK = re.compile(r"(model\.layers\.\d+\.mlp\.experts\.)((?:gate_up_proj|down_proj)(?:_bias|_blocks)?)")
_SEPARATE = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


class StoredStack(NamedTuple):
    """A stored tensor of a layer's experts."""

    reader: SafetensorsReader
    stored: str
    spec: TensorSpec


@dataclass(frozen=True)
class ExpertTensor:
    """An expert's tensor in a stored one."""

    stack: StoredStack
    expert: int
    spec: TensorSpec
    row: int = 0  # its first one
    is_transposed: bool = False

    def read(self, out: torch.Tensor, bounds: Slice) -> None:
        """Fill `out` with `bounds` of it."""
        if len(bounds.shape) == 1:
            self.stack.reader.read(self.stack.stored, out[None], Slice((self.expert, *bounds.offset), (1, *bounds.shape)))
            return
        (row, column), (rows, columns) = bounds
        if not self.is_transposed:
            place = Slice((self.expert, self.row + row, column), (1, rows, columns))
            self.stack.reader.read(self.stack.stored, out[None], place)
            return
        turned = torch.empty((1, columns, rows), dtype=self.spec.dtype)
        self.stack.reader.read(self.stack.stored, turned, Slice((self.expert, column, row), (1, columns, rows)))
        out.copy_(turned[0].T)


@dataclass(frozen=True)
class PackedExpertTensor:
    """An expert's matrix in MXFP4; it is bfloat16, which holds each of its values."""

    blocks: StoredStack
    scales: StoredStack
    expert: int
    spec: TensorSpec

    def read(self, out: torch.Tensor, bounds: Slice) -> None:
        """Fill `out` with `bounds` of it."""
        (row, column), (rows, columns) = bounds
        first, last = column // BLOCK, -(-(column + columns) // BLOCK)
        codes = torch.empty((1, rows, last - first, BLOCK // 2), dtype=torch.uint8)
        exponents = torch.empty(codes.shape[:-1], dtype=torch.uint8)
        place, shape = (self.expert, row, first), tuple(exponents.shape)
        self.blocks.reader.read(self.blocks.stored, codes, Slice((*place, 0), tuple(codes.shape)))
        self.scales.reader.read(self.scales.stored, exponents, Slice(place, shape))
        out.copy_(dequantized(codes[0], exponents[0])[:, column - first * BLOCK :][:, :columns])


def dequantized(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Return the values [rows, 32 n] bfloat16 of codes [rows, n, 16] and exponents [rows, n] in MXFP4."""
    values = torch.cat((_E2M1, -_E2M1)).to(torch.bfloat16)
    pairs = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    return torch.ldexp(values[pairs.int()], exponents[..., None].int() - 127).flatten(1)


def separate(stacks: Mapping[str, StoredStack]) -> dict[str, tuple[str, ExpertTensor | PackedExpertTensor]]:
    """Return the name of each expert's tensor -> the tensor that holds it, and its place, for all tensors of a checkpoint.

    Raise ValueError for one whose shape, or whose scales, do not fit.
    """
    return {
        name: (whole, tensor)
        for whole in stacks
        if (match := _STACK.fullmatch(whole)) is not None
        for name, tensor in _separate(match[1], match[2], stacks)
    }


def scales_of(name: str) -> str | None:
    """Return the name of the scales of a stored tensor in MXFP4; None if it is none."""
    match = _STACK.fullmatch(name)
    return name.removesuffix(_BLOCKS) + _SCALES if match is not None and name.endswith(_BLOCKS) else None


def _separate(
    prefix: str, kind: str, stacks: Mapping[str, StoredStack]
) -> Iterator[tuple[str, ExpertTensor | PackedExpertTensor]]:
    stack = stacks[prefix + kind]
    shape, dtype = stack.spec
    if kind.endswith(_BLOCKS):
        kind, scales = kind.removesuffix(_BLOCKS), stacks.get(prefix + kind.removesuffix(_BLOCKS) + _SCALES)
        if len(shape) != 4 or shape[-1] != BLOCK // 2 or dtype != torch.uint8:
            raise ValueError(f"{stack.stored} {shape} {dtype} is not MXFP4: [experts, rows, blocks, {BLOCK // 2}] of uint8")
        if scales is None or scales.spec != TensorSpec(shape[:-1], torch.uint8):
            stored = "missing" if scales is None else f"{scales.spec.shape} {scales.spec.dtype}"
            raise ValueError(
                f"{stack.stored}: its scales {kind}{_SCALES} are {stored}, uint8 {shape[:-1]} is needed; take another copy"
            )
        spec = TensorSpec((shape[1], shape[2] * BLOCK), torch.bfloat16)
        for expert in range(shape[0]):
            yield f"{prefix}{expert}.{kind}", PackedExpertTensor(stack, scales, expert, spec)
    elif kind.endswith(_BIAS) or f"{prefix}{kind}{_BIAS}" in stacks:
        if len(shape) != (2 if kind.endswith(_BIAS) else 3):
            raise ValueError(f"{stack.stored} {shape} does not hold the {kind} of a layer's experts")
        own = TensorSpec(tuple(reversed(shape[1:])), dtype)
        for expert in range(shape[0]):
            yield f"{prefix}{expert}.{kind}", ExpertTensor(stack, expert, own, is_transposed=True)
    else:
        yield from _untransposed(prefix, kind, stack)


def _untransposed(prefix: str, kind: str, stack: StoredStack) -> Iterator[tuple[str, ExpertTensor]]:
    parts, (shape, dtype) = _SEPARATE[kind], stack.spec
    if len(shape) != 3 or shape[1] % len(parts):
        raise ValueError(f"{stack.stored} {shape} does not hold {' and '.join(parts)} of a layer's experts")
    rows, columns = shape[1] // len(parts), shape[2]
    for expert in range(shape[0]):
        for place, projection in enumerate(parts):
            spec = TensorSpec((rows, columns), dtype)
            yield f"{prefix}{expert}.{projection}.weight", ExpertTensor(stack, expert, spec, place * rows)


def stored_specs(specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """Return the tensors of a checkpoint with those of experts that are stored together in one, at the first one's place."""
    stored: dict[str, TensorSpec] = {}
    for name, (shape, dtype) in specs.items():
        place = stored_expert(name)
        if place is None:
            stored[name] = TensorSpec(shape, dtype)
        else:
            stored[place.tensor] = TensorSpec((place.expert + 1, *reversed(shape)), dtype)
    return stored


class ExpertCollector:
    """Collects the tensors of experts that are stored together."""

    def __init__(self, specs: Mapping[str, TensorSpec]) -> None:
        self._specs = stored_specs(specs)
        self._begun: dict[str, tuple[torch.Tensor, set[int]]] = {}

    def add(self, name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor] | None:
        """Return what to store: the tensor, or that of all experts if this one is the last of them, None before.

        Raise ValueError for a repeated one, or another shape.
        """
        place = stored_expert(name)
        if place is None:
            return name, tensor
        spec = self._specs[place.tensor]
        whole, done = self._begun.setdefault(place.tensor, (torch.empty(spec.shape, dtype=spec.dtype), set()))
        if place.expert in done or tuple(tensor.shape) != tuple(reversed(spec.shape[1:])):
            raise ValueError(f"export: {name} {tuple(tensor.shape)} is written twice, or has another shape than {spec.shape[1:]}")
        whole[place.expert].copy_(tensor.T if place.is_matrix else tensor)
        done.add(place.expert)
        if len(done) < spec.shape[0]:
            return None
        del self._begun[place.tensor]
        return place.tensor, whole
