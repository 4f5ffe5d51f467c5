"""Changes since the version that the engines hold, as one trainer rank sends them.

`Deltas` keeps this rank's part of what the engines hold in host memory, in their types: as many bytes as the rank sends
in a full update. Before an update it compares the current weights with it, while the engines still generate; afterwards
it holds these.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch

from megatron_dapo.bridge.protocol.checksums import CountedSlice, slice_sums
from megatron_dapo.bridge.protocol.deltas import BUCKET_SCALE, Change, apply, areas, change, encode, encoded_bytes
from megatron_dapo.bridge.protocol.messages import Bucket
from megatron_dapo.bridge.sync_plan import ExpectedChecksums, SyncPlan, Write, slot_bytes
from megatron_dapo.reshard.execution import Buffers
from megatron_dapo.reshard.layout import Shard
from megatron_dapo.reshard.slices import Coordinates, Slice

_Part = tuple[Shard, Slice, torch.dtype]  # the same bits go to every engine
_Place = tuple[_Part, str, Slice]  # Checksums depend on the place in the engine's parameter.


@dataclass(frozen=True)
class _Owned:
    """A write of a part, and its places in the engines' parameters with the shapes of these."""

    write: Write
    places: dict[tuple[str, Slice], Coordinates] = field(default_factory=dict)


@dataclass(frozen=True)
class Delta:
    """One rank's changes from version `base` to the next."""

    plan: SyncPlan  # Its buckets are larger than a full update's.
    rank: int
    base: int
    slot_bytes: Mapping[int, int]  # engine rank -> size of its slots in shared memory
    changes: dict[_Part, Change] = field(default_factory=dict)
    sums: dict[_Place, int] = field(default_factory=dict)  # checksums of all elements, changed or not

    def segment(self, bucket: Bucket) -> torch.Tensor:
        """Return this rank's segment of a bucket as uint8."""
        writes = self.plan.writes(bucket, self.rank)
        dtypes = _dtypes(self.plan, bucket.engine_rank)
        return encode([(write.chunk.bounds.shape, self.changes[_part(write, dtypes)]) for write in writes])

    def count(self, bucket: Bucket, engine_ranks: Iterable[int], expected: ExpectedChecksums) -> None:
        """Count what the engine ranks must hold of this rank's segment afterwards."""
        dtypes, engine_ranks = _dtypes(self.plan, bucket.engine_rank), tuple(engine_ranks)
        for write in self.plan.writes(bucket, self.rank):
            expected.add_sum(engine_ranks, write.chunk.name, self.sums[_place(write, dtypes)])

    def fits(self) -> bool:
        """Return True if each segment fits into its area of a slot."""
        return all(
            self._num_bytes(bucket) <= area.stop - area.start
            for bucket in _own_buckets(self.plan, self.rank)
            for area in [areas(bucket, self.slot_bytes[bucket.engine_rank])[self.rank]]
        )

    def _num_bytes(self, bucket: Bucket) -> int:
        dtypes, num_bytes = _dtypes(self.plan, bucket.engine_rank), 0
        for write in self.plan.writes(bucket, self.rank):
            part = _part(write, dtypes)
            num_bytes += encoded_bytes(write.chunk.bounds.shape, self.changes[part].positions.numel(), part[2].itemsize)
        return num_bytes


class Deltas:
    """What the engines hold of one rank's weights, and when the next full update is due.

    Args:
        full_interval: every so many updates are full, the first included.
    """

    def __init__(self, plan: SyncPlan, rank: int, full_interval: int) -> None:
        self.version: int | None = None  # held by the engines of the last update; None: the next one must be full
        self._rank = rank
        self._full_interval = full_interval
        self._since_full = 0
        self._held: dict[_Part, torch.Tensor] = {}
        ranks = plan.destinations(rank)
        self._slot_bytes = {r: slot_bytes(plan, r) for r in ranks}
        # Of the whole plan, so that all ranks make the same buckets.
        bucket_bytes = BUCKET_SCALE * plan.bucket_bytes
        sizes = (plan.rank_offset, plan.engines_per_node)
        self.plan = SyncPlan(plan.reshard, plan.engines, bucket_bytes, *sizes)

    def is_due(self, versions: Iterable[int | None]) -> bool:
        """Return True if the next update may be a delta, given the versions that its engines serve."""
        if self.version is None or self._since_full + 1 >= self._full_interval:
            return False
        return all(version == self.version for version in versions)

    def compare(self, sources: Buffers) -> Delta:
        """Return the changes since the last update."""
        assert self.version is not None, "nothing is held yet"
        delta = Delta(self.plan, self._rank, self.version, self._slot_bytes)
        places: list[_Place] = []
        sums: list[torch.Tensor] = []  # nothing waits for the device before all are computed
        views: list[tuple[_Place, CountedSlice]] = []  # device tensors, counted in one pass
        for part, owned in self._parts.items():
            values = owned.write.read(sources, part[2])
            delta.changes[part] = change(values, self._held[part].to(values.device))
            counted = {
                (part, name, bounds): CountedSlice(values.reshape(bounds.shape), bounds, shape)
                for (name, bounds), shape in owned.places.items()
            }
            if owned.write.is_view(sources, part[2]) and values.is_cuda:
                views += counted.items()
            else:  # A cache still holds it, and the memory of the cast is used again.
                places += counted
                sums.append(slice_sums(list(counted.values())))
        places += [place for place, _ in views]
        sums.append(slice_sums([counted for _, counted in views]).to(sums[0].device if sums else "cpu"))
        delta.sums.update(zip(places, torch.cat(sums).tolist()))
        return delta

    def advance(self, version: int, delta: Delta | None, sources: Buffers) -> None:
        """Hold what an update brought; `delta`: the changes that it sent, None if it was full."""
        if delta is None:
            for part, owned in self._parts.items():
                values = owned.write.read(sources, part[2])
                if part in self._held:
                    self._held[part].copy_(values)
                else:
                    self._held[part] = torch.empty(values.shape, dtype=part[2], pin_memory=values.is_cuda).copy_(values)
        else:
            for part, (positions, values) in delta.changes.items():
                apply(self._held[part], Change(positions.cpu(), values.cpu()))
        self._since_full = 0 if delta is None else self._since_full + 1
        self.version = version

    def forget(self) -> None:
        """Have the next update be full."""
        self.version = None

    @cached_property
    def _parts(self) -> dict[_Part, _Owned]:
        """Everything that this rank sends, once each."""
        parts: dict[_Part, _Owned] = {}
        for bucket in _own_buckets(self.plan, self._rank):
            specs, dtypes = self.plan.engines.local_specs(bucket.engine_rank), _dtypes(self.plan, bucket.engine_rank)
            for write in self.plan.writes(bucket, self._rank):
                owned = parts.setdefault(_part(write, dtypes), _Owned(write))
                owned.places[write.chunk.name, write.chunk.bounds] = tuple(specs[write.chunk.name].shape)
        return parts


def _own_buckets(plan: SyncPlan, rank: int) -> Iterator[Bucket]:
    """Yield the buckets that a trainer rank writes into."""
    for engine_rank in plan.destinations(rank):
        yield from (bucket for bucket in plan.buckets(engine_rank) if rank in bucket.segments)


def _dtypes(plan: SyncPlan, engine_rank: int) -> dict[str, torch.dtype]:
    return {name: spec.dtype for name, spec in plan.engines.local_specs(engine_rank).items()}


def _part(write: Write, dtypes: Mapping[str, torch.dtype]) -> _Part:
    return write.shard, write.bounds, dtypes[write.chunk.name]


def _place(write: Write, dtypes: Mapping[str, torch.dtype]) -> _Place:
    return _part(write, dtypes), write.chunk.name, write.chunk.bounds
