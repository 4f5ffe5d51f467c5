"""Evidence of the kernel about processes that this test makes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_dapo.watch.evidence import (
    OutOfMemory,
    activity,
    bytes_in_flight,
    held_in_kernel,
    neighbors,
    parent,
    sectors_written,
    tcp_queues,
)

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
            while bytes_in_flight(os.getpid(), tcp_queues()):  # Wait for the last acknowledgement.
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


def test_a_process_asleep_in_a_call_on_a_file_is_held_and_one_asleep_elsewhere_is_not(tmp_path: Path) -> None:
    """A file system in user space lets its callers sleep interruptibly; the open end of a pipe with a path stands in."""
    file = tmp_path / "file"
    os.mkfifo(file)
    writer = os.open(file, os.O_RDWR)
    try:
        for arguments, held_with in ((["cat", str(file)], f", with {file}"), (["sleep", "60"], "")):
            # Its standard output is a file: the first argument of a sleep is no descriptor of it.
            with (tmp_path / "output").open("w") as output, subprocess.Popen(arguments, stdout=output) as process:
                end, lines = time.monotonic() + 20.0, []
                while not _is_asleep(process.pid, arguments[0]) or (held_with and not lines):
                    assert time.monotonic() < end
                    time.sleep(0.02)
                    lines = held_in_kernel(process.pid)
                lines = held_in_kernel(process.pid)
                process.kill()
            assert [line.endswith(held_with) for line in lines] == [True] * bool(held_with), lines
    finally:
        os.close(writer)


def _is_asleep(pid: int, program: str) -> bool:
    return activity(pid).state == "S" and program in Path(f"/proc/{pid}/comm").read_text()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a cgroup with a limit of memory")
def test_out_of_memory_is_told_from_a_kill() -> None:
    root = Path("/sys/fs/cgroup/memory")
    if not root.is_dir():
        root = Path("/sys/fs/cgroup")
        if "memory" not in (root / "cgroup.subtree_control").read_text():
            pytest.skip("no memory controller in this cgroup")
    cgroup = root / f"watch{os.getpid()}"
    cgroup.mkdir()
    try:
        limit = cgroup / ("memory.limit_in_bytes" if (cgroup / "memory.limit_in_bytes").exists() else "memory.max")
        limit.write_text(str(64 << 20))
        command = f"echo $$ > {cgroup}/cgroup.procs; read go; tail /dev/zero"
        for is_killed in (False, True):
            with subprocess.Popen(["bash", "-c", command], stdin=subprocess.PIPE) as process:
                end = time.monotonic() + 20.0
                while str(process.pid) not in (cgroup / "cgroup.procs").read_text().split():
                    assert time.monotonic() < end
                memory = OutOfMemory(process.pid)
                if is_killed:
                    process.send_signal(signal.SIGKILL)
                else:
                    process.communicate(b"\n")
                process.wait(20)
            assert ("limit of its cgroup of 0.1 GiB" in memory.kill()) != is_killed
    finally:
        cgroup.rmdir()
