"""GPU memory that processes of one node share by CUDA IPC handles, which travel as JSON.

Written after PyTorch's reductions (torch/multiprocessing/reductions.py). The owner must keep its tensor until all others
have dropped theirs: torch counts one opening per handle, so the first of several that drops it frees the memory. Devices
are named by UUID, because processes may number them differently.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_BYTES_FIELDS = ("handle", "counter", "event")


def share(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the handle that opens the whole storage of a CUDA tensor (uint8). Raise ValueError if it cannot be shared."""
    try:
        chunks = tensor.untyped_storage()._share_cuda_()
    except RuntimeError as error:
        raise ValueError(
            f"memory of GPU {tensor.device} cannot be shared with other processes ({str(error).splitlines()[0]}); if "
            "PYTORCH_CUDA_ALLOC_CONF asks for expandable_segments, start without"
        ) from error
    device, handle, size, offset, counter, counter_offset, event, event_sync = chunks
    return {
        "device": str(torch.cuda.get_device_properties(device).uuid),
        "handle": handle.hex(),
        "size": size,
        "offset": offset,
        "counter": counter.hex(),
        "counter_offset": counter_offset,
        "event": event.hex(),
        "event_sync": event_sync,
    }


def open_shared(shared: Mapping[str, Any], through: torch.device | None = None) -> torch.Tensor:
    """Open the memory of `share` in this process: uint8, flat.

    `through`: this process's own GPU, which then reaches the memory of another one as its peer, as custom all-reduce kernels
    do: a process that opened it on that GPU would have a CUDA context there, of half a gigabyte. None: the memory's own GPU.
    Raise ValueError if the GPU is not visible here, or is no peer.
    """
    uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    if shared["device"] not in uuids:
        raise ValueError(
            f"GPU {shared['device']} is not visible in this process, which sees {', '.join(uuids) or 'none'}; "
            "processes that share memory must see each other's GPUs (CUDA_VISIBLE_DEVICES)"
        )
    owner = uuids.index(shared["device"])
    index = owner if through is None or through.index is None else through.index
    if index != owner and not torch.cuda.can_device_access_peer(index, owner):
        raise ValueError(
            f"GPU {index} cannot reach the memory of GPU {owner} as its peer (NVLink or PCIe): set "
            'sglang.shared_memory = "host"'
        )
    handle, counter, event = (bytes.fromhex(shared[name]) for name in _BYTES_FIELDS)
    storage = torch.UntypedStorage._new_shared_cuda(
        index,
        handle,
        shared["size"],
        shared["offset"],
        counter,
        shared["counter_offset"],
        event,
        # The event belongs to the owner's GPU. Nothing waits for it: slots have no contents before the first bucket.
        shared["event_sync"] and index == owner,
    )
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
