"""Collectives on dictionaries: JSON, tensors, sums and maxima. Nothing is pickled; every rank of the group must call.

`source` is a rank of the group (0 to size - 1). `group` None is the default group.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist

from megatron_dapo.rounding import round_up

BROADCAST_DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.uint8,
        torch.bool,
    )
}
ALIGNMENT_BYTES = 16  # alignment of each tensor in the common buffer; at least the largest element


def communication_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Return the device on which tensors travel over `group`: the current CUDA device for NCCL, otherwise the CPU."""
    return (
        torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else torch.device("cpu")
    )


def broadcast_json(value: Any | None, source: int = 0, group: dist.ProcessGroup | None = None) -> Any:
    """Return the JSON-serializable `value` of rank `source` on every rank (others pass None). Tuples arrive as
    lists."""
    device = communication_device(group)
    is_source = dist.get_rank(group) == source
    text = bytearray(json.dumps(value).encode())
    payload = torch.frombuffer(text, dtype=torch.uint8).to(device) if is_source else None
    size = torch.tensor([payload.numel() if payload is not None else 0], device=device)
    dist.broadcast(size, group=group, group_src=source)
    if payload is None:
        payload = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(payload, group=group, group_src=source)
    return value if is_source else json.loads(payload.cpu().numpy().tobytes())


def broadcast_tensors(
    tensors: Mapping[str, torch.Tensor] | None, source: int = 0, group: dist.ProcessGroup | None = None
) -> dict[str, torch.Tensor]:
    """Return the named tensors of rank `source` on every rank (others pass None), on the device of the group's backend.

    Only one header and one flat buffer are sent, however many tensors there are. On other ranks the results are views
    of that buffer.
    """
    is_source = dist.get_rank(group) == source
    assert tensors is not None or not is_source, f"rank {source} broadcasts, but has no tensors"
    header = broadcast_json(
        [_describe(name, tensor) for name, tensor in tensors.items()] if is_source and tensors is not None else None,
        source,
        group,
    )
    device = communication_device(group)
    places, size = _places(header)
    buffer = torch.zeros(size, dtype=torch.uint8, device=device)
    views = {
        name: buffer[place].view(BROADCAST_DTYPES[dtype]).view(shape)
        for (name, dtype, shape), place in zip(header, places, strict=True)
    }
    if is_source and tensors is not None:
        for name, tensor in tensors.items():
            views[name].copy_(tensor.detach())
    dist.broadcast(buffer, group=group, group_src=source)
    return views


def _describe(name: str, tensor: torch.Tensor) -> tuple[str, str, list[int]]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in BROADCAST_DTYPES:
        raise ValueError(f"tensor {name!r} has type {dtype}; these can be broadcast: {', '.join(BROADCAST_DTYPES)}")
    return name, dtype, list(tensor.shape)


def _places(header: list[tuple[str, str, list[int]]]) -> tuple[list[slice], int]:
    """Return the byte ranges of the tensors in the common buffer, and its size."""
    places, end = [], 0
    for _, dtype, shape in header:
        start = round_up(end, ALIGNMENT_BYTES)
        end = start + torch.Size(shape).numel() * BROADCAST_DTYPES[dtype].itemsize
        places.append(slice(start, end))
    return places, end


def sum_over(
    values: Mapping[str, torch.Tensor | float], group: dist.ProcessGroup | None = None
) -> dict[str, torch.Tensor]:
    """Return sums over ranks of equally named and shaped values, in float64 on the group's device, by one
    collective."""
    return _reduce(values, dist.ReduceOp.SUM, group)


def max_over(
    values: Mapping[str, torch.Tensor | float], group: dist.ProcessGroup | None = None
) -> dict[str, torch.Tensor]:
    """Return maxima over ranks of equally named and shaped values, in float64 on the group's device, by one
    collective."""
    return _reduce(values, dist.ReduceOp.MAX, group)


def _reduce(
    values: Mapping[str, torch.Tensor | float], operation: Any, group: dist.ProcessGroup | None
) -> dict[str, torch.Tensor]:
    device = communication_device(group)
    parts = {name: torch.as_tensor(values[name]).detach().to(device, torch.float64) for name in sorted(values)}
    # Send a check along: unequal names would otherwise silently add up different things. Its square catches them for
    # sums and maxima: only equal numbers have n * sum(x^2) = sum(x)^2, and max(x) = -max(-x).
    check = float(crc32(json.dumps([(name, list(part.shape)) for name, part in parts.items()]).encode()) % (1 << 20))
    flat = torch.cat(
        [
            torch.tensor([check, check * check, -check], dtype=torch.float64, device=device),
            *(part.flatten() for part in parts.values()),
        ]
    )
    dist.all_reduce(flat, op=operation, group=group)
    _check_equal_names(flat[:3].tolist(), operation, dist.get_world_size(group), list(parts))
    pieces = flat[3:].split([part.numel() for part in parts.values()])
    return {name: piece.view(part.shape) for (name, part), piece in zip(parts.items(), pieces, strict=True)}


def _check_equal_names(check: list[float], operation: Any, num_ranks: int, names: list[str]) -> None:
    value, square, negative = check
    equal = num_ranks * square == value * value if operation == dist.ReduceOp.SUM else value == -negative
    assert equal, f"the ranks reduce values of different names or shapes; this one has {names}"


def summing(group: dist.ProcessGroup) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that sums a tensor over `group`, as of a sequence's chunks over the ranks that hold them."""
    if group.size() == 1:
        return lambda sums: sums  # the common case needs no collective

    def reduce(sums: torch.Tensor) -> torch.Tensor:
        total = sums.clone()
        dist.all_reduce(total, group=group)
        return total

    return reduce
