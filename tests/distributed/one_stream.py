"""A stand-in for NCCL on the CPU: batches of a member run one after the other, and those of a sender share its GPU's queue."""

from __future__ import annotations

import queue
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_dapo.bridge.protocol import peer_group
from megatron_dapo.bridge.transports.p2p import P2PTransport


class Work:
    """One batch. Like NCCL's, it completes once every operation of the batch has."""

    def __init__(self, operations: list[tuple[str, list[torch.Tensor], int]]) -> None:
        self.operations = operations
        self.error: RuntimeError | None = None
        self.is_done = threading.Event()

    def finish(self, error: RuntimeError | None) -> None:
        self.error = error
        self.is_done.set()

    def is_completed(self) -> bool:
        return self.is_done.is_set()

    def wait(self) -> None:
        if self.error is not None:
            raise self.error


class HardwareQueue:
    """The one queue of a GPU with CUDA_DEVICE_MAX_CONNECTIONS=1.

    It starts batches in the order of their launch. One whose stream is busy holds back all that were launched after it.
    """

    def __init__(self) -> None:
        self._launched: queue.Queue[tuple[OneStream, Work]] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def launch(self, stream: OneStream, work: Work) -> None:
        self._launched.put((stream, work))

    def _run(self) -> None:
        while True:
            stream, work = self._launched.get()
            if stream.newest is not None:
                stream.newest.is_done.wait()
            stream.newest = work
            stream.start(work)


_gpu = threading.local()  # queue: of the GPU that communicators of this thread are made on


class OneStream:
    """Point-to-point operations in one stream: a batch waits for the one before it, as kernels of a communicator do."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        self.newest: Work | None = None  # the last one started
        self._gpu: HardwareQueue = getattr(_gpu, "queue", None) or HardwareQueue()
        self._group = peer_group._gloo(store, rank, size, timeout, "127.0.0.1")
        self._rank, self._size, self._timeout = rank, size, timeout
        self._started: queue.Queue[Work] = queue.Queue()
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
        return self._launch(operations)

    def abort(self) -> None:
        peer_group._close_gloo(self._group, set(range(self._size)) - {self._rank})

    def _add(self, operation: str, tensors: list[torch.Tensor], peer: int) -> Work | None:
        if self._batch is None:
            return self._launch([(operation, tensors, peer)])
        self._batch.append((operation, tensors, peer))
        return None

    def _launch(self, operations: list[tuple[str, list[torch.Tensor], int]]) -> Work:
        work = Work(operations)
        self._gpu.launch(self, work)
        return work

    def start(self, work: Work) -> None:
        self._started.put(work)

    def _run(self) -> None:
        while True:
            work = self._started.get()
            try:
                started: list[Any] = [
                    getattr(self._group, op)(tensors, peer, 0) for op, tensors, peer in work.operations
                ]
                for operation in started:
                    operation.wait(self._timeout)
                work.finish(None)
            except RuntimeError as error:
                work.finish(error)


def use_one_queue_a_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for NCCL. All communicators of a trainer rank share a queue; an engine rank has one communicator."""
    queues: dict[int, HardwareQueue] = {}
    original, one_at_a_time = P2PTransport._join, threading.Lock()

    def join(self: P2PTransport, *arguments: Any) -> peer_group.PeerGroup:
        with one_at_a_time:
            _gpu.queue = queues.setdefault(self.rank, HardwareQueue())
        return original(self, *arguments)

    monkeypatch.setattr(P2PTransport, "_join", join)
    monkeypatch.setitem(peer_group.BACKENDS, "nccl", (OneStream, "cpu"))
