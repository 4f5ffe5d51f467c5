"""Reserved ports: ours until released, and the server's as soon as they are handed over."""

from __future__ import annotations

import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megatron_dapo.engines.sglang.ports import ListenAddress, listen_address, require_reachable, reserve_port

HOST = "127.0.0.1"


def server_socket(port: int) -> socket.socket:
    """Bind as servers do, with SO_REUSEADDR."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
    except OSError:
        listener.close()
        raise
    listener.listen()
    return listener


def test_many_reservations_never_clash() -> None:
    with ThreadPoolExecutor(16) as pool:
        ports = list(pool.map(lambda _: reserve_port(HOST), range(64)))
    try:
        assert len({port.number for port in ports}) == 64
    finally:
        for port in ports:
            port.release()


def test_processes_never_clash(repository: Path) -> None:
    code = (
        "import sys; from megatron_dapo.engines.sglang.ports import ListenAddress, listen_address, require_reachable, reserve_port\n"
        "ports = [reserve_port('127.0.0.1') for _ in range(64)]; [port.hand_over() for port in ports]\n"
        "print(*[port.number for port in ports], flush=True); sys.stdin.read()"
    )
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code], cwd=repository, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    try:
        numbers = [int(number) for child in children for number in child.stdout.readline().split()]
        assert len(numbers) == len(set(numbers)) == 128
    finally:
        for child in children:
            child.communicate("")


def test_is_outside_the_range_the_kernel_draws_from() -> None:
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    for _ in range(32):
        port = reserve_port(HOST)
        assert not low <= port.number <= high and 20000 <= port.number <= 65535
        port.release()


def test_no_process_can_bind_it_before_it_is_handed_over() -> None:
    port = reserve_port(HOST)
    with pytest.raises(OSError, match="in use"):
        server_socket(port.number)
    port.release()
    server_socket(port.number).close()


def test_only_the_server_can_bind_it_even_between_two_servers() -> None:
    port = reserve_port(HOST)
    number = port.hand_over()
    for _ in range(2):  # a first server, and the one that replaces it
        with server_socket(number), socket.create_connection((HOST, number)):
            with pytest.raises(OSError, match="in use"):
                server_socket(number)
        with socket.socket() as rival, pytest.raises(OSError, match="in use"):
            rival.bind((HOST, number))
    port.release()


@pytest.mark.parametrize(
    ("host", "message"), [("192.0.2.1", "no address of this node"), ("no.such.host.invalid", "has no address")]
)
def test_a_host_of_another_node_is_refused(host: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reserve_port(host)


@pytest.mark.parametrize(
    ("host", "bind", "advertised"),
    [("auto", "10.0.0.2", "10.0.0.2"), ("0.0.0.0", "0.0.0.0", "10.0.0.2"), ("10.1.0.2", "10.1.0.2", "10.1.0.2")],
)
def test_each_node_advertises_its_own_address(host: str, bind: str, advertised: str) -> None:
    address = listen_address(host, "10.0.0.2")
    assert address == ListenAddress(bind, advertised)
    require_reachable(address, host, num_nodes=2)


@pytest.mark.parametrize("host", ["auto", "0.0.0.0", "127.0.0.1", "localhost", "::1"])
def test_loopback_is_refused_on_several_nodes(host: str) -> None:
    address = listen_address(host, "127.0.1.1")
    require_reachable(address, host, num_nodes=1)
    fix = "MASTER_ADDR" if host in ("auto", "0.0.0.0") else 'set it to "auto"'
    with pytest.raises(ValueError, match=f"is loopback, but the run has 2 nodes: .*{fix}"):
        require_reachable(address, host, num_nodes=2)
