"""Buckets of a weight sync: which trainer rank writes which chunk of which bucket of which engine rank.

Planning is pure arithmetic on a `ReshardPlan` from the trainer's layout to the engines'. Every rank computes the same
plan, and the ranks compare its 32-byte digest once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import prod
from typing import NamedTuple, Protocol

import torch

from megatron_dapo.bridge.protocol.checksums import CountedSlice, copy_and_count, slice_sums
from megatron_dapo.bridge.protocol.messages import CHUNK_ALIGNMENT, Bucket, Chunk, Manifest, ParameterManifest
from megatron_dapo.reshard.checksum import signed
from megatron_dapo.reshard.execution import Buffers
from megatron_dapo.reshard.layout import (
    ComputedBuffers,
    Layout,
    PartialLayout,
    Shard,
    ShiftedLayout,
    TensorSpec,
    read_shard,
    slice_view,
)
from megatron_dapo.reshard.layout import local_slice as slice_of_buffer
from megatron_dapo.reshard.pieces import pieces
from megatron_dapo.reshard.planner import ReshardPlan, Transfer, plan
from megatron_dapo.reshard.slices import Coordinates, Slice
from megatron_dapo.rounding import round_up

DEFAULT_BUCKET_BYTES = 32 << 20  # an engine rank has two slots of this size in shared memory
_FORMAT_VERSION = 3  # part of the digest, so that ranks of two releases never agree by chance
_CACHED_BYTES = 512 << 10  # a CPU's second-level cache holds such a piece and its cast
Specs = Mapping[str, TensorSpec]  # parameter name -> shape and element type


class EngineLayout(Layout, Protocol):
    """A layout of engines; its rank = engine * tensor_parallel + rank within the engine."""

    @property
    def tensor_parallel(self) -> int: ...

    def local_specs(self, rank: int) -> Mapping[str, TensorSpec]:
        """Return the shape and element type of every parameter of an engine rank, in model order."""


class Write(NamedTuple):
    """A chunk of a bucket and the trainer's shard that fills it."""

    chunk: Chunk
    source: int  # trainer rank
    shard: Shard  # held by the source
    bounds: Slice  # global, inside the shard

    def view(self, sources: Buffers) -> torch.Tensor:
        """Return the values in the trainer's type, in the shape of `bounds`."""
        return read_shard(sources, self.shard, self.bounds)

    def read(self, sources: Buffers, dtype: torch.dtype) -> torch.Tensor:
        """Return the values in the engine's type; a view if no cast is needed."""
        return self.view(sources).to(dtype)

    def is_view(self, sources: Buffers, dtype: torch.dtype) -> bool:
        """Return True if `read` takes no memory."""
        return not isinstance(sources, ComputedBuffers) and sources[self.shard.local].dtype == dtype


class _Packed(NamedTuple):
    """Buckets of one engine rank, and the writes that fill each."""

    buckets: tuple[Bucket, ...]
    writes: tuple[tuple[Write, ...], ...]


class SyncPlan:
    """Buckets of at most `bucket_bytes` for every engine rank; all sources of a rank write into each of its buckets.

    The chunks of one parameter (a fused one included) stay in one bucket if they fit; a parameter larger than a bucket
    is cut along its rows. Engine ranks of one engine may have different numbers of buckets.

    Engine rank r is rank r + `rank_offset` of the reshard plan's destination. The offset is 0 if engines share the
    trainer's nodes (both ranks r on one node), and the trainer's world size (with a `ShiftedLayout`) otherwise.

    `engines_per_node` consecutive engines share a node and the trainer ranks that write into them. Ranks with the same
    number in these engines have equal buckets (`alike`), so every byte travels to the node once, and `reshard` needs to
    fill only the first rank of each such set.
    """

    def __init__(
        self,
        reshard: ReshardPlan,
        engines: EngineLayout,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        rank_offset: int = 0,
        engines_per_node: int = 1,
    ) -> None:
        if bucket_bytes < CHUNK_ALIGNMENT:
            raise ValueError(f"bucket of {bucket_bytes} bytes: must be at least {CHUNK_ALIGNMENT}")
        self.reshard = reshard
        self.engines = engines
        self.bucket_bytes = bucket_bytes
        self.rank_offset = rank_offset
        self.engines_per_node = engines_per_node
        self._packed: dict[int, _Packed] = {}
        self._destinations: dict[int, tuple[int, ...]] = {}

    @property
    def digest(self) -> bytes:
        """Return 32 bytes that are equal if and only if the plans are."""
        engines = (self.engines.tensor_parallel, self.engines_per_node)
        numbers = (_FORMAT_VERSION, self.bucket_bytes, *engines, self.rank_offset)
        return hashlib.sha256(f"weight sync plan {numbers}".encode() + self.reshard.digest).digest()

    @property
    def num_engines(self) -> int:
        return self.engines.num_ranks // self.engines.tensor_parallel

    def ranks_of(self, engine: int) -> range:
        """Return the engine ranks of one engine."""
        size = self.engines.tensor_parallel
        return range(engine * size, (engine + 1) * size)

    def alike(self, engine_rank: int) -> range:
        """Return the engine ranks on the node with the same buckets as `engine_rank`, which is included."""
        size = self.engines.tensor_parallel
        engine, number = divmod(engine_rank, size)
        first = engine - engine % self.engines_per_node
        last = min(first + self.engines_per_node, self.num_engines)
        return range(first * size + number, last * size, size)

    def num_buckets(self, engine: int) -> int:
        """Return the number of rounds that fill all ranks of an engine."""
        return max(len(self.buckets(rank)) for rank in self.ranks_of(engine))

    def buckets(self, engine_rank: int) -> tuple[Bucket, ...]:
        return self._pack(engine_rank).buckets

    def writes(self, bucket: Bucket, source: int | None = None) -> tuple[Write, ...]:
        """Return the writes that fill a bucket, in chunk order; only those of trainer rank `source` if given."""
        writes = self._pack(bucket.engine_rank).writes[bucket.index]
        return writes if source is None else tuple(write for write in writes if write.source == source)

    def sources(self, engine_rank: int) -> tuple[int, ...]:
        """Return the trainer ranks that write into an engine rank."""
        return tuple(sorted({source for bucket in self.buckets(engine_rank) for source in bucket.segments}))

    def num_bytes(self, engine_rank: int) -> int:
        """Return the bytes that an engine rank receives, in its element types."""
        return sum(bucket.num_bytes for bucket in self.buckets(engine_rank))

    def destinations(self, source: int) -> tuple[int, ...]:
        """Return the engine ranks that a trainer rank writes into, in order."""
        if source not in self._destinations:
            found = {transfer.destination - self.rank_offset for transfer in self.reshard.sends(source)}
            self._destinations[source] = tuple(sorted(rank for first in found for rank in self.alike(first)))
        return self._destinations[source]

    def manifest(
        self, engine_rank: int, sync_id: str, session: str, version: int, number: int = 0, base: int | None = None
    ) -> Manifest:
        """Return the manifest of a weight sync for an engine rank; `base`: the version that it brings changes of."""
        filled = dict.fromkeys(self.parameter_names(engine_rank), 0)
        for transfer in self._receives(engine_rank):
            filled[transfer.destination_shard.local] += transfer.bounds.volume
        specs = self.engines.local_specs(engine_rank)
        parameters = {n: ParameterManifest(tuple(s.shape), s.dtype, filled[n]) for n, s in specs.items()}
        return Manifest(sync_id, session, version, len(self.buckets(engine_rank)), parameters, number, base)

    def parameter_names(self, engine_rank: int) -> tuple[str, ...]:
        return tuple(self.engines.local_specs(engine_rank))

    def _receives(self, engine_rank: int) -> tuple[Transfer, ...]:
        return self.reshard.receives(self.alike(engine_rank)[0] + self.rank_offset)

    def _pack(self, engine_rank: int) -> _Packed:
        first = self.alike(engine_rank)[0]
        if engine_rank not in self._packed and first != engine_rank:
            buckets, writes = self._pack(first)
            self._packed[engine_rank] = _Packed(tuple(replace(b, engine_rank=engine_rank) for b in buckets), writes)
        if engine_rank not in self._packed:
            specs = self.engines.local_specs(engine_rank)
            packed = _pack(list(self._writes(engine_rank)), specs, self.bucket_bytes)
            self._packed[engine_rank] = _Packed(
                tuple(_bucket(engine_rank, index, *sized) for index, sized in enumerate(packed)),
                tuple(writes for _, writes in packed),
            )
        return self._packed[engine_rank]

    def _writes(self, engine_rank: int) -> Iterator[Write]:
        """Yield all writes into an engine rank, in parameter order, none larger than a bucket."""
        specs = self.engines.local_specs(engine_rank)
        by_name: dict[str, list[Transfer]] = {name: [] for name in specs}
        for transfer in self._receives(engine_rank):
            by_name[transfer.destination_shard.local].append(transfer)
        for name, transfers in by_name.items():
            limit = self.bucket_bytes // specs[name].dtype.itemsize
            for transfer in transfers:
                # A transfer may exceed a bucket: the embedding of a large vocabulary is gigabytes.
                for bounds in _cut(transfer.bounds, limit):
                    local = local_slice(transfer.destination_shard, bounds, tuple(specs[name].shape))
                    yield Write(Chunk(name, local, 0), transfer.source, transfer.source_shard, bounds)


def plan_sync(
    source: Layout,
    engines: EngineLayout,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    *,
    ranks_per_node: int,
    rank_offset: int = 0,
    engines_per_node: int = 1,
) -> SyncPlan:
    """Return the plan of a weight sync from `source`; see `SyncPlan` for the arguments."""
    size, shares = engines.tensor_parallel, engines_per_node > 1
    target: Layout = ShiftedLayout(engines, rank_offset) if rank_offset else engines
    if shares:
        firsts = range(0, engines.num_ranks // size, engines_per_node)
        target = PartialLayout(target, {e * size + n + rank_offset for e in firsts for n in range(size)})
    # If engines share a node's memory, all ranks of the node are equally near to them.
    reshard = plan(source, target, ranks_per_node=ranks_per_node, prefer_own=not shares)
    return SyncPlan(reshard, engines, bucket_bytes, rank_offset, engines_per_node)


def slot_bytes(plan: SyncPlan, engine_rank: int) -> int:
    """Return the bytes of an engine rank's slot in shared memory, which holds its largest bucket."""
    num_bytes = max((bucket.num_bytes for bucket in plan.buckets(engine_rank)), default=0)
    assert num_bytes <= plan.bucket_bytes, f"{num_bytes} bytes, the limit is {plan.bucket_bytes}"
    return round_up(num_bytes, CHUNK_ALIGNMENT)


class ExpectedChecksums:
    """Checksums of everything this trainer rank has written, by engine rank and parameter.

    Summed over trainer ranks, they equal the checksums that the engine reads back.
    """

    def __init__(self, plan: SyncPlan) -> None:
        self._plan = plan
        self._sums: dict[int, dict[str, int]] = {}
        # Counted and not yet on the host: engine ranks, names of parameters, int64 [names]. Nothing waits for a device.
        self._pending: list[tuple[tuple[int, ...], list[str], torch.Tensor]] = []

    def add(self, engine_ranks: Sequence[int], chunks: Mapping[Chunk, torch.Tensor]) -> None:
        """Count chunks that go to several alike engine ranks; their values are in the engine's element types."""
        if not chunks:
            return
        specs = self._plan.engines.local_specs(engine_ranks[0])
        # Weight by position in the whole parameter, so that the parts from many ranks add up modulo 2^64.
        parts = [
            CountedSlice(values.reshape(chunk.bounds.shape), chunk.bounds, tuple(specs[chunk.name].shape))
            for chunk, values in chunks.items()
        ]
        self._pending.append((tuple(engine_ranks), [chunk.name for chunk in chunks], slice_sums(parts)))

    def add_sum(self, engine_ranks: Sequence[int], name: str, total: int) -> None:
        """Add the checksum of a part of a parameter of several alike engine ranks."""
        for engine_rank in engine_ranks:
            sums = self._sums.setdefault(engine_rank, {})
            sums[name] = signed(sums.get(name, 0) + total)

    def add_plan(self, engine_rank: int, source: int, sources: Buffers) -> None:
        """Count everything that `source` would write into an engine rank, without buckets (for loads from disk)."""
        specs = self._plan.engines.local_specs(engine_rank)
        for bucket in self._plan.buckets(engine_rank):
            writes = self._plan.writes(bucket, source)
            self.add((engine_rank,), {w.chunk: w.read(sources, specs[w.chunk.name].dtype) for w in writes})

    def merge(self, other: ExpectedChecksums) -> None:
        """Add the counts of `other`, which must be for other engine ranks."""
        own, its = self._settled(), other._settled()
        assert not own.keys() & its.keys(), "an engine rank was counted twice"
        own.update(its)

    def _settled(self) -> dict[int, dict[str, int]]:
        """Return engine rank -> parameter -> sum, with one copy to the host of everything that was counted since."""
        pending, self._pending = self._pending, []
        if pending:
            numbers = iter(torch.cat([sums for _, _, sums in pending]).tolist())
            for engine_ranks, names, _ in pending:
                for name in names:
                    self.add_sum(engine_ranks, name, next(numbers))
        return self._sums

    def digests(self, engine_ranks: Sequence[int]) -> torch.Tensor:
        """Return one int64 per engine rank (`checksums_digest`), to be summed over trainer ranks."""
        found = self._settled()
        return torch.tensor([checksums_digest(found.get(rank, {})) for rank in engine_ranks], dtype=torch.int64)

    def vector(self, engine_ranks: Sequence[int]) -> torch.Tensor:
        """Return one int64 per parameter, engine rank by engine rank, to be summed over trainer ranks."""
        found = self._settled()
        return torch.tensor(
            [found.get(rank, {}).get(name, 0) for rank in engine_ranks for name in self._plan.parameter_names(rank)],
            dtype=torch.int64,
        )

    def named(self, engine_ranks: Sequence[int], vector: torch.Tensor) -> dict[int, dict[str, int]]:
        """Return engine rank -> parameter -> checksum, from a reduced `vector`."""
        values = iter(vector.tolist())
        return {rank: {name: next(values) for name in self._plan.parameter_names(rank)} for rank in engine_ranks}


def checksums_digest(checksums: Mapping[str, int]) -> int:
    """Return the sum of checksums modulo 2^64, each multiplied by an odd factor derived from the parameter's name.

    The digests of several ranks' writes add up to the digest of their sums. A difference in one parameter always
    changes the digest, because an odd factor is invertible. Differences in several parameters cancel only by chance,
    with probability 2^-64.
    """
    return signed(sum(value * _factor(name) for name, value in checksums.items()))


@cache
def _factor(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") | 1


def write_chunks(
    sync_plan: SyncPlan,
    bucket: Bucket,
    source: int,
    sources: Buffers,
    data: torch.Tensor,
    expected: ExpectedChecksums | None = None,
    *,
    origin: int = 0,
    engine_ranks: Sequence[int] = (),
) -> int:
    """Write the chunks of trainer rank `source` into `data` (uint8, the bucket from byte `origin` on), cast to the
    engine's types.

    Return the bytes written. `expected` counts the values that are read, not those in the bucket, so that a fault on
    the way into the bucket is noticed like any later one. It counts them for `engine_ranks`, all ranks that will
    receive them (default: the bucket's own).
    """
    specs, num_bytes = sync_plan.engines.local_specs(bucket.engine_rank), 0
    engine_ranks = engine_ranks or (bucket.engine_rank,)
    counted: dict[Chunk, torch.Tensor] = {}  # device tensors, counted in one pass at the end
    for write in sync_plan.writes(bucket, source):
        chunk, (shape, dtype) = write.chunk, specs[write.chunk.name]
        values = write.view(sources).reshape(chunk.bounds.shape)
        size = chunk.bounds.volume * dtype.itemsize
        start = chunk.byte_offset - origin
        target = data[start : start + size].view(dtype).view(chunk.bounds.shape)
        num_bytes += size
        if expected is None:
            target.copy_(values)
        elif values.is_cuda:
            values = values.to(dtype)
            target.copy_(values)
            if write.is_view(sources, dtype):
                counted[chunk] = values
            else:  # Count them before the memory of the cast is used again.
                expected.add(engine_ranks, {chunk: values})
        else:
            for bounds, piece in _pieces(chunk, values, dtype):
                part = CountedSlice(piece, bounds, tuple(shape))
                total = copy_and_count(local_view(target, chunk.bounds, bounds), part)
                expected.add_sum(engine_ranks, chunk.name, total)
    if expected is not None:
        expected.add(engine_ranks, counted)
    return num_bytes


def _pieces(chunk: Chunk, values: torch.Tensor, dtype: torch.dtype) -> Iterator[tuple[Slice, torch.Tensor]]:
    """Yield a chunk's values in type `dtype`; if they must be cast, in pieces that fit into a CPU's cache."""
    if values.dtype == dtype:
        yield chunk.bounds, values
        return
    for bounds in _cut(chunk.bounds, _CACHED_BYTES // values.dtype.itemsize):
        yield bounds, local_view(values, chunk.bounds, bounds).to(dtype)


def local_view(values: torch.Tensor, bounds: Slice, part: Slice) -> torch.Tensor:
    """Return the view of slice `part` of values that hold slice `bounds`."""
    start = tuple(inner - outer for inner, outer in zip(part.offset, bounds.offset))
    return slice_view(values, Slice(start, part.shape))


def local_slice(shard: Shard, bounds: Slice, shape: Coordinates) -> Slice:
    """Return the slice of the local buffer (`shape`) that holds global slice `bounds` of `shard`.

    A shard with fewer dimensions than the buffer (one expert's matrix in a stack), or one given by a flat position,
    must be a slice of the buffer. Raise ValueError if it is not.
    """
    relative = tuple(start - base for start, base in zip(bounds.offset, shard.global_offset))
    if len(shard.local_offset) == len(shape):
        return slice_of_buffer(shard, bounds)
    extra = len(shape) - len(shard.shape)
    if len(shard.local_offset) != 1 or extra < 0:
        raise ValueError(f"weight sync plan: {shard} is no slice of a buffer of shape {shape}")
    corner = _unravel(shard.local_offset[0], shape)
    inside = all(o + n <= size for o, n, size in zip(corner[extra:], shard.shape, shape[extra:]))
    if shard.shape[1:] != shape[extra + 1 :] or not inside:
        raise ValueError(f"weight sync plan: {shard} is no slice of a buffer of shape {shape}")
    offset = (*corner[:extra], *(o + r for o, r in zip(corner[extra:], relative)))
    return Slice(offset, (1,) * extra + tuple(bounds.shape))


def _unravel(index: int, shape: Coordinates) -> Coordinates:
    return tuple(index // prod(shape[dim + 1 :]) % size for dim, size in enumerate(shape))


def _cut(bounds: Slice, limit: int) -> Iterator[Slice]:
    """Cut a slice along its first dimensions into slices of at most `limit` elements."""
    if bounds.volume <= limit:
        yield bounds
        return
    dim = next(dim for dim, size in enumerate(bounds.shape) if size > 1)
    step = max(1, limit // (bounds.volume // bounds.shape[dim]))
    for start in range(0, bounds.shape[dim], step):
        offset, shape = list(bounds.offset), list(bounds.shape)
        offset[dim], shape[dim] = bounds.offset[dim] + start, min(step, bounds.shape[dim] - start)
        yield from _cut(Slice(tuple(offset), tuple(shape)), limit)


def _pack(writes: Sequence[Write], specs: Specs, bucket_bytes: int) -> list[tuple[int, tuple[Write, ...]]]:
    """Pack writes greedily: whole parameters together, single writes of parameters larger than a bucket."""
    units = _interleaved(_units(writes, specs, bucket_bytes), specs)
    # A write that alignment makes larger than a bucket gets its own: the last chunk needs no alignment after it.
    cuts = pieces([_aligned_bytes(unit, specs) for unit in units], bucket_bytes)
    return [_with_offsets([write for unit in units[cut] for write in unit], specs) for cut in cuts]


def _units(writes: Sequence[Write], specs: Specs, limit: int) -> list[list[Write]]:
    """Group writes that must share a bucket: all writes of a parameter if they fit, otherwise each by itself."""
    by_name: dict[str, list[Write]] = {}
    for write in writes:
        by_name.setdefault(write.chunk.name, []).append(write)
    units: list[list[Write]] = []
    for unit in by_name.values():
        units += [unit] if _aligned_bytes(unit, specs) <= limit else [[write] for write in unit]
    return units


def _interleaved(units: Sequence[list[Write]], specs: Specs) -> list[list[Write]]:
    """Order the units so that all trainer ranks write all the time, each in proportion to its share.

    In the order of the engine's layers, pipeline stages would write one after another. Units of the same writers keep
    their order and are spread evenly.
    """
    totals: dict[frozenset[int], int] = {}
    middles: list[tuple[frozenset[int], float]] = []
    for unit in units:
        writers, size = frozenset(write.source for write in unit), _aligned_bytes(unit, specs)
        middles.append((writers, totals.get(writers, 0) + size / 2))
        totals[writers] = totals.get(writers, 0) + size
    shares = [middle / max(1, totals[writers]) for writers, middle in middles]
    return [units[index] for index in sorted(range(len(units)), key=shares.__getitem__)]


def _aligned_bytes(unit: Sequence[Write], specs: Specs) -> int:
    sizes = (write.chunk.bounds.volume * specs[write.chunk.name].dtype.itemsize for write in unit)
    return sum(round_up(size, CHUNK_ALIGNMENT) for size in sizes)


def _with_offsets(writes: Sequence[Write], specs: Specs) -> tuple[int, tuple[Write, ...]]:
    """Assign byte offsets within one bucket, source after source; return its bytes and the writes."""
    placed, position, end = [], 0, 0
    # Sort by source, so that each trainer rank writes, or sends, one contiguous run of bytes.
    for write in sorted(writes, key=lambda write: write.source):
        placed.append(write._replace(chunk=write.chunk._replace(byte_offset=position)))
        end = position + write.chunk.bounds.volume * specs[write.chunk.name].dtype.itemsize
        position = round_up(end, CHUNK_ALIGNMENT)
    return end, tuple(placed)


def _bucket(engine_rank: int, index: int, num_bytes: int, writes: tuple[Write, ...]) -> Bucket:
    starts: dict[int, int] = {}
    for write in writes:
        starts.setdefault(write.source, write.chunk.byte_offset)
    stops = [*list(starts.values())[1:], num_bytes]
    segments = {source: (start, stop) for (source, start), stop in zip(starts.items(), stops)}
    return Bucket(index, num_bytes, tuple(write.chunk for write in writes), segments, engine_rank)
