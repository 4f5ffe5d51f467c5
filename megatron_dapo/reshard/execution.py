"""Carry out a plan: in one process, by torch.distributed point-to-point, or from files.

`Buffers` maps the local names of one rank to tensors. Values are cast to the destination buffer's element type; between
processes they travel in the narrower of the two types.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Protocol

import torch
import torch.distributed as dist

from megatron_dapo.reshard.layout import ComputedBuffers, Shard, read_shard, shard_view
from megatron_dapo.reshard.pieces import pieces
from megatron_dapo.reshard.planner import ReshardPlan, Traffic, Transfer
from megatron_dapo.reshard.slices import Slice
from megatron_dapo.rounding import round_up

Buffers = Mapping[str, torch.Tensor]
DtypeOf = Callable[[str], torch.dtype]

DEFAULT_BUCKET_BYTES = 64 << 20
_ALONE_BYTES = 1 << 20  # a transfer of this size is a separate bucket, sent from and received into its place
# Offsets in a bucket are multiples of this, so that any part can be viewed as any element type.
_ALIGNMENT = 16


class ShardReader(Protocol):
    """Reads part of a source rank's stored buffer straight into a tensor."""

    def read(self, rank: int, shard: Shard, bounds: Slice, out: torch.Tensor) -> None:
        """Fill `out` (shape of `bounds`) with global slice `bounds`, which lies in `shard` of the source rank."""


def execute_from_reader(transfers: Iterable[Transfer], reader: ShardReader, destination: Buffers) -> dict[str, int]:
    """Fill one rank's buffers from storage; return the number of elements written into each buffer."""
    written = dict.fromkeys(destination, 0)
    for transfer in transfers:
        shard = transfer.destination_shard
        out = shard_view(destination[shard.local], shard, transfer.bounds)
        reader.read(transfer.source, transfer.source_shard, transfer.bounds, out)
        written[shard.local] += transfer.bounds.volume
    return written


def execute_distributed(
    plan: ReshardPlan,
    sources: Buffers,
    destinations: Buffers,
    group: dist.ProcessGroup | None,
    *,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    tensors: Collection[str] | None = None,
) -> Traffic:
    """Carry out this rank's part of the plan, by point-to-point in `group` (None: one process, everything is local).

    Every rank of the group calls it with the same plan and the same `tensors` (None: all). At step s rank r sends to r
    + s and receives from r - s, one bucket each way at a time. At most two buckets (or two transfers larger than a
    bucket) are in memory, and waits cannot form a cycle. Return the bytes that crossed or were copied.
    """
    size, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    if plan.num_ranks > size:
        raise ValueError(f"reshard: the plan is for {plan.num_ranks} ranks, the process group has {size}")
    return execute_transfers(
        plan.receives(rank, tensors),
        plan.sends(rank, tensors),
        lambda tensor: wire_dtype(plan, tensor),
        sources,
        destinations,
        group,
        bucket_bytes=bucket_bytes,
    )


def execute_transfers(
    receives: Iterable[Transfer],
    sends: Iterable[Transfer],
    dtype_of: DtypeOf,
    sources: Buffers,
    destinations: Buffers,
    group: dist.ProcessGroup | None,
    *,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> Traffic:
    """Carry out this rank's receives and sends, both including those to itself; see `execute_distributed`.

    Transfers between two ranks are in the same order on both. `dtype_of`: a tensor's element type in transit.
    """
    rank = 0 if group is None else dist.get_rank(group)
    incoming = _by_peer((t, t.source) for t in receives)
    outgoing = _by_peer((t, t.destination) for t in sends)
    local = 0
    for transfer in incoming.pop(rank, ()):
        local += _copy_local(transfer, sources, destinations)
    outgoing.pop(rank, None)  # the same transfers, copied above
    sent = received = 0
    if group is None:
        return Traffic(sent=0, received=0, local=local)
    size = dist.get_world_size(group)
    for step in range(1, size):
        to, source = (rank + step) % size, (rank - step) % size
        pairs = zip_longest(
            _buckets(dtype_of, outgoing.get(to, []), bucket_bytes),
            _buckets(dtype_of, incoming.get(source, []), bucket_bytes),
        )
        for send, receive in pairs:
            counts = _exchange(dtype_of, send or [], receive or [], to, source, sources, destinations, group)
            sent, received = sent + counts[0], received + counts[1]
    return Traffic(sent=sent, received=received, local=local)


def wire_dtype(plan: ReshardPlan, tensor: str) -> torch.dtype:
    """Return the element type in which a tensor travels: the destination's, unless the source's is narrower."""
    source, destination = plan.source.tensors[tensor].dtype, plan.destination.tensors[tensor].dtype
    return source if source.itemsize < destination.itemsize else destination


def _copy_local(transfer: Transfer, sources: Buffers, destinations: Buffers) -> int:
    source = read_shard(sources, transfer.source_shard, transfer.bounds)
    destination = shard_view(
        destinations[transfer.destination_shard.local], transfer.destination_shard, transfer.bounds
    )
    destination.copy_(source)
    return source.numel() * source.dtype.itemsize


def _by_peer(pairs: Iterable[tuple[Transfer, int]]) -> dict[int, list[Transfer]]:
    peers: dict[int, list[Transfer]] = {}
    for transfer, peer in pairs:
        peers.setdefault(peer, []).append(transfer)
    return peers


def _num_bytes(dtype_of: DtypeOf, transfer: Transfer) -> int:
    return transfer.bounds.volume * dtype_of(transfer.tensor).itemsize


def _wire_bytes(dtype_of: DtypeOf, transfer: Transfer) -> int:
    """Return the bytes of a transfer within a bucket, alignment included."""
    return round_up(_num_bytes(dtype_of, transfer), _ALIGNMENT)


def _buckets(dtype_of: DtypeOf, transfers: Sequence[Transfer], bucket_bytes: int) -> Iterator[list[Transfer]]:
    """Yield runs of transfers of at most bucket_bytes (a larger one by itself); both ends cut the list identically."""
    sizes = [_wire_bytes(dtype_of, transfer) for transfer in transfers]
    # A full bucket has no room.
    for piece in pieces([max(size, bucket_bytes) if size >= _ALONE_BYTES else size for size in sizes], bucket_bytes):
        yield list(transfers[piece])


def _exchange(
    dtype_of: DtypeOf,
    send: list[Transfer],
    receive: list[Transfer],
    to: int,
    source: int,
    sources: Buffers,
    destinations: Buffers,
    group: dist.ProcessGroup,
) -> tuple[int, int]:
    """Send one bucket and receive one at the same time; return the bytes of both."""
    operations = []
    inbound = place = _in_place(dtype_of, receive, [t.destination_shard for t in receive], destinations)
    if receive:
        if inbound is None:
            device = destinations[receive[0].destination_shard.local].device
            inbound = torch.empty(sum(_wire_bytes(dtype_of, t) for t in receive), dtype=torch.uint8, device=device)
        # P2POp takes world ranks, whatever the group.
        operations.append(dist.P2POp(dist.irecv, inbound, dist.get_global_rank(group, source), group))
    if send:
        outbound = _in_place(dtype_of, send, [t.source_shard for t in send], sources)
        outbound = _pack(dtype_of, send, sources) if outbound is None else outbound
        operations.append(dist.P2POp(dist.isend, outbound, dist.get_global_rank(group, to), group))
    # Use one batch: under NCCL two ranks that both send first would wait for each other's receive.
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    if inbound is not None and place is None:
        for transfer, part in _parts(dtype_of, receive, inbound):
            shard = transfer.destination_shard
            shard_view(destinations[shard.local], shard, transfer.bounds).copy_(part)
    return sum(_num_bytes(dtype_of, t) for t in send), sum(_num_bytes(dtype_of, t) for t in receive)


def _in_place(
    dtype_of: DtypeOf, transfers: list[Transfer], shards: list[Shard], buffers: Buffers
) -> torch.Tensor | None:
    """Return a bucket of one transfer as bytes of the buffer itself; None if other bytes travel."""
    if len(transfers) != 1 or isinstance(buffers, ComputedBuffers):
        return None
    [transfer], [shard] = transfers, shards
    view = shard_view(buffers[shard.local], shard, transfer.bounds)
    is_same = view.dtype == dtype_of(transfer.tensor) and view.is_contiguous()
    return view.reshape(-1).view(torch.uint8) if is_same and view.nbytes % _ALIGNMENT == 0 else None


def _pack(dtype_of: DtypeOf, transfers: list[Transfer], sources: Buffers) -> torch.Tensor:
    device = read_shard(sources, transfers[0].source_shard, transfers[0].bounds).device
    bucket = torch.empty(sum(_wire_bytes(dtype_of, t) for t in transfers), dtype=torch.uint8, device=device)
    for transfer, part in _parts(dtype_of, transfers, bucket):
        part.copy_(read_shard(sources, transfer.source_shard, transfer.bounds))
    return bucket


def _parts(
    dtype_of: DtypeOf, transfers: list[Transfer], bucket: torch.Tensor
) -> Iterator[tuple[Transfer, torch.Tensor]]:
    """Yield each transfer with its part of the bucket, viewed in its element type and shape."""
    position = 0
    for transfer in transfers:
        dtype = dtype_of(transfer.tensor)
        end = position + _num_bytes(dtype_of, transfer)
        yield transfer, bucket[position:end].view(dtype).view(transfer.bounds.shape)
        position += _wire_bytes(dtype_of, transfer)
