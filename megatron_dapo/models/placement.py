"""Where a layer's tensors lie in a rank of Megatron or SGLang, as data: layouts execute it, plans count it.

Names are relative to a layer: "self_attn.q_proj.weight" is a tensor of a Hugging Face checkpoint,
"self_attention.linear_qkv.weight" a buffer of a rank. Nothing here depends on the rank: a placement says how a buffer is cut
over the `count` ranks of an axis (tensor-parallel ranks; for experts, those that an expert is cut over), and
`Rows.share` which part rank `index` holds.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_dapo.models.activations import Kept, TrainerCut
from megatron_dapo.precision import LinearSize

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Rows:
    """Rows of a tensor, cut over ranks in blocks that stay whole, such as heads.

    A rank holds blocks / count of them; with fewer blocks than ranks, count / blocks neighbors hold the same one. `blocks` may
    exceed the tensor's rows, the rest is padding.
    """

    name: str
    blocks: int
    block: int = 1  # rows
    field: str = ""  # config.json's name of the number of blocks
    replicates: bool = False  # there may be fewer blocks than ranks
    start: int = 0  # first row: several `Rows` may share a tensor that a checkpoint holds fused
    end: int | None = None  # row after the last one; None: the tensor's
    stride: int = 0  # rows from one block to the next; 0: `block`, so that they are consecutive

    def pieces(self, index: int, count: int) -> list[tuple[int, int]]:
        """Return (first row, number of rows) of each run of consecutive rows of rank `index` of `count`."""
        if not self.stride:
            return [self.share(index, count)]
        mine = range(index * self.blocks // count, (index + 1) * self.blocks // count)
        return [(self.start + block * self.stride, self.block) for block in mine]

    def share(self, index: int, count: int) -> tuple[int, int]:
        """Return the first row and the number of rows of rank `index` of `count`."""
        if self.blocks < count:
            return self.start + index * self.blocks // count * self.block, self.block
        rows = self.blocks // count * self.block
        return self.start + index * rows, rows


@dataclass(frozen=True)
class Whole:
    """A buffer that is a tensor, whole on every rank."""

    local: str
    name: str


@dataclass(frozen=True)
class Stack:
    """A buffer of each part's rows of a rank, one part below the other. A bias is a matrix without columns."""

    local: str
    parts: tuple[Rows, ...]


@dataclass(frozen=True)
class Interleaved:
    """A matrix of `units` repetitions of a unit, the next rows of each part, cut evenly over ranks by rows, not by units."""

    local: str
    units: int
    unit: tuple[Rows, ...]  # `blocks` is the number of units, `block` the rows of a part in one


@dataclass(frozen=True)
class CutColumns:
    """A buffer of a matrix's columns, cut over ranks like `Rows`."""

    local: str
    columns: Rows


@dataclass(frozen=True)
class PerExpert:
    """Buffers that each expert of a rank has, cut over the ranks that share it. `local` and `name` are prefixes with a
    place for the expert's number: on its rank, and in the model."""

    num_experts: int
    local: str
    name: str
    placements: tuple[Stack | CutColumns | Whole, ...]


@dataclass(frozen=True)
class StackedExperts:
    """SGLang's two buffers of all experts of a rank: w13 [n, 2 inner, hidden] of gate and up rows, w2 [n, hidden, inner]."""

    num_experts: int
    local: str  # prefix of both buffers
    name: str  # prefix of an expert's matrices, with a place for its number
    inner: int  # padding included
    # Gate and up are one matrix of neighboring rows, and w13 and w2 have biases; one of w2 is on the first rank that shares it.
    biased: bool = False


Placement = Whole | Stack | Interleaved | CutColumns | PerExpert | StackedExperts


@dataclass(frozen=True)
class EngineCut:
    """Ranks of an SGLang engine, and whether it pads sizes that they do not divide, as it does on a CPU."""

    tensor: int
    expert: int = 1
    pads: bool = False


class LayerPart(ABC):
    """A kind of part of a layer with its sizes: attention, MLP, experts. It knows its tensors on all three sides."""

    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return Hugging Face name -> shape, in the order of a forward pass."""

    @abstractmethod
    def megatron(self) -> Iterator[Placement]:
        """Yield the buffers of a Megatron rank."""

    @abstractmethod
    def sglang(self, engine: EngineCut) -> Iterator[Placement]:
        """Yield the buffers of an SGLang rank, in the order of its parameters."""

    @property
    def weights_per_token(self) -> int:
        """Elements of the matrices that a token is multiplied by."""
        return sum(math.prod(shape) for shape in self.shapes().values() if len(shape) == 2)

    @abstractmethod
    def linear_sizes(self) -> Iterator[LinearSize]:
        """Yield the sizes of the weights of linear layers that a precision recipe computes: not those of routers and gates."""

    @abstractmethod
    def kept(self, cut: TrainerCut) -> Kept:
        """Return the bytes per token that a trainer's rank keeps for the backward pass."""

    @property
    def float32(self) -> frozenset[str]:
        """Tensors that are fp32 in a model of any type."""
        return frozenset()

    def is_float32(self, placement: Placement) -> bool:
        """Return True if a buffer holds a tensor of `float32`."""
        if isinstance(placement, Stack):
            return placement.parts[0].name in self.float32
        return isinstance(placement, Whole) and placement.name in self.float32

    @property
    def never_trained(self) -> int:
        """Elements of a rank's parameters that no run trains."""
        return 0

    @property
    def attention_width(self) -> int:
        """Elements of a token's queries, which are multiplied by the keys and by the values of every token before it."""
        return 0

    @property
    def absorbed_width(self) -> int:
        """Elements of a cached token's vector that a decoding step multiplies, over all heads, if that may take longer than
        reading it; 0 for separate keys and values, whose reading takes longer."""
        return 0

    @property
    def fp32_products(self) -> int:
        """Elements that a token is multiplied by in fp32, besides weights, however long its sequence is."""
        return 0

    def cached_per_token(self, engine: EngineCut) -> int:
        """Return the elements of a token that an engine's rank caches."""
        return 0

    @property
    def state_elements(self) -> tuple[int, int]:
        """Elements of a sequence's state over all ranks: in the model's type, and in fp32."""
        return 0, 0


def check_cut(axis: str, count: int, placements: Iterable[Placement], owner: str) -> None:
    """Raise ValueError, naming the field of config.json, if `count` ranks of `owner` cannot share a size that is cut."""
    cut = [rows for placement in placements for rows in _cut_rows(placement)]
    for rows in sorted(cut, key=lambda one: not one.replicates):
        if rows.replicates and rows.blocks % count and count % rows.blocks:
            raise ValueError(
                f"{axis} parallel size {count} is neither a multiple nor a divisor of {rows.field} {rows.blocks}, which "
                f"{owner} needs"
            )
        if not rows.replicates:
            check_divides(axis, count, rows.field or rows.name, rows.blocks)


def check_divides(axis: str, parallel_size: int, field: str, size: int) -> None:
    """Raise ValueError unless the size of a parallel axis divides a size of the model."""
    if size % parallel_size:
        raise ValueError(f"{axis} parallel size {parallel_size} does not divide {field} {size}; choose a divisor")


def _cut_rows(placement: Placement) -> Iterator[Rows]:
    if isinstance(placement, Stack):
        yield from placement.parts
    elif isinstance(placement, CutColumns):
        yield placement.columns
    elif isinstance(placement, Interleaved):
        yield placement.unit[0]
        # It is cut by rows, not by units.
        yield Rows("", placement.units * sum(part.block for part in placement.unit), field="the rows of the fused QKV")


def local_shape(placement: Whole | Stack | Interleaved | CutColumns, shapes: Shapes, count: int) -> tuple[int, ...]:
    """Return the shape of a rank's buffer, equal on all ranks of the axis."""
    if isinstance(placement, Whole):
        return tuple(shapes[placement.name])
    if isinstance(placement, Stack):
        return (sum(rows.share(0, count)[1] for rows in placement.parts), *shapes[placement.parts[0].name][1:])
    if isinstance(placement, CutColumns):
        columns = placement.columns
        return (*shapes[columns.name][:-1], columns.share(0, count)[1])
    rows = placement.units * sum(part.block for part in placement.unit)
    return (rows // count, *shapes[placement.unit[0].name][1:])


def num_elements(placements: Iterable[Any], shapes: Shapes, count: int) -> int:
    """Return the elements of these buffers on a rank, padding included; experts are left out."""
    return sum(
        math.prod(local_shape(placement, shapes, count))
        for placement in placements
        if not isinstance(placement, (PerExpert, StackedExperts))
    )
