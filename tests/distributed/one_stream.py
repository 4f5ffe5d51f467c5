"""A stand-in for NCCL on the CPU: batches of a member run one after the other, whatever their tags and peers."""

from __future__ import annotations

import queue
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_dapo.bridge.protocol import peer_group


class Work:
    """One batch. Like NCCL's, it completes once every operation of the batch has."""

    def __init__(self, operations: list[tuple[str, list[torch.Tensor], int]]) -> None:
        self.operations = operations
        self.error: RuntimeError | None = None
        self._done = threading.Event()

    def finish(self, error: RuntimeError | None) -> None:
        self.error = error
        self._done.set()

    def is_completed(self) -> bool:
        return self._done.is_set()

    def wait(self) -> None:
        if self.error is not None:
            raise self.error


class OneStream:
    """Point-to-point operations in one stream: a batch waits for the one before it, as kernels of a communicator do."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        self._group = peer_group._gloo(store, rank, size, timeout, "127.0.0.1")
        self._rank, self._size, self._timeout = rank, size, timeout
        self._queue: queue.Queue[Work] = queue.Queue()
        self._batch: list[tuple[str, list[torch.Tensor], int]] | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        return self._add("send", tensors, peer)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        return self._add("recv", tensors, peer)

    def _start_coalescing(self) -> None:
        self._batch = []

    def _end_coalescing(self) -> Work:
        operations, self._batch = self._batch or [], None
        return self._enqueue(operations)

    def abort(self) -> None:
        peer_group._close_gloo(self._group, set(range(self._size)) - {self._rank})

    def _add(self, operation: str, tensors: list[torch.Tensor], peer: int) -> Work | None:
        if self._batch is None:
            return self._enqueue([(operation, tensors, peer)])
        self._batch.append((operation, tensors, peer))
        return None

    def _enqueue(self, operations: list[tuple[str, list[torch.Tensor], int]]) -> Work:
        work = Work(operations)
        self._queue.put(work)
        return work

    def _run(self) -> None:
        while True:
            work = self._queue.get()
            try:
                started: list[Any] = [
                    getattr(self._group, op)(tensors, peer, 0) for op, tensors, peer in work.operations
                ]
                for operation in started:
                    operation.wait(self._timeout)
                work.finish(None)
            except RuntimeError as error:
                work.finish(error)
