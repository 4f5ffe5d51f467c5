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

from megatron_dapo.bridge.protocol.receiver import CHUNK_ALIGNMENT, Bucket, Chunk, Manifest, ParameterManifest
from megatron_dapo.reshard import layout
from megatron_dapo.reshard.checksum import signed, slice_checksum
from megatron_dapo.reshard.execution import Buffers
from megatron_dapo.reshard.layout import Layout, Shard, TensorSpec, shard_view
from megatron_dapo.reshard.planner import ReshardPlan, Transfer
from megatron_dapo.reshard.slices import Coordinates, Slice

DEFAULT_BUCKET_BYTES = 32 << 20
_FORMAT_VERSION = 2  # part of the digest


class EngineLayout(Layout, Protocol):
    """A layout of engines; rank = engine * tensor_parallel + rank within the engine."""

    @property
    def tensor_parallel(self) -> int: ...

    def local_specs(self, rank: int) -> Mapping[str, TensorSpec]:
        """Shape and element type of every parameter of an engine rank, in model order."""


@runtime_checkable
class ChunkSource(Protocol):
    """`Buffers` that are not in memory as they are delivered, and are better read part by part than whole."""

    def chunk(self, shard: Shard, bounds: Slice) -> torch.Tensor:
        """Global slice `bounds`, which lies in `shard`."""


class Write(NamedTuple):
    """Trainer rank `source` puts global slice `bounds`, which lies in its `shard`, into `chunk` of a bucket."""

    chunk: Chunk
    source: int
    shard: Shard
    bounds: Slice


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
        return Bucket(self.index, self.num_bytes, tuple(write.chunk for write in self.writes))

    def writes_of(self, source: int) -> tuple[Write, ...]:
        return tuple(write for write in self.writes if write.source == source)

    @property
    def segments(self) -> dict[int, Segment]:
        """source -> its bytes."""
        starts: dict[int, int] = {}
        for write in self.writes:
            starts.setdefault(write.source, write.chunk.byte_offset)
        stops = [*list(starts.values())[1:], self.num_bytes]
        return {source: Segment(start, stop) for (source, start), stop in zip(starts.items(), stops)}


class SyncPlan:
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
        if bucket_bytes < CHUNK_ALIGNMENT:
            raise ValueError(f"bucket of {bucket_bytes} bytes: must be at least {CHUNK_ALIGNMENT}")
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
            filled[transfer.destination_shard.local] += transfer.bounds.volume
        specs = self.engines.local_specs(engine_rank)
        parameters = {n: ParameterManifest(tuple(s.shape), s.dtype, filled[n]) for n, s in specs.items()}
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
            by_name[transfer.destination_shard.local].append(transfer)
        for name, transfers in by_name.items():
            limit = self.bucket_bytes // specs[name].dtype.itemsize
            for transfer in transfers:
                for bounds in _cut(transfer.bounds, limit):
                    local = local_slice(transfer.destination_shard, bounds, tuple(specs[name].shape))
                    yield Write(Chunk(name, local, 0), transfer.source, transfer.source_shard, bounds)


class ExpectedChecksums:
    """Sums of what this trainer rank has written, by engine rank and parameter; added over ranks they are the
    engines'."""

    def __init__(self, plan: SyncPlan) -> None:
        self._plan = plan
        self._sums: dict[int, dict[str, int]] = {}

    def add(self, engine_rank: int, name: str, values: torch.Tensor, bounds: Slice) -> None:
        """Count the chunk `bounds` of a parameter; `values` in the engine's element type."""
        shape = tuple(self._plan.engines.local_specs(engine_rank)[name].shape)
        sums = self._sums.setdefault(engine_rank, {})
        sums[name] = signed(sums.get(name, 0) + slice_checksum(values, bounds, shape))

    def add_bucket(self, bucket: PlannedBucket, source: int, data: torch.Tensor) -> None:
        """Count what `source` wrote into the bytes of a bucket."""
        specs = self._plan.engines.local_specs(bucket.engine_rank)
        for write in bucket.writes_of(source):
            self.add(bucket.engine_rank, write.chunk.name, chunk_values(data, write.chunk, specs), write.chunk.bounds)

    def add_plan(self, engine_rank: int, source: int, sources: Buffers) -> None:
        """Count all that `source` would write into an engine rank, without a bucket (loads from disk)."""
        specs = self._plan.engines.local_specs(engine_rank)
        for bucket in self._plan.buckets(engine_rank):
            for chunk, values in cast_chunks(bucket, source, sources, specs):
                self.add(engine_rank, chunk.name, values.reshape(chunk.bounds.shape), chunk.bounds)

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


def cast_chunks(
    bucket: PlannedBucket, source: int, sources: Buffers, specs: Mapping[str, TensorSpec]
) -> Iterator[tuple[Chunk, torch.Tensor]]:
    """What `source` contributes to a bucket: each chunk with its values in the engine's type, in the shape of its
    global slice; views of the buffers where no cast is needed."""
    for chunk, _, shard, bounds in bucket.writes_of(source):
        yield chunk, _read(sources, shard, bounds).to(specs[chunk.name].dtype)


def _read(sources: Buffers, shard: Shard, bounds: Slice) -> torch.Tensor:
    if isinstance(sources, ChunkSource):
        return sources.chunk(shard, bounds)
    return shard_view(sources[shard.local], shard, bounds)


def write_chunks(
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
    for chunk, values in cast_chunks(bucket, source, sources, specs):
        chunk_values(data, chunk, specs).view(values.shape).copy_(values)
        if expected is not None:
            expected.add(bucket.engine_rank, chunk.name, values.reshape(chunk.bounds.shape), chunk.bounds)
        num_bytes += values.numel() * values.dtype.itemsize
    return num_bytes


def chunk_values(data: torch.Tensor, chunk: Chunk, specs: Mapping[str, TensorSpec]) -> torch.Tensor:
    """View of a chunk in the bytes of its bucket: element type and shape of its slice."""
    dtype = specs[chunk.name].dtype
    stop = chunk.byte_offset + chunk.bounds.volume * dtype.itemsize
    return data[chunk.byte_offset : stop].view(dtype).view(chunk.bounds.shape)


def local_slice(shard: Shard, bounds: Slice, shape: Coordinates) -> Slice:
    """Slice of the local buffer (`shape`) that holds global slice `bounds`, which lies in `shard`.

    A shard of fewer dimensions than the buffer (one expert's matrix in a stack of them), or given by a flat position,
    must be a slice of the buffer. Raises ValueError where it is not.
    """
    relative = tuple(start - base for start, base in zip(bounds.offset, shard.global_offset))
    if len(shard.local_offset) == len(shape):
        return layout.local_slice(shard, bounds)
    extra = len(shape) - len(shard.shape)
    if len(shard.local_offset) != 1 or extra < 0:
        raise ValueError(f"delivery plan: {shard} is no slice of a buffer of shape {shape}")
    corner = _unravel(shard.local_offset[0], shape)
    inside = all(o + n <= size for o, n, size in zip(corner[extra:], shard.shape, shape[extra:]))
    if shard.shape[1:] != shape[extra + 1 :] or not inside:
        raise ValueError(f"delivery plan: {shard} is no slice of a buffer of shape {shape}")
    offset = (*corner[:extra], *(o + r for o, r in zip(corner[extra:], relative)))
    return Slice(offset, (1,) * extra + tuple(bounds.shape))


def _unravel(index: int, shape: Coordinates) -> Coordinates:
    return tuple(index // prod(shape[dim + 1 :]) % size for dim, size in enumerate(shape))


def _cut(bounds: Slice, limit: int) -> Iterator[Slice]:
    """The slice in parts of at most `limit` elements, cut along its first dimensions."""
    if bounds.volume <= limit:
        yield bounds
        return
    dim = next(dim for dim, size in enumerate(bounds.shape) if size > 1)
    step = max(1, limit // (bounds.volume // bounds.shape[dim]))
    for start in range(0, bounds.shape[dim], step):
        offset, shape = list(bounds.offset), list(bounds.shape)
        offset[dim], shape[dim] = bounds.offset[dim] + start, min(step, bounds.shape[dim] - start)
        yield from _cut(Slice(tuple(offset), tuple(shape)), limit)


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
        by_name.setdefault(write.chunk.name, []).append(write)
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
    return sum(_aligned(write.chunk.bounds.volume * itemsizes[write.chunk.name]) for write in unit)


def _place(writes: Sequence[Write], itemsizes: Mapping[str, int]) -> tuple[int, tuple[Write, ...]]:
    """Byte offsets within one bucket: source after source."""
    placed, position, end = [], 0, 0
    for write in sorted(writes, key=lambda write: write.source):
        placed.append(write._replace(chunk=write.chunk._replace(byte_offset=position)))
        end = position + write.chunk.bounds.volume * itemsizes[write.chunk.name]
        position = _aligned(end)
    return end, tuple(placed)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // CHUNK_ALIGNMENT) * CHUNK_ALIGNMENT


__all__ = [
    "DEFAULT_BUCKET_BYTES",
    "SyncPlan",
    "EngineLayout",
    "ExpectedChecksums",
    "PlannedBucket",
    "Segment",
    "Write",
    "cast_chunks",
    "local_slice",
    "chunk_values",
    "write_chunks",
]
