"""amp_C: the functions of apex's extension that megatron-core calls, by position as pybind11 takes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Lists = Sequence[Sequence[torch.Tensor]]
CALLS = {"multi_tensor_scale": 0, "multi_tensor_l2norm": 0}


def multi_tensor_scale(chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, scale: float, /) -> None:
    CALLS["multi_tensor_scale"] += 1
    sources, targets = tensor_lists
    for source, target in zip(sources, targets, strict=True):
        assert source.numel() == target.numel()
        target.copy_(source * float(scale))


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, per_tensor: bool | None = None, /
) -> tuple[torch.Tensor, torch.Tensor]:
    CALLS["multi_tensor_l2norm"] += 1
    [tensors] = tensor_lists
    norms = torch.stack([torch.linalg.vector_norm(each.float()) for each in tensors])
    return torch.linalg.vector_norm(norms).reshape(1), norms if per_tensor else torch.empty(0)
