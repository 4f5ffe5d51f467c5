"""The thread that owns worker processes: it reads and writes their pipes, and replaces and reaps them."""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Generic, TypeVar

from megatron_dapo.workers.process import WorkerProcess

logger = logging.getLogger(__name__)

STOP_S = 30.0  # time for the thread to end
KILLED_S = 12.0  # time for killed processes to end: some seconds by their supervisors, then by force
REAP_SECONDS = 0.05  # interval of the checks of killed processes

Worker = TypeVar("Worker", bound=WorkerProcess)


class WorkerOwner(ABC, Generic[Worker]):
    """Owns worker processes in a separate thread. Other threads only call `wake` and `stop`.

    Args:
        name: noun for the workers in log lines, e.g. "verifier".
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()  # guards what other threads share with this one
        self._workers: list[Worker] = []
        self._dead: list[Worker] = []  # killed and not yet reaped
        self._stopping = False
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name=f"{name}-pool", daemon=True)

    def wake(self) -> None:
        """Let the thread look at what other threads have left for it."""
        with suppress(OSError):  # the pipe is full of earlier wakes, or closed: either way the thread needs no other
            self._wake_write.send(b"w")

    def stop(self) -> None:
        """End the thread and its processes; waiting calls fail."""
        if self._thread.is_alive():
            self._stopping = True
            self.wake()
            self._thread.join(STOP_S)
            if self._thread.is_alive():
                processes = [worker.process.pid for worker in self._workers]
                logger.error("the %s pool did not end within %g s; its processes are %s", self._name, STOP_S, processes)

    # ---- parts of a subclass

    @abstractmethod
    def _begin_step(self) -> None:
        """Start processes and give them work."""

    @abstractmethod
    def _seconds_to_next_deadline(self) -> float | None:
        """Return the time to sleep; None: until something happens."""

    @abstractmethod
    def _enforce_deadlines(self) -> None:
        """Kill what is late."""

    @abstractmethod
    def _handle_line(self, worker: Worker, line: bytes) -> None:
        """Take a line that a worker wrote."""

    @abstractmethod
    def _worker_is_gone(self, worker: Worker, reason: str | None = None) -> None:
        """Replace a worker that ended by itself or, with a `reason`, wrote what no worker writes."""

    @abstractmethod
    def _close(self, failure: BaseException) -> None:
        """Fail everything that waits for this thread, which ends."""

    def _forget(self, worker: Worker) -> None:
        """Clean up for a killed worker that has ended."""

    # ---- the loop

    def _run(self) -> None:
        failure: BaseException = RuntimeError(f"this {self._name} pool is closed")
        try:
            while not self._stopping:
                self._step()
        except BaseException as error:  # a bug here must not leave callers waiting forever
            logger.exception("the %s pool failed", self._name)
            failure = error
        finally:
            self._shut_down(failure)

    def _step(self) -> None:
        self._begin_step()
        wait = self._seconds_to_next_deadline()
        if self._dead:
            wait = REAP_SECONDS if wait is None else min(wait, REAP_SECONDS)
        for key, _ in self._selector.select(wait):
            if key.data is None:
                with suppress(BlockingIOError):  # raised when all wakes so far are read
                    while self._wake_read.recv(4096):
                        pass
            elif key.data in self._workers:
                self._serve(key.data)
        self._enforce_deadlines()
        self._reap()

    def _reap(self) -> None:
        ended = [worker for worker in self._dead if worker.has_ended()]
        self._dead = [worker for worker in self._dead if worker not in ended]
        for worker in ended:
            self._forget(worker)

    def _shut_down(self, failure: BaseException) -> None:
        for worker in list(self._workers):
            self._remove(worker)
        end = time.monotonic() + KILLED_S
        while self._dead and time.monotonic() < end:
            self._reap()
            if self._dead:
                time.sleep(REAP_SECONDS)
        for worker in self._dead:  # the kernel holds it, e.g. in a read of a file system that hangs
            logger.error("%s process %d has not ended %g s after SIGKILL", self._name, worker.process.pid, KILLED_S)
        self._close(failure)
        self._selector.close()
        self._wake_read.close()
        self._wake_write.close()

    # ---- processes

    def _add(self, worker: Worker) -> None:
        self._workers.append(worker)
        self._selector.register(worker.stdout, selectors.EVENT_READ, worker)
        self._write(worker)

    def _remove(self, worker: Worker) -> None:
        """Kill a worker and its children."""
        self._workers.remove(worker)
        self._stop_writing(worker)
        self._selector.unregister(worker.stdout)
        worker.kill()
        self._dead.append(worker)

    def _write(self, worker: Worker) -> None:
        worker.write()
        if worker.unsent:
            if worker.stdin not in self._selector.get_map():
                self._selector.register(worker.stdin, selectors.EVENT_WRITE, worker)
        else:
            # A pipe with room is always ready, so watching it with nothing to write would keep this thread spinning.
            self._stop_writing(worker)

    def _stop_writing(self, worker: Worker) -> None:
        if worker.stdin in self._selector.get_map():
            self._selector.unregister(worker.stdin)

    def _serve(self, worker: Worker) -> None:
        """Write and read as far as the pipes allow."""
        if worker.unsent:
            self._write(worker)
        lines, is_useless = worker.read()
        for line in lines:
            if worker in self._workers:
                self._handle_line(worker, line)
        if worker in self._workers and is_useless:
            self._worker_is_gone(worker)
