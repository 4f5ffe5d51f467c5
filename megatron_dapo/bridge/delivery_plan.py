"""Buckets of a delivery: which trainer rank writes which part of which bucket of which engine rank.

Pure arithmetic on a `ReshardPlan` from the trainer's layout to the engines': every rank computes the same and needs no
communication for it but one comparison of the 32-byte `digest`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from megatron_dapo.parallel.reshard import layout
from megatron_dapo.parallel.reshard.boxes import Box, Coordinates
from megatron_dapo.parallel.reshard.delivery import PART_ALIGNMENT, Bucket, FilledParameter, Manifest, Part
from megatron_dapo.parallel.reshard.executors import Buffers
from megatron_dapo.parallel.reshard.layout import Layout, Piece, TensorSpec, piece_view
from megatron_dapo.parallel.reshard.planner import ReshardPlan, Transfer
from megatron_dapo.parallel.reshard.word_checksum import part_checksum, signed

DEFAULT_BUCKET_BYTES = 32 << 20
_FORMAT_VERSION = 2  # part of the digest


class EngineLayout(Layout, Protocol):
    """A layout of engines; rank = engine * tensor_parallel + rank within the engine."""

    @property
    def tensor_parallel(self) -> int: ...

    def local_specs(self, rank: int) -> Mapping[str, TensorSpec]:
        """Shape and element type of every parameter of an engine rank, in model order."""


@runtime_checkable
class PartSource(Protocol):
    """`Buffers` that are not in memory as they are delivered, and are better read part by part than whole."""

    def part(self, piece: Piece, box: Box) -> torch.Tensor:
        """Global box `box`, which lies in `piece`."""


class Write(NamedTuple):
    """Trainer rank `source` puts global box `box`, which lies in its `piece`, into `part` of a bucket."""

    part: Part
    source: int
    piece: Piece
    box: Box


class Segment(NamedTuple):
    """Bytes [start, stop) of a bucket, all written by one trainer rank."""

    start: int
    stop: int


@dataclass(frozen=True)
class PlannedBucket:
    """One bucket of one engine rank. What a trainer rank writes lies together: one `Segment` a source."""

    engine_rank: int
    index: int
    num_bytes: int
    writes: tuple[Write, ...]  # by source, each source's in the order in which it sends

    @property
    def header(self) -> Bucket:
        """What the engine rank is told about it."""
        return Bucket(self.index, self.num_bytes, tuple(write.part for write in self.writes))

    def writes_of(self, source: int) -> tuple[Write, ...]:
        return tuple(write for write in self.writes if write.source == source)

    @property
    def segments(self) -> dict[int, Segment]:
        """source -> its bytes."""
        starts: dict[int, int] = {}
        for write in self.writes:
            starts.setdefault(write.source, write.part.byte_offset)
        stops = [*list(starts.values())[1:], self.num_bytes]
        return {source: Segment(start, stop) for (source, start), stop in zip(starts.items(), stops)}


class DeliveryPlan:
    """The buckets of every engine rank, of at most `bucket_bytes` each; all its sources write into each of them.

    The parts of one parameter (a fused one included) stay in one bucket where they fit; a parameter larger than a
    bucket is cut along its rows. Engine ranks of one engine may have different numbers of buckets.

    Engine rank r is rank r + `rank_offset` of the reshard plan's destination: 0 where engines live on the trainer's
    machines (rank r beside rank r), the trainer's world size (with a `ShiftedLayout`) where they have their own.
    """

    def __init__(
        self,
        reshard: ReshardPlan,
        engines: EngineLayout,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        rank_offset: int = 0,
    ) -> None:
        if bucket_bytes < PART_ALIGNMENT:
            raise ValueError(f"bucket of {bucket_bytes} bytes: must be at least {PART_ALIGNMENT}")
        self.reshard = reshard
        self.engines = engines
        self.bucket_bytes = bucket_bytes
        self.rank_offset = rank_offset
        self._buckets: dict[int, tuple[PlannedBucket, ...]] = {}

    @property
    def digest(self) -> bytes:
        """32 bytes, equal exactly where the plans are."""
        numbers = (_FORMAT_VERSION, self.bucket_bytes, self.engines.tensor_parallel, self.rank_offset)
        return hashlib.sha256(f"delivery plan {numbers}".encode() + self.reshard.digest).digest()

    @property
    def num_engines(self) -> int:
        return self.engines.num_ranks // self.engines.tensor_parallel

    def ranks_of(self, engine: int) -> range:
        """Engine ranks of one engine."""
        size = self.engines.tensor_parallel
        return range(engine * size, (engine + 1) * size)

    def num_buckets(self, engine: int) -> int:
        """Rounds it takes to fill all ranks of an engine."""
        return max(len(self.buckets(rank)) for rank in self.ranks_of(engine))

    def buckets(self, engine_rank: int) -> tuple[PlannedBucket, ...]:
        if engine_rank not in self._buckets:
            packed = _pack(list(self._writes(engine_rank)), self._itemsizes(engine_rank), self.bucket_bytes)
            self._buckets[engine_rank] = tuple(
                PlannedBucket(engine_rank, index, num_bytes, writes) for index, (num_bytes, writes) in enumerate(packed)
            )
        return self._buckets[engine_rank]

    def sources(self, engine_rank: int) -> tuple[int, ...]:
        """Trainer ranks that write into an engine rank."""
        return tuple(sorted({write.source for bucket in self.buckets(engine_rank) for write in bucket.writes}))

    def num_bytes(self, engine_rank: int) -> int:
        """Bytes that an engine rank receives, in its own element type."""
        return sum(bucket.num_bytes for bucket in self.buckets(engine_rank))

    def manifest(self, engine_rank: int, delivery: str, session: str, version: int, number: int = 0) -> Manifest:
        """What `engine_rank` is promised."""
        filled = dict.fromkeys(self.parameter_names(engine_rank), 0)
        for transfer in self.reshard.receives(engine_rank + self.rank_offset):
            filled[transfer.destination_piece.local] += transfer.box.volume
        specs = self.engines.local_specs(engine_rank)
        parameters = {n: FilledParameter(tuple(s.shape), s.dtype, filled[n]) for n, s in specs.items()}
        return Manifest(delivery, session, version, len(self.buckets(engine_rank)), parameters, number)

    def parameter_names(self, engine_rank: int) -> tuple[str, ...]:
        return tuple(self.engines.local_specs(engine_rank))

    def _itemsizes(self, engine_rank: int) -> dict[str, int]:
        return {name: spec.dtype.itemsize for name, spec in self.engines.local_specs(engine_rank).items()}

    def _writes(self, engine_rank: int) -> Iterator[Write]:
        """Everything an engine rank receives, in the order of its parameters, no write larger than a bucket."""
        specs = self.engines.local_specs(engine_rank)
        by_name: dict[str, list[Transfer]] = {name: [] for name in specs}
        for transfer in self.reshard.receives(engine_rank + self.rank_offset):
            by_name[transfer.destination_piece.local].append(transfer)
        for name, transfers in by_name.items():
            limit = self.bucket_bytes // specs[name].dtype.itemsize
            for transfer in transfers:
                for box in _cut(transfer.box, limit):
                    local = local_box(transfer.destination_piece, box, tuple(specs[name].shape))
                    yield Write(Part(name, local, 0), transfer.source, transfer.source_piece, box)


class ExpectedChecksums:
    """Sums of what this trainer rank has written, by engine rank and parameter; added over ranks they are the
    engines'."""

    def __init__(self, plan: DeliveryPlan) -> None:
        self._plan = plan
        self._sums: dict[int, dict[str, int]] = {}

    def add(self, engine_rank: int, name: str, values: torch.Tensor, box: Box) -> None:
        """Count the part `box` of a parameter; `values` in the engine's element type."""
        shape = tuple(self._plan.engines.local_specs(engine_rank)[name].shape)
        sums = self._sums.setdefault(engine_rank, {})
        sums[name] = signed(sums.get(name, 0) + part_checksum(values, box, shape))

    def add_bucket(self, bucket: PlannedBucket, source: int, data: torch.Tensor) -> None:
        """Count what `source` wrote into the bytes of a bucket."""
        specs = self._plan.engines.local_specs(bucket.engine_rank)
        for write in bucket.writes_of(source):
            self.add(bucket.engine_rank, write.part.name, part_values(data, write.part, specs), write.part.box)

    def add_plan(self, engine_rank: int, source: int, sources: Buffers) -> None:
        """Count all that `source` would write into an engine rank, without a bucket (loads from disk)."""
        specs = self._plan.engines.local_specs(engine_rank)
        for bucket in self._plan.buckets(engine_rank):
            for part, values in cast_parts(bucket, source, sources, specs):
                self.add(engine_rank, part.name, values.reshape(part.box.shape), part.box)

    def merge(self, other: ExpectedChecksums) -> None:
        """Take over what `other` has counted, of engine ranks that this one has not."""
        assert not self._sums.keys() & other._sums.keys(), "an engine rank was counted twice"
        self._sums.update(other._sums)

    def vector(self, engine_ranks: Sequence[int]) -> torch.Tensor:
        """int64, one number a parameter, engine rank by engine rank: to be added up over trainer ranks."""
        return torch.tensor(
            [
                self._sums.get(rank, {}).get(name, 0)
                for rank in engine_ranks
                for name in self._plan.parameter_names(rank)
            ],
            dtype=torch.int64,
        )

    def named(self, engine_ranks: Sequence[int], vector: torch.Tensor) -> dict[int, dict[str, int]]:
        """engine rank -> parameter -> sum, from a reduced `vector`."""
        values = iter(vector.tolist())
        return {rank: {name: next(values) for name in self._plan.parameter_names(rank)} for rank in engine_ranks}


def cast_parts(
    bucket: PlannedBucket, source: int, sources: Buffers, specs: Mapping[str, TensorSpec]
) -> Iterator[tuple[Part, torch.Tensor]]:
    """What `source` contributes to a bucket: each part with its values in the engine's type, in the shape of its
    global box; views of the buffers where no cast is needed."""
    for part, _, piece, box in bucket.writes_of(source):
        yield part, _read(sources, piece, box).to(specs[part.name].dtype)


def _read(sources: Buffers, piece: Piece, box: Box) -> torch.Tensor:
    if isinstance(sources, PartSource):
        return sources.part(piece, box)
    return piece_view(sources[piece.local], piece, box)


def write_parts(
    bucket: PlannedBucket,
    source: int,
    sources: Buffers,
    data: torch.Tensor,
    specs: Mapping[str, TensorSpec],
    expected: ExpectedChecksums | None = None,
) -> int:
    """Puts what `source` contributes to a bucket into `data` (uint8, the whole bucket), cast to the engine's type.

    Returns the bytes written. `expected` counts the values before they are written, so that a fault on the way into the
    bucket is noticed like any behind it.
    """
    num_bytes = 0
    for part, values in cast_parts(bucket, source, sources, specs):
        part_values(data, part, specs).view(values.shape).copy_(values)
        if expected is not None:
            expected.add(bucket.engine_rank, part.name, values.reshape(part.box.shape), part.box)
        num_bytes += values.numel() * values.dtype.itemsize
    return num_bytes


def part_values(data: torch.Tensor, part: Part, specs: Mapping[str, TensorSpec]) -> torch.Tensor:
    """View of a part in the bytes of its bucket: element type and shape of its box."""
    dtype = specs[part.name].dtype
    stop = part.byte_offset + part.box.volume * dtype.itemsize
    return data[part.byte_offset : stop].view(dtype).view(part.box.shape)


def local_box(piece: Piece, box: Box, shape: Coordinates) -> Box:
    """Box of the local buffer (`shape`) that holds global box `box`, which lies in `piece`.

    A piece of fewer dimensions than the buffer (one expert's matrix in a stack of them), or given by a flat position,
    must be a box of the buffer. Raises ValueError where it is not.
    """
    relative = tuple(start - base for start, base in zip(box.offset, piece.global_offset))
    if len(piece.local_offset) == len(shape):
        return layout.local_box(piece, box)
    extra = len(shape) - len(piece.shape)
    if len(piece.local_offset) != 1 or extra < 0:
        raise ValueError(f"delivery plan: {piece} is no box of a buffer of shape {shape}")
    corner = _unravel(piece.local_offset[0], shape)
    inside = all(o + n <= size for o, n, size in zip(corner[extra:], piece.shape, shape[extra:]))
    if piece.shape[1:] != shape[extra + 1 :] or not inside:
        raise ValueError(f"delivery plan: {piece} is no box of a buffer of shape {shape}")
    offset = (*corner[:extra], *(o + r for o, r in zip(corner[extra:], relative)))
    return Box(offset, (1,) * extra + tuple(box.shape))


def _unravel(index: int, shape: Coordinates) -> Coordinates:
    return tuple(index // prod(shape[dim + 1 :]) % size for dim, size in enumerate(shape))


def _cut(box: Box, limit: int) -> Iterator[Box]:
    """The box in parts of at most `limit` elements, cut along its first dimensions."""
    if box.volume <= limit:
        yield box
        return
    dim = next(dim for dim, size in enumerate(box.shape) if size > 1)
    step = max(1, limit // (box.volume // box.shape[dim]))
    for start in range(0, box.shape[dim], step):
        offset, shape = list(box.offset), list(box.shape)
        offset[dim], shape[dim] = box.offset[dim] + start, min(step, box.shape[dim] - start)
        yield from _cut(Box(tuple(offset), tuple(shape)), limit)


def _pack(
    writes: Sequence[Write], itemsizes: Mapping[str, int], bucket_bytes: int
) -> list[tuple[int, tuple[Write, ...]]]:
    """Greedy runs of whole parameters, and of single writes of those that do not fit into one bucket."""
    buckets: list[list[Write]] = []
    filled = bucket_bytes + 1
    for unit in _interleaved(_units(writes, itemsizes, bucket_bytes), itemsizes):
        size = _num_bytes(unit, itemsizes)
        # A write that its alignment makes larger than a bucket has one to itself: behind the last none is needed.
        if filled and filled + size > bucket_bytes:
            buckets.append([])
            filled = 0
        buckets[-1] += unit
        filled += size
    return [_place(bucket, itemsizes) for bucket in buckets]


def _units(writes: Sequence[Write], itemsizes: Mapping[str, int], limit: int) -> list[list[Write]]:
    """What must not be torn apart: all writes of a parameter where they fit into a bucket, else each write."""
    by_name: dict[str, list[Write]] = {}
    for write in writes:
        by_name.setdefault(write.part.name, []).append(write)
    units: list[list[Write]] = []
    for unit in by_name.values():
        units += [unit] if _num_bytes(unit, itemsizes) <= limit else [[write] for write in unit]
    return units


def _interleaved(units: Sequence[list[Write]], itemsizes: Mapping[str, int]) -> list[list[Write]]:
    """The units in an order in which all trainer ranks write all the time, each in proportion to what it has.

    In the order of the engine's layers one pipeline stage would write after the other. Units of the same writers keep
    their order, and lie as evenly along the way as if they had it for themselves.
    """
    totals: dict[frozenset[int], int] = {}
    places: list[tuple[frozenset[int], float]] = []
    for unit in units:
        writers, size = frozenset(write.source for write in unit), _num_bytes(unit, itemsizes)
        places.append((writers, totals.get(writers, 0) + size / 2))
        totals[writers] = totals.get(writers, 0) + size
    shares = [middle / max(1, totals[writers]) for writers, middle in places]
    return [units[index] for index in sorted(range(len(units)), key=shares.__getitem__)]


def _num_bytes(unit: Sequence[Write], itemsizes: Mapping[str, int]) -> int:
    return sum(_aligned(write.part.box.volume * itemsizes[write.part.name]) for write in unit)


def _place(writes: Sequence[Write], itemsizes: Mapping[str, int]) -> tuple[int, tuple[Write, ...]]:
    """Byte offsets within one bucket: source after source."""
    placed, position, end = [], 0, 0
    for write in sorted(writes, key=lambda write: write.source):
        placed.append(write._replace(part=write.part._replace(byte_offset=position)))
        end = position + write.part.box.volume * itemsizes[write.part.name]
        position = _aligned(end)
    return end, tuple(placed)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // PART_ALIGNMENT) * PART_ALIGNMENT


__all__ = [
    "DEFAULT_BUCKET_BYTES",
    "DeliveryPlan",
    "EngineLayout",
    "ExpectedChecksums",
    "PlannedBucket",
    "Segment",
    "Write",
    "cast_parts",
    "local_box",
    "part_values",
    "write_parts",
]
