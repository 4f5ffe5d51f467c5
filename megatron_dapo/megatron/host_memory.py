"""Offloads tensors to host memory and onloads them into the same storage.

A whole storage moves: its bytes are copied to the host and the storage is resized to 0, so that every view of it (a
parameter in a data-parallel buffer, a shard of the distributed optimizer in a parameter) stays valid and has its values
again once the storage is filled. In between, the views must not be read. Without an accelerator "the device" is host
memory too, and the same happens there.

Host pages are locked if the device is CUDA, and kept, so that a model's host copy is allocated once.
"""

from __future__ import annotations

import logging
import mmap
import time
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch

from megatron_dapo.rounding import round_up

logger = logging.getLogger(__name__)

_ALIGNMENT = 512  # alignment in bytes of a copy's start: enough for any type's width and whole device transfers


@dataclass(frozen=True)
class Moved:
    """Bytes offloaded and onloaded, and the seconds each took."""

    offloaded: int = 0
    onloaded: int = 0
    seconds: float = 0.0

    def __add__(self, other: Moved) -> Moved:
        return Moved(self.offloaded + other.offloaded, self.onloaded + other.onloaded, self.seconds + other.seconds)


@dataclass
class _Offloaded:
    """An emptied storage (as a flat tensor of bytes, which keeps it alive) and its host copy."""

    storage: torch.Tensor  # uint8 [0]
    num_bytes: int
    host: torch.Tensor | None  # uint8 [num_bytes]; None: discarded, zeros once onloaded


class _Block:
    """Host memory for the copies of several storages. Under CUDA its pages are locked until it is dropped."""

    def __init__(self, sizes: Mapping[int, int], is_locked: bool) -> None:
        """`sizes`: bytes of each storage, by storage key."""
        ends = list(accumulate(round_up(size, _ALIGNMENT) for size in sizes.values()))
        num_bytes = round_up(ends[-1], mmap.PAGESIZE)
        # torch's pinned memory would round every allocation up to a power of two, on average a third more.
        memory = torch.empty(num_bytes + mmap.PAGESIZE, dtype=torch.uint8)
        start = -memory.data_ptr() % mmap.PAGESIZE  # whole pages: no other block locks part of them
        self._memory = memory[start : start + num_bytes]
        self.copies = {
            key: self._memory[begin : begin + size]
            for (key, size), begin in zip(sizes.items(), (0, *ends[:-1]), strict=True)
        }
        if is_locked:
            self._lock()

    def _lock(self) -> None:
        cudart = torch.cuda.cudart()
        code = int(cudart.cudaHostRegister(self._memory.data_ptr(), self._memory.nbytes, 0))
        if code:
            logger.warning(
                "host memory: %d bytes stay pageable, cudaHostRegister failed with code %d: offloading is slower",
                self._memory.nbytes,
                code,
            )
            return
        # Unregister before the memory is freed, which happens once the block's tensors are gone.
        weakref.finalize(self, cudart.cudaHostUnregister, self._memory.data_ptr()).atexit = False


class HostMemory:
    """The offloaded tensors of one process. Any view of a tensor identifies its storage."""

    def __init__(self) -> None:
        self.moved = Moved()
        self._offloaded: dict[int, _Offloaded] = {}
        self._kept: dict[int, _Block] = {}  # block with the host copy of a storage, onloaded ones included

    def offload(self, tensors: Iterable[torch.Tensor], release: bool = True) -> None:
        """Copy the tensors' storages to the host and empty them, unless they are offloaded already.

        Without `release` the memory stays in this process's allocator for the next tensors it onloads.
        """
        self._empty(tensors, is_copied=True, release=release)

    def discard(self, tensors: Iterable[torch.Tensor]) -> None:
        """Empty the tensors' storages without a copy; onloading gives zeros."""
        self._empty(tensors, is_copied=False, release=True)

    def forget_others(self, tensors: Iterable[torch.Tensor]) -> None:
        """Drop the host copies of all other tensors, which are no longer in use."""
        used = set(map(storage_key, tensors))
        for copies in (self._offloaded, self._kept):
            for key in copies.keys() - used:
                del copies[key]

    def onload(self, tensors: Iterable[torch.Tensor]) -> None:
        """Refill the tensors' storages that are offloaded."""
        start, num_bytes = time.perf_counter(), 0
        for key in dict.fromkeys(map(storage_key, tensors)):
            found = self._offloaded.pop(key, None)
            if found is None:
                continue
            # Keep the same storage object, so that all its views become valid again.
            found.storage.untyped_storage().resize_(found.num_bytes)
            whole = found.storage.set_(found.storage.untyped_storage(), 0, (found.num_bytes,), (1,))
            if found.host is None:
                whole.zero_()
            else:
                whole.copy_(found.host, non_blocking=True)
                num_bytes += found.num_bytes
        if num_bytes:
            _synchronize()
            self.moved += Moved(onloaded=num_bytes, seconds=time.perf_counter() - start)

    @property
    def is_empty(self) -> bool:
        """True if every tensor is on its device."""
        return not self._offloaded

    def is_offloaded(self, tensor: torch.Tensor) -> bool:
        """Return True if the tensor's storage is empty."""
        return storage_key(tensor) in self._offloaded

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor, or a view of its host copy with the same shape and values."""
        found = self._offloaded.get(storage_key(tensor))
        if found is None:
            return tensor
        assert found.host is not None, "this tensor was discarded, there is nothing to read"
        typed = found.host.view(tensor.dtype)
        return typed.as_strided(tensor.shape, tensor.stride(), typed.storage_offset() + tensor.storage_offset())

    def _empty(self, tensors: Iterable[torch.Tensor], is_copied: bool, release: bool) -> None:
        start, emptied = time.perf_counter(), dict[int, _Offloaded]()
        for tensor in tensors:
            key = storage_key(tensor)
            num_bytes = tensor.untyped_storage().nbytes()
            # Memory that numpy has seen cannot be resized, so it stays.
            known = key in self._offloaded or key in emptied
            if known or not num_bytes or not tensor.untyped_storage().resizable():
                continue
            storage = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            storage.set_(tensor.untyped_storage(), 0, (num_bytes,), (1,))
            emptied[key] = _Offloaded(storage, num_bytes, None)
        if not emptied:
            return
        if is_copied:
            self._copy(emptied)
        # Copies are asynchronous and must complete before their sources are freed.
        _synchronize()
        for one in emptied.values():
            one.storage.untyped_storage().resize_(0)
        self._offloaded |= emptied
        if release and torch.cuda.is_available():
            # Freed blocks stay in PyTorch's cache, out of reach of an engine on the same device.
            torch.cuda.empty_cache()
        copied = sum(one.num_bytes for one in emptied.values() if one.host is not None)
        self.moved += Moved(offloaded=copied, seconds=time.perf_counter() - start)

    def _copy(self, emptied: Mapping[int, _Offloaded]) -> None:
        """Start copying storages to the host, over their last copies if the sizes match."""
        kept = self._kept
        sizes = {
            key: one.num_bytes
            for key, one in emptied.items()
            if key not in kept or kept[key].copies[key].numel() != one.num_bytes
        }
        if sizes:
            is_cuda = next(iter(emptied.values())).storage.device.type == "cuda"
            kept.update(dict.fromkeys(sizes, _Block(sizes, is_cuda)))
        for key, one in emptied.items():
            one.host = kept[key].copies[key].copy_(one.storage, non_blocking=True)


def own_memory(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Copy parameters whose memory numpy has seen (a file was read into it), so that they can be offloaded."""
    for parameter in parameters:
        if not parameter.untyped_storage().resizable():
            parameter.data = parameter.data.clone()


def storage_key(tensor: torch.Tensor) -> int:
    """Identify the tensor's storage."""
    # The data pointer changes with every resize; the storage object does not.
    return tensor.untyped_storage()._cdata


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
