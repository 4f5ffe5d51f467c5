"""Tensors that leave the device for host memory and come back to where they were.

What moves is a whole storage: its bytes are copied to the host and the storage itself is emptied, so that every view of
it (a parameter in a data-parallel buffer, a shard of the distributed optimizer in a parameter) stays the view it is and
is whole again when the storage is filled. In between a view has no memory: whoever touches one reads nothing sensible.
Where there is no accelerator "the device" is host memory as well, and everything happens just the same; memory that
numpy looks into cannot be given back there, and stays.

Host memory is pinned where the device is CUDA, and kept for the next time: a model's host copy is allocated once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Moved:
    """Bytes that left for the host, bytes that came back, and the seconds of both."""

    left: int = 0
    came_back: int = 0
    seconds: float = 0.0

    def __add__(self, other: Moved) -> Moved:
        return Moved(self.left + other.left, self.came_back + other.came_back, self.seconds + other.seconds)


@dataclass
class _Away:
    """An emptied storage (as a flat tensor of bytes, which keeps it alive) and where its bytes are."""

    storage: torch.Tensor  # uint8 [0]
    num_bytes: int
    host: torch.Tensor | None  # uint8 [num_bytes]; None: forgotten, it comes back as zeros


class HostMemory:
    """What of one process's tensors is in host memory. Tensors are named by themselves or by any view of them."""

    def __init__(self) -> None:
        self.moved = Moved()
        self._away: dict[int, _Away] = {}
        self._kept: dict[int, torch.Tensor] = {}  # host copies, also of what is back

    def send(self, tensors: Iterable[torch.Tensor]) -> None:
        """Empty the tensors' storages; their bytes are kept here. What is away already stays as it is."""
        self._leave(tensors, self._copy)

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """Empty the tensors' storages; they come back as zeros."""
        self._leave(tensors, lambda key, storage: None)

    def bring_back(self, tensors: Iterable[torch.Tensor]) -> None:
        """Fill the tensors' storages again. What is not away stays as it is."""
        start, num_bytes = time.perf_counter(), 0
        for key in dict.fromkeys(map(storage_key, tensors)):
            away = self._away.pop(key, None)
            if away is None:
                continue
            away.storage.untyped_storage().resize_(away.num_bytes)
            whole = away.storage.set_(away.storage.untyped_storage(), 0, (away.num_bytes,), (1,))
            if away.host is None:
                whole.zero_()
            else:
                whole.copy_(away.host, non_blocking=True)
                num_bytes += away.num_bytes
        if num_bytes:
            _wait()
            self.moved += Moved(came_back=num_bytes, seconds=time.perf_counter() - start)

    @property
    def is_empty(self) -> bool:
        """Whether every tensor is on its device."""
        return not self._away

    def is_away(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's storage is empty."""
        return storage_key(tensor) in self._away

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, or a view of its host copy that has the same shape and numbers."""
        away = self._away.get(storage_key(tensor))
        if away is None:
            return tensor
        assert away.host is not None, "this tensor was forgotten, there is nothing to read"
        typed = away.host.view(tensor.dtype)
        return typed.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def _leave(self, tensors: Iterable[torch.Tensor], keep: Callable[[int, torch.Tensor], torch.Tensor | None]) -> None:
        start, leaving = time.perf_counter(), []
        for tensor in tensors:
            key = storage_key(tensor)
            num_bytes = tensor.untyped_storage().nbytes()
            if key in self._away or not num_bytes or not tensor.untyped_storage().resizable():
                continue
            storage = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            storage.set_(tensor.untyped_storage(), 0, (num_bytes,), (1,))
            self._away[key] = _Away(storage, num_bytes, keep(key, storage))
            leaving.append(self._away[key])
        if not leaving:
            return
        _wait()  # the copies are made before their sources go
        for away in leaving:
            away.storage.untyped_storage().resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # for other processes on the device
        copied = sum(away.num_bytes for away in leaving if away.host is not None)
        self.moved += Moved(left=copied, seconds=time.perf_counter() - start)

    def _copy(self, key: int, storage: torch.Tensor) -> torch.Tensor:
        host = self._kept.get(key)
        if host is None or host.numel() != storage.numel():
            host = torch.empty(storage.numel(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
            self._kept[key] = host
        return host.copy_(storage, non_blocking=True)


def own_memory(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Give parameters whose memory numpy has looked into (a file was read into it) memory that can be given back."""
    for parameter in parameters:
        if not parameter.untyped_storage().resizable():
            parameter.data = parameter.data.clone()


def storage_key(tensor: torch.Tensor) -> int:
    """Of the tensor's storage, whatever memory that has now."""
    return tensor.untyped_storage()._cdata


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
