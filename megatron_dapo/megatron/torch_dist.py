"""megatron-core's `torch_dist` checkpoints, written and read by one process on the CPU through megatron-core."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from megatron.core.transformer.utils import make_sharded_object_for_checkpoint

from megatron_dapo.checkpoints.layouts.torch_dist import TorchDistPlace
from megatron_dapo.megatron.platform import install_cpu_platform


@contextmanager
def one_process() -> Iterator[None]:
    """Provide the process group that megatron-core's checkpoints need, with only this process, unless one exists."""
    install_cpu_platform()
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def write_torch_dist(
    directory: Path,
    tensors: Mapping[TorchDistPlace, torch.Tensor],
    states: Iterable[TorchDistPlace],
    common: Mapping[str, Any],
) -> None:
    """Write a checkpoint to an empty directory; `states`: modules with empty state, `common`: data shared by all
    ranks."""
    state_dict: dict[str, Any] = {f"tensor/{place}": _sharded(place, tensor) for place, tensor in tensors.items()}
    for place in states:
        state_dict[f"state/{place}"] = make_sharded_object_for_checkpoint(
            None, place.key, _offsets(place), replica_id=(0, 0, 0)
        )
    with one_process():
        dist_checkpointing.save({**state_dict, **common}, str(directory))


def read_torch_dist(directory: Path, place: TorchDistPlace, out: torch.Tensor, may_be_padded: bool = False) -> None:
    """Fill `out` with an element of a global tensor; `may_be_padded`: the stored tensor may have another number of
    rows.

    Call it within `one_process`. megatron-core unpickles the directory's .metadata: check that file first.
    """
    sharded = _sharded(place, out, may_be_padded)
    loaded = TorchDistLoadShardedStrategy().load({"tensor": sharded}, directory)["tensor"]
    if loaded.data_ptr() != out.data_ptr():
        out.copy_(loaded.view(out.shape))


def _sharded(place: TorchDistPlace, tensor: torch.Tensor, may_be_padded: bool = False) -> ShardedTensor:
    # Leading axes are axes of the tensor here: what megatron-core calls prepended axes needs all elements along them at once.
    return ShardedTensor.from_rank_offsets(
        place.key,
        tensor[(None,) * len(place.indices)],
        *_offsets(place),
        replica_id=(0, 0, 0),
        allow_shape_mismatch=may_be_padded,
    )


def _offsets(place: TorchDistPlace) -> tuple[tuple[int, int, int], ...]:
    return tuple((axis, index, size) for axis, (index, size) in enumerate(place.indices))
