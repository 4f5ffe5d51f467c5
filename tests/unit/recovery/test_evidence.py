"""Evidence of the kernel about processes that this test makes."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

import pytest

from megatron_dapo.recovery.evidence import bytes_in_flight, neighbors, parent, sectors_written, tcp_queues

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's /proc")


def test_bytes_in_flight_change_while_the_other_end_reads_and_vanish() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = socket.create_connection(listener.getsockname())
        receiver, _ = listener.accept()
        with sender, receiver:
            assert bytes_in_flight(os.getpid(), tcp_queues()) == {}
            sender.setblocking(False)
            sent = 0
            with pytest.raises(BlockingIOError):
                while True:
                    sent += sender.send(bytes(1 << 16))
            full, end = {}, time.monotonic() + 20.0
            while (
                not full or bytes_in_flight(os.getpid(), tcp_queues()) != full
            ):  # the receiver's buffer grows for a moment
                assert time.monotonic() < end
                full = bytes_in_flight(os.getpid(), tcp_queues())
                time.sleep(0.3)
            sent -= len(receiver.recv(sent // 2, socket.MSG_WAITALL))
            assert bytes_in_flight(os.getpid(), tcp_queues()) not in ({}, full)
            while sent:
                sent -= len(receiver.recv(sent))
            while bytes_in_flight(os.getpid(), tcp_queues()):  # until the last acknowledgement
                assert time.monotonic() < end


def test_a_machine_has_no_neighbors_on_loopback_and_where_no_route_leads() -> None:
    assert neighbors("127.0.0.1") == neighbors("::1") == neighbors("") == []


def test_parent() -> None:
    assert parent(os.getpid()) == os.getppid() and parent(2**22 + 1) is None


def test_a_disk_that_writes_is_seen(tmp_path: Path) -> None:
    device = tmp_path.stat().st_dev
    before = sectors_written(device)
    if before is None:
        pytest.skip(f"{tmp_path} is on no block device")
    with open(tmp_path / "file", "wb") as stream:
        stream.write(os.urandom(1 << 20))
        stream.flush()
        os.fsync(stream.fileno())
    assert sectors_written(device) - before >= (1 << 20) // 512
    assert sectors_written(os.makedev(0, 1)) is None
