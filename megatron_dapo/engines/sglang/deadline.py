"""Calls of httpx that end at a deadline, however slowly bytes come: httpx's own timeouts start anew at every byte."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import httpcore
import httpx


class DeadlineTransport(httpx.HTTPTransport):
    """Connections of a client whose calls may be bounded as a whole."""

    def __init__(self, **options: Any) -> None:
        """Take the options of httpx.HTTPTransport."""
        super().__init__(**options)
        self._ends = _Ends()
        # httpx has no argument for it.
        self._pool._network_backend = _Backend(self._ends)

    @contextmanager
    def until(self, end: float) -> Iterator[None]:
        """Let calls of this thread raise httpx.TimeoutException at `end` (of time.monotonic)."""
        self._ends.end = end
        try:
            yield
        finally:
            self._ends.end = math.inf


class _Ends(threading.local):
    end = math.inf

    def within(self, timeout: float | None, error: type[Exception]) -> float | None:
        """Return the shorter of `timeout` and the seconds left. Raises `error` if none are."""
        left = self.end - time.monotonic()
        if left <= 0:
            raise error("the deadline of the whole call")
        return timeout if left == math.inf else left if timeout is None else min(left, timeout)


class _Backend(httpcore.SyncBackend):
    def __init__(self, ends: _Ends) -> None:
        super().__init__()
        self._ends = ends

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        within = self._ends.within(timeout, httpcore.ConnectTimeout)
        stream = super().connect_tcp(host, port, within, local_address, socket_options)
        return _Stream(stream, self._ends)


class _Stream(httpcore.NetworkStream):
    """A connection whose reads and writes end at the deadline of the thread that calls."""

    def __init__(self, stream: httpcore.NetworkStream, ends: _Ends) -> None:
        self._stream, self._ends = stream, ends
        self.close, self.get_extra_info = stream.close, stream.get_extra_info  # type: ignore[method-assign]

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, self._ends.within(timeout, httpcore.ReadTimeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, self._ends.within(timeout, httpcore.WriteTimeout))

    def start_tls(self, ssl_context: Any, server_hostname: Any = None, timeout: float | None = None) -> _Stream:
        stream = self._stream.start_tls(
            ssl_context, server_hostname, self._ends.within(timeout, httpcore.ConnectTimeout)
        )
        return _Stream(stream, self._ends)
