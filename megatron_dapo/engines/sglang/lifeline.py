"""Connections between the parts of a server on several nodes: when one part ends, however it ends, the others end too.

SGLang's ranks would wait for a lost one in a collective: until a watchdog ends them, or for ever. Each part connects to the
one on node 0 before SGLang is imported. Standard library only, like the engine's other processes.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

_CONNECT_S = 300.0  # the part on node 0 may start later: its node's file system may be slower
_HELLO_S = 10.0
_RETRY_S = 0.2
# A node without power closes no connection: it is found lost after about 25 s.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
_DIGEST_BYTES = hashlib.sha256().digest_size

End = Callable[[], None]


def listen(host: str, port: int, key: str, end: End) -> None:
    """Wait in threads for the other parts; call `end` once one that has shown the server's key is gone."""
    listener = socket.create_server((host, port), family=_family(host))

    def accept() -> None:
        while True:
            connection, address = listener.accept()
            threading.Thread(target=_admit, args=(connection, address[0], key, end), daemon=True).start()

    threading.Thread(target=accept, name="lifeline", daemon=True).start()


def connect(host: str, port: int, key: str, end: End) -> None:
    """Connect to the part on node 0 in a thread; call `end` once it is gone, or if it cannot be reached."""
    threading.Thread(target=_hold, args=(host, port, key, end), name="lifeline", daemon=True).start()


def _admit(connection: socket.socket, host: str, key: str, end: End) -> None:
    connection.settimeout(_HELLO_S)
    hello = b""
    with suppress(OSError):
        while len(hello) < _DIGEST_BYTES and (more := connection.recv(_DIGEST_BYTES - len(hello))):
            hello += more
    if not hmac.compare_digest(hello, _digest(key)):
        connection.close()  # nobody of ours
        return
    _wait_for_end(connection)
    _end(f"the part of this server at {host} has ended", end)


def _hold(host: str, port: int, key: str, end: End) -> None:
    deadline, connection = time.monotonic() + _CONNECT_S, None
    while connection is None:
        try:
            connection = socket.create_connection((host, port), timeout=_HELLO_S)
        except OSError as error:
            if time.monotonic() > deadline:
                _end(f"the part of this server at {host} port {port} is not reached in {_CONNECT_S:g} s ({error})", end)
                return
            time.sleep(_RETRY_S)
    with suppress(OSError):
        connection.sendall(_digest(key))
        _wait_for_end(connection)
    _end(f"the part of this server at {host} has ended", end)


def _wait_for_end(connection: socket.socket) -> None:
    """Return when the other end is closed, or its node no longer answers."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    with suppress(OSError):
        while connection.recv(1):
            pass


def _end(reason: str, end: End) -> None:
    print(f"error: {reason}; this one ends with it", file=sys.stderr, flush=True)
    end()


def _digest(key: str) -> bytes:
    return hashlib.sha256(f"lifeline {key}".encode()).digest()


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
