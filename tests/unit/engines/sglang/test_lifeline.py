"""Parts of a server on several nodes end with each other, and nobody else can end them."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_dapo.engines.sglang import lifeline
from megatron_dapo.engines.sglang.ports import ReservedPort, reserve_port

HOST, KEY, WAIT_S = "127.0.0.1", "a key", 60.0
OTHER_PART = f"import time; from megatron_dapo.engines.sglang import lifeline; lifeline.connect({HOST!r}, PORT, {KEY!r}, lambda: None); time.sleep(600)"


@pytest.fixture
def port() -> Iterator[ReservedPort]:
    reserved = reserve_port(HOST)
    reserved.hand_over()
    yield reserved
    reserved.release()


def other_part(repository: Path, port: ReservedPort) -> subprocess.Popen[bytes]:
    program = OTHER_PART.replace("PORT", str(port.number))
    return subprocess.Popen([sys.executable, "-c", program], cwd=repository, stderr=subprocess.DEVNULL)


def test_the_first_part_ends_when_another_is_killed(repository: Path, port: ReservedPort) -> None:
    ended = threading.Event()
    process = other_part(repository, port)
    lifeline.listen(HOST, port.number, KEY, ended.set)
    assert not ended.wait(1.0)  # it has started, connected or not
    process.kill()
    process.wait()
    if not ended.wait(3.0):  # it was killed before it had connected
        process = other_part(repository, port)
        assert not ended.wait(5.0)
        process.kill()
        process.wait()
    assert ended.wait(WAIT_S)


def test_another_part_ends_with_the_first_which_comes_later() -> None:
    ended, reserved = threading.Event(), reserve_port(HOST)
    lifeline.connect(HOST, reserved.number, KEY, ended.set)
    assert not ended.wait(0.5)  # it waits for the first part
    listener = socket.create_server((HOST, reserved.hand_over()))
    connection, _ = listener.accept()
    assert len(connection.recv(64)) == 32 and not ended.is_set()
    connection.close()
    assert ended.wait(WAIT_S)
    listener.close()
    reserved.release()


def test_a_part_that_finds_nobody_ends(monkeypatch: pytest.MonkeyPatch, port: ReservedPort) -> None:
    monkeypatch.setattr(lifeline, "_CONNECT_S", 0.5)
    ended = threading.Event()
    lifeline.connect(HOST, port.number, KEY, ended.set)
    assert ended.wait(WAIT_S)


@pytest.mark.parametrize("hello", [b"", b"x" * 32, lifeline._digest("another key"), lifeline._digest(KEY)[:31]])
def test_a_connection_without_the_key_ends_nothing(port: ReservedPort, hello: bytes) -> None:
    ended = threading.Event()
    lifeline.listen(HOST, port.number, KEY, ended.set)
    with socket.create_connection((HOST, port.number)) as stranger:
        stranger.sendall(hello)
        stranger.shutdown(socket.SHUT_WR)
        assert stranger.recv(1) == b""  # refused
    assert not ended.wait(0.5)
    with socket.create_connection((HOST, port.number)) as part:
        part.sendall(lifeline._digest(KEY))
    assert ended.wait(WAIT_S)
