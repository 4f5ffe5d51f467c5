"""Changed elements of a bucket's chunks as bytes, written by trainer ranks and applied inside the engine.

A segment holds, for each of its chunks in order, three arrays that begin at multiples of 8 bytes:

    counts  int32 [blocks]     changed elements in each block of 65,536 elements, row-major in the chunk
    places  uint16 [changed]   their places in the block, ascending
    values  [changed]          in the parameter's type

which is 4 bytes for each changed element in bf16. In shared memory a segment has a fixed area of the slot (`areas`).
What arrives is not trusted: a segment that does not follow the format is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch

from megatron_dapo.bridge.protocol.checksums import native
from megatron_dapo.bridge.protocol.messages import CHUNK_ALIGNMENT, Bucket
from megatron_dapo.reshard.slices import Coordinates
from megatron_dapo.rounding import round_up

BLOCK = 1 << 16
_SHARE = 8  # a segment's area holds this part of its bytes at least
BUCKET_SCALE = 4  # bytes of a bucket of changes, as a multiple of a slot: half of the slot is spare
_ALIGNMENT = 8
_NATIVE_SHARE = 8  # compiled code finds as many changes as this part of the elements; with more, torch finds them
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Change(NamedTuple):
    """Changed elements of one chunk."""

    positions: torch.Tensor  # int64 [changed], ascending, row-major in the chunk
    values: torch.Tensor  # [changed], in the parameter's type


def bits(values: torch.Tensor) -> torch.Tensor:
    """Return a view as integers: equal bits, and not equal numbers, are unchanged."""
    return values.view(_BITS[values.dtype.itemsize])


def change(values: torch.Tensor, held: torch.Tensor) -> Change:
    """Return the elements of `values` whose bits differ from those of `held`, of the same shape."""
    positions = differences(bits(values), bits(held))
    # Types of one byte have no index operations.
    changed = bits(values).reshape(-1)[positions].view(values.dtype)
    return Change(positions, changed)


def differences(after: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Return the positions, row-major, of integers that differ."""
    compiled = native()
    if compiled is not None and after.device.type == "cpu" and after.is_contiguous() and before.is_contiguous():
        compare = getattr(compiled, f"differences_{after.itemsize}")
        found = torch.empty(after.numel() // _NATIVE_SHARE + 64, dtype=torch.int64)
        count = compare(after.data_ptr(), before.data_ptr(), after.numel(), found.data_ptr(), found.numel())
        if count <= found.numel():
            return found[:count].clone()
    return (after != before).reshape(-1).nonzero().view(-1)


def apply(target: torch.Tensor, changed: Change) -> None:
    """Write the changed elements into a chunk, in place; `target` may have any strides."""
    values = bits(changed.values)
    if target.is_contiguous():
        bits(target).view(-1).index_copy_(0, changed.positions, values)
    else:
        bits(target)[torch.unravel_index(changed.positions, target.shape)] = values


def encode(changes: Sequence[tuple[Coordinates, Change]]) -> torch.Tensor:
    """Return a segment as uint8, given each chunk's shape and changed elements."""
    arrays = []
    for shape, changed in changes:
        block = changed.positions // BLOCK
        counts = torch.bincount(block, minlength=_blocks(shape)).to(torch.int32)
        # Numbers from 32,768 wrap: the bits are those of uint16.
        places = (changed.positions - block * BLOCK).to(torch.int16)
        arrays += [_padded(counts), _padded(places), _padded(changed.values)]
    return torch.cat(arrays)


def encoded_bytes(shape: Coordinates, num_changed: int, itemsize: int) -> int:
    """Return the bytes of a chunk in a segment."""
    return sum(round_up(size, _ALIGNMENT) for size in (4 * _blocks(shape), 2 * num_changed, itemsize * num_changed))


def decode(data: torch.Tensor, chunks: Sequence[tuple[Coordinates, torch.dtype]]) -> tuple[list[Change], int]:
    """Return the changed elements of a segment's chunks and the bytes it takes. ValueError if it is no segment."""
    changes, start = [], 0

    def take(count: int, dtype: torch.dtype) -> torch.Tensor:
        nonlocal start
        stop = start + count * dtype.itemsize
        if stop > data.numel():
            raise ValueError(f"weight sync: a delta of {data.numel()} bytes ends inside its segment")
        array = data[start:stop].view(dtype)
        start = round_up(stop, _ALIGNMENT)
        return array

    for shape, dtype in chunks:
        counts = take(_blocks(shape), torch.int32).to(torch.int64)
        if not bool(((counts >= 0) & (counts <= BLOCK)).all()):
            raise ValueError("weight sync: a delta has no such counts of changed elements")
        num_changed = int(counts.sum())
        starts = torch.arange(len(counts), device=data.device).repeat_interleave(counts) * BLOCK
        positions = starts + (take(num_changed, torch.int16).to(torch.int64) & (BLOCK - 1))
        values = take(num_changed, dtype)
        is_sorted = bool((positions[1:] > positions[:-1]).all())
        if num_changed and not (is_sorted and int(positions[-1]) < prod(shape)):
            raise ValueError(f"weight sync: a delta changes elements outside its chunk of shape {tuple(shape)}, or twice")
        changes.append(Change(positions, values))
    return changes, start


def areas(bucket: Bucket, slot_bytes: int) -> Mapping[int, slice]:
    """Return trainer rank -> bytes of the slot for its segment: in proportion to it, and a share of what is spare."""
    shares = {rank: (stop - start) // _SHARE for rank, (start, stop) in bucket.segments.items()}
    spare = (slot_bytes - sum(shares.values())) // max(1, len(shares))
    found, position = {}, 0
    for rank, share in shares.items():
        size = max(0, share + spare) // CHUNK_ALIGNMENT * CHUNK_ALIGNMENT
        found[rank] = slice(position, position + size)
        position += size
    return found


def _blocks(shape: Coordinates) -> int:
    return -(-prod(shape) // BLOCK)


def _padded(array: torch.Tensor) -> torch.Tensor:
    octets = array.view(torch.uint8)
    return torch.nn.functional.pad(octets, (0, -octets.numel() % _ALIGNMENT))
