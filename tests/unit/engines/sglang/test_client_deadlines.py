"""A control call ends at its deadline, whatever a server sends and how slowly."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from megatron_dapo.engines.sglang.client import EngineTimeout, SglangClient, Timeouts

HEADER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 40\r\n\r\n"
BODY = b'{"model_path": "aaaaaaaaaaaaaaaaaaaaaa"}'


@contextmanager
def dripping_server(at_once: bytes, dripping: bytes) -> Iterator[str]:
    """Serve one answer: `at_once`, then `dripping` by one byte every 0.2 s."""

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            try:
                connection.sendall(at_once)
                for place in range(len(dripping)):
                    connection.sendall(dripping[place : place + 1])
                    time.sleep(0.2)
            except OSError:  # the client gave up
                pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(timeout=20)


@pytest.mark.parametrize(("at_once", "dripping"), [(HEADER, BODY), (b"", HEADER + BODY)], ids=["body", "header"])
def test_bytes_that_drip_do_not_extend_a_deadline(at_once: bytes, dripping: bytes) -> None:
    """8 s and 22 s of bytes, each in time on its own."""
    with dripping_server(at_once, dripping) as url:
        client = SglangClient(url, "key", Timeouts(control_s=1.0))
        began = time.monotonic()
        with pytest.raises(EngineTimeout, match="no answer within 1 s"):
            client.model_info()
        assert time.monotonic() - began < 6.0


def test_a_slow_answer_within_the_deadline_is_whole() -> None:
    with dripping_server(HEADER + BODY[:-5], BODY[-5:]) as url:
        client = SglangClient(url, "key", Timeouts(control_s=20.0))
        assert client.model_info() == {"model_path": "a" * 22}
