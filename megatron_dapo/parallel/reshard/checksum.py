"""Checksums of global tensors that each holder computes on its own boxes and that add up across ranks.

The checksum of a tensor is sum over elements of (2 i + 1) * bits_i modulo 2^64, i the row-major index in the GLOBAL
tensor. An odd factor is invertible, so any change of one element changes the sum; the index in it catches rows in the
wrong place.
"""

from __future__ import annotations

import torch

from megatron_dapo.parallel.reshard.boxes import Box, Coordinates, whole

_BITS_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK_ELEMENTS = 1 << 20


def box_checksum(values: torch.Tensor, box: Box, shape: Coordinates) -> torch.Tensor:
    """Sum (0-d int64) of the part `box` (values: shape of the box) of a global tensor of shape `shape`."""
    bits = values.detach().view(_BITS_OF_SIZE[values.dtype.itemsize])
    if bits.dim() == 0:
        return bits.to(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    rows = max(1, _CHUNK_ELEMENTS // max(1, bits[0].numel()))
    weights = _weights(box, shape, values.device)
    for start in range(0, bits.shape[0], rows):
        weight = sum((w[start : start + rows] if dim == 0 else w) for dim, w in enumerate(weights)) + 1
        total += (bits[start : start + rows].to(torch.int64) * weight).sum()
    return total


def tensor_checksum(values: torch.Tensor) -> torch.Tensor:
    """`box_checksum` of a whole tensor."""
    return box_checksum(values, whole(tuple(values.shape)), tuple(values.shape))


def _weights(box: Box, shape: Coordinates, device: torch.device) -> list[torch.Tensor]:
    """Twice the global row-major index as a sum of one broadcastable tensor a dimension."""
    weights, stride = [], 1
    for dim in reversed(range(len(shape))):
        index = torch.arange(box.offset[dim], box.offset[dim] + box.shape[dim], dtype=torch.int64, device=device)
        view = [1] * len(shape)
        view[dim] = -1
        weights.append((2 * stride * index).view(view))
        stride *= shape[dim]
    return weights[::-1]
