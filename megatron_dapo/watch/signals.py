"""SIGTERM and Ctrl-C: collecting stops, the state is saved if there is time, and the process exits with code 75.

A thread notes the signals, so this rank and the others know of the request even while the main thread is in native
code. Signals shortly after the first repeat it (a launcher signals a process group and its members); a later one means
"now".
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from types import TracebackType
from typing import Protocol

from megatron_dapo.watch.failure import EXIT_CODE

logger = logging.getLogger(__name__)

ONE_REQUEST_S = 5.0

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_KEY = "stop"
_LOOK_INTERVAL_S = 1.0  # interval of the checks of the store


class Stopped(Exception):
    """Ends a wait because a signal asked the run to stop."""


class Store(Protocol):
    """The part of a torch.distributed store by which ranks learn of each other's signals."""

    def set(self, key: str, value: str) -> None: ...

    def check(self, keys: list[str]) -> bool: ...


class StopRequest:
    """While entered, the first SIGINT or SIGTERM sets `requested`; one more than 5 s later ends the process at once.

    Poll `requested` where the run can stop, and agree on it with the other ranks, as a signal may not reach all of
    them. Enter it in the main thread.

    Args:
        end_time: when the process is killed at the latest, in seconds since 1970; None: unknown, or never.
        notice_s: seconds from the first signal to the kill, used instead of `end_time`; 0: use `end_time`.
    """

    def __init__(self, end_time: float | None = None, notice_s: float = 0.0) -> None:
        self.signal_name: str | None = None
        self._end_time = end_time
        self._notice_s = notice_s
        self._first = 0.0  # monotonic time of the first signal
        self._store: Store | None = None
        self._looked = 0.0
        self._is_told = False
        self._previous: dict[int, object] = {}
        self._signals, self._wakeup = socket.socketpair()

    def share(self, store: Store) -> None:
        self._store = store

    @property
    def requested(self) -> bool:
        """True once a signal has reached this process, or any that shares the store."""
        return self.signal_name is not None or self._is_told or self._look()

    @property
    def seconds_left(self) -> float:
        """Time until the process is killed, infinite if it is not known."""
        if self._notice_s:
            return self._notice_s - (time.monotonic() - self._first if self.signal_name else 0.0)
        return float("inf") if self._end_time is None else self._end_time - time.time()

    def check(self) -> None:
        if self.requested:
            raise Stopped(self.signal_name or "another rank received a signal")

    def __enter__(self) -> StopRequest:
        self._wakeup.setblocking(False)
        # The interpreter's C handler, which runs in any thread, writes the number before Python's handler runs.
        self._previous = {number: signal.signal(number, _ignore) for number in _SIGNALS}
        signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._listen, name="signals", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._wakeup.close()  # the thread reads the end and closes the other side

    def _listen(self) -> None:
        with self._signals:
            while received := self._signals.recv(1):
                if received[0] in _SIGNALS:
                    self._handle(received[0])

    def _handle(self, number: int) -> None:
        if self.signal_name is None:
            self._first = time.monotonic()
            self.signal_name = signal.Signals(number).name
            logger.warning(
                "%s: stopping; once more after %.0f s to end without saving", self.signal_name, ONE_REQUEST_S
            )
            if self._store is not None:
                self._store.set(_KEY, self.signal_name)
        elif time.monotonic() - self._first > ONE_REQUEST_S:
            # Works even while the main thread hangs in native code.
            os._exit(EXIT_CODE)

    def _look(self) -> bool:
        """Return True if another rank has been told to stop; the store is queried at most once a second."""
        now = time.monotonic()
        if self._store is None or now - self._looked < _LOOK_INTERVAL_S:
            return False
        self._looked = now
        self._is_told = self._store.check([_KEY])
        return self._is_told


def _ignore(number: int, frame: object) -> None:
    """Do nothing: the thread has seen the signal."""
