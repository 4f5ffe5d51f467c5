"""Moves weights between two layouts again and again: planned once, byte-counted, verified by checksums of both sides.

The trainer uses it to bring the actor's shards into an engine (`replica_sync`: every rank gets a whole model under
Hugging Face names) and from one Megatron layout into another.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_dapo.checkpoints.megatron_layout import MegatronLayout
from megatron_dapo.reshard.checksum import slice_checksum
from megatron_dapo.reshard.execution import DEFAULT_BUCKET_BYTES, Buffers, execute_distributed
from megatron_dapo.reshard.layout import Layout, ReplicatedLayout, Shard, TensorSpec, shard_view
from megatron_dapo.reshard.planner import Transfer, plan
from megatron_dapo.reshard.regions import owned_slices
from megatron_dapo.reshard.slices import Slice, whole


@dataclass(frozen=True)
class ReplicaSyncReport:
    """One rank's share of one execution."""

    num_tensors: int  # filled on this rank
    bytes_sent: int
    bytes_received: int
    bytes_local: int  # copied within the rank
    seconds: float


class ReplicaSync:
    """The plan from `source` to `destination` over one process group (None: a single process).

    In the first `execute` ranks compare the plan's digest, and a difference is an error before anything moves. Rank r
    of both layouts is rank r of the group.
    """

    def __init__(
        self,
        source: Layout,
        destination: Layout,
        group: dist.ProcessGroup | None,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> None:
        self.source = source
        self.destination = destination
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.bucket_bytes = bucket_bytes
        self._agreed = group is None
        self.plan = plan(source, destination)
        self._owned = owned_slices(source).get(self.rank, [])
        self._check_exactly_once(self.plan.receives(self.rank))

    def execute(self, sources: Buffers, destinations: Buffers) -> ReplicaSyncReport:
        """Fills `destinations` from every rank's `sources`; all ranks of the group call it.

        Raises ValueError where the buffers are not exactly the layouts': a tensor that is not planned would silently
        keep old weights. The caller zeroes padding of a sharded destination once; it is never written.
        """
        start = time.perf_counter()
        self._check_digest(next(iter(sources.values())).device if sources else torch.device("cpu"))
        _check_names("source", self.source, self.rank, sources)
        _check_names("destination", self.destination, self.rank, destinations)
        with torch.no_grad():
            traffic = execute_distributed(self.plan, sources, destinations, self.group, bucket_bytes=self.bucket_bytes)
        return ReplicaSyncReport(
            num_tensors=len({shard.tensor for shard in self._held(self.destination)}),
            bytes_sent=traffic.sent,
            bytes_received=traffic.received,
            bytes_local=traffic.local,
            seconds=time.perf_counter() - start,
        )

    def verify(self, sources: Buffers, destinations: Buffers) -> dict[str, int]:
        """Compares position-weighted sums of the bits of every tensor, in the destination's type, between both sides.

        Whole tensors are compared on every rank that has them; cut ones once over their owners. Returns the checksums.
        Raises RuntimeError that names the first different tensor, on every rank of the group.
        """
        names = list(self.destination.tensors)
        position = {name: index for index, name in enumerate(names)}
        expected = self._reduce(self._sums(self._owned, sources, position))
        held = [(shard.bounds, shard) for shard in self._held(self.destination)]
        complete = {
            shard.tensor for bounds, shard in held if bounds == whole(self.destination.tensors[shard.tensor].shape)
        }
        own = self._sums([pair for pair in held if pair[1].tensor in complete], destinations, position)
        cut = self._cut_names()
        owned = owned_slices(self.destination).get(self.rank, []) if cut else []
        chunks = self._reduce(self._sums([pair for pair in owned if pair[1].tensor in cut], destinations, position))
        different = [n for n in complete if own[position[n]] != expected[position[n]]]
        different += [n for n in cut if chunks[position[n]] != expected[position[n]]]
        self._raise_together(sorted(different), expected.device)
        return {name: int(expected[index]) for name, index in position.items()}

    def _held(self, layout: Layout) -> tuple[Shard, ...]:
        return layout.shards(self.rank) if self.rank < layout.num_ranks else ()

    def _cut_names(self) -> set[str]:
        """Tensors of which some rank holds only a chunk."""
        shards = (shard for rank in range(self.destination.num_ranks) for shard in self.destination.shards(rank))
        return {shard.tensor for shard in shards if shard.bounds != whole(self.destination.tensors[shard.tensor].shape)}

    def _sums(self, held: list[tuple[Slice, Shard]], buffers: Buffers, position: dict[str, int]) -> torch.Tensor:
        device = next(iter(buffers.values())).device if buffers else torch.device("cpu")
        sums = torch.zeros(len(position), dtype=torch.int64, device=device)
        for bounds, shard in held:
            if shard.tensor in position:
                spec = self.destination.tensors[shard.tensor]
                values = shard_view(buffers[shard.local], shard, bounds).to(spec.dtype)
                sums[position[shard.tensor]] += slice_checksum(values, bounds, spec.shape)
        return sums

    def _reduce(self, sums: torch.Tensor) -> torch.Tensor:
        if self.group is not None:
            dist.all_reduce(sums, group=self.group)
        return sums

    def _raise_together(self, different: list[str], device: torch.device) -> None:
        count = self._reduce(torch.tensor([len(different)], device=device))
        if different:
            raise RuntimeError(
                f"weight sync: {len(different)} tensors differ from the source on rank {self.rank}: {different[:5]}"
            )
        if int(count):
            raise RuntimeError(
                "weight sync: another rank holds tensors that differ from the source; its error names them"
            )

    def _check_exactly_once(self, transfers: tuple[Transfer, ...]) -> None:
        filled: dict[Shard, int] = {}
        for transfer in transfers:
            filled[transfer.destination_shard] = filled.get(transfer.destination_shard, 0) + transfer.bounds.volume
        for shard in self._held(self.destination):
            assert filled.get(shard, 0) == shard.bounds.volume, (
                f"{shard} is filled with {filled.get(shard, 0)} elements"
            )

    def _check_digest(self, device: torch.device) -> None:
        if self._agreed:
            return
        mine = torch.tensor(list(self.plan.digest), dtype=torch.uint8, device=device)
        digests = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(digests, mine, group=self.group)
        other = [rank for rank, digest in enumerate(digests) if not torch.equal(digest, mine)]
        if other:
            raise ValueError(
                f"weight sync: ranks {other} have another plan than rank {self.rank}; start all with one config"
            )
        self._agreed = True


def _check_names(side: str, layout: Layout, rank: int, buffers: Buffers) -> None:
    expected = layout.buffer_names(rank) if rank < layout.num_ranks else frozenset()
    different = sorted(expected ^ set(buffers))
    if different:
        raise ValueError(
            f"weight sync: the {side} has {len(buffers)} tensors, its layout {len(expected)}; "
            f"only one of them has {different[:5]}"
        )


def replica_layout(source: MegatronLayout, dtype: torch.dtype) -> ReplicatedLayout:
    """Every rank of the source's world holds the whole model under Hugging Face names, in `dtype`."""
    specs = {name: TensorSpec(spec.shape, dtype) for name, spec in source.tensors.items()}
    return ReplicatedLayout(specs, source.num_ranks)


def replica_sync(
    source: MegatronLayout,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None,
    *,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> ReplicaSync:
    """Megatron shards -> a whole model on every rank, for engines embedded in the trainer's processes.

    Destinations of `execute` are the engine's tensors by Hugging Face name, without aliases: a tied lm_head is the
    embedding.
    """
    return ReplicaSync(source, replica_layout(source, dtype), group, bucket_bytes=bucket_bytes)
