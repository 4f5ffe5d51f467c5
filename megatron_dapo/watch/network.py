"""The network as the watcher of a node sees it: messages to and from the other watchers, and whether this node's link
is lost.

A node that hears nothing from another cannot tell which of them lost its link, unless its interface has no carrier. It
then probes third machines: if none that answered before answers now, the node's own link is lost.
"""

from __future__ import annotations

import errno
import json
import random
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from megatron_dapo.files.linux import local_host
from megatron_dapo.watch.evidence import interfaces_up, neighbors

_DATAGRAM = 60_000
_PORT = 33434  # UDP port without a listener: the first one of traceroute
_NUM_ASKED = 4
_SILENT_S = 3.5  # silence of another node before third machines are probed
_ASK_S = 1.0  # interval of the probes then
_FIRST_ASK_S = 5.0  # interval of the probes until as many have answered once
_MAX_CONNECTIONS = 64
_RESOLVE_S = 60.0  # limit for resolving rank 0's host name
_CALL_S = 5.0  # timeout for a connection, a message and its answer


class Datagrams:
    """Messages between the watchers of a run. With one node there is no socket.

    A busy link drops datagrams first. A watcher that has missed answers for long therefore also sends its message over
    a connection (`call`), to the port given in the other watcher's messages.
    """

    def __init__(self, node_rank: int, num_nodes: int, leader: tuple[str, int], run_id: str) -> None:
        self.node_rank, self.num_nodes, self._run_id = node_rank, num_nodes, run_id
        self.addresses: dict[int, tuple[Any, ...]] = {}  # node: address of its watcher
        self.socket: socket.socket | None = None
        self._listener: socket.socket | None = None
        self._ports: dict[int, int] = {}  # node: TCP port of its watcher
        self._connections: list[Connection] = []
        if num_nodes > 1:
            family, kind, protocol, _, address = _resolved(leader)
            self.socket = socket.socket(family, kind, protocol)
            self.socket.setblocking(False)
            own = address
            if node_rank > 0:
                own = ("", 0)  # any address, if there is no route yet
                with suppress(OSError):
                    own = (local_host(address, family), 0)
            # A host name that resolves to loopback on its node (Debian's 127.0.1.1) has a different address for other
            # nodes.
            is_reachable = leader[0] == address[0] or not str(address[0]).startswith("127.")
            self._bind(own if is_reachable else ("", address[1]))
            self.addresses[0] = address
            self._listener = socket.create_server((self.socket.getsockname()[0], 0), family=family, backlog=256)
            self._listener.setblocking(False)

    def _bind(self, address: tuple[Any, ...]) -> None:
        assert self.socket is not None
        end = time.monotonic() + 20.0
        while True:
            try:
                return self.socket.bind(address)
            except OSError as error:
                if error.errno == errno.EADDRNOTAVAIL and address[0]:
                    address = ("", *address[1:])  # the leader's address is not one of its node's interfaces
                    continue
                # The previous attempt's watcher may hold the port for some seconds.
                if time.monotonic() > end:
                    raise RuntimeError(
                        f"watcher: cannot listen on {address[0]} UDP port {address[1]}: {error}"
                    ) from None
                time.sleep(0.2)

    def host(self, node: int) -> str:
        """Address of a node without its port, "" if it is not known."""
        return str(self.addresses[node][0]) if node in self.addresses else ""

    def send(self, node: int, message: Mapping[str, Any]) -> None:
        """Send a datagram to a node, and also as the answer on connections that its watcher has open."""
        if self.socket is not None and node in self.addresses:
            text = self._text(message)
            with suppress(OSError):  # unreachable: the peer notices the missing messages
                self.socket.sendto(text, self.addresses[node])
            for connection in self._connections:
                connection.answer(node, text)

    def call(self, node: int, message: Mapping[str, Any], now: float) -> None:
        """Send a message over a new connection; `receive` returns the answer. One call to a node at a time."""
        if node in self._ports and not any(each.called == node for each in self._connections):
            assert self.socket is not None
            calling = socket.socket(self.socket.family, socket.SOCK_STREAM)
            calling.setblocking(False)
            calling.connect_ex((self.host(node), self._ports[node]))
            self._connections.append(Connection(calling, now, self._text(message), node))

    def _text(self, message: Mapping[str, Any]) -> bytes:
        port = self._listener.getsockname()[1] if self._listener is not None else 0
        whole = {"run": self._run_id, "from": self.node_rank, "port": port, **message}
        text = json.dumps(whole)
        return (text if len(text) <= _DATAGRAM else json.dumps({**whole, "details": []})).encode()

    def receive(self, now: float) -> list[dict[str, Any]]:
        """Return the messages that have arrived from watchers of this run, and learn their addresses."""
        messages: list[dict[str, Any]] = []
        while self.socket is not None:
            try:
                text, address = self.socket.recvfrom(_DATAGRAM + 1024)
            except BlockingIOError:
                break
            except OSError:
                continue  # an ICMP error for an earlier datagram
            if (message := self._parsed(text)) is not None:
                self.addresses[message["from"]] = address
                messages.append(message)
        while self._listener is not None and len(self._connections) < _MAX_CONNECTIONS:
            try:
                self._connections.append(Connection(self._listener.accept()[0], now))
            except OSError:
                break
        for connection in self._connections:
            text = connection.read(now)
            if text and (message := self._parsed(text)) is not None:
                connection.caller = message["from"] if connection.called is None else None
                messages.append(message)
        self._connections = [each for each in self._connections if not each.is_over]
        return messages

    def _parsed(self, text: bytes) -> dict[str, Any] | None:
        """Return a message of a watcher of this run, None for anything else."""
        try:
            message: dict[str, Any] = json.loads(text)
            if message["run"] == self._run_id and message["from"] in range(self.num_nodes) and _is_whole(message):
                self._ports[message["from"]] = int(message["port"])
                return message
        except (ValueError, KeyError, TypeError, RecursionError):
            pass
        return None


class Connection:
    """One message to a watcher and its answer, one line each, without blocking.

    called: the node that is called, None for a connection that another watcher opened.
    """

    def __init__(self, connected: socket.socket, now: float, message: bytes = b"", called: int | None = None) -> None:
        connected.setblocking(False)
        self._socket, self._unsent, self._received = connected, message + b"\n" * bool(message), b""
        self._ends_at = now + _CALL_S
        self.called = called
        self.caller: int | None = None  # the node that opened it, once its message has arrived
        self.is_over = False

    def read(self, now: float) -> bytes:
        """Return the other side's line once it is complete; b"" before that and if none comes."""
        line = b""
        try:
            self._unsent = self._unsent[self._socket.send(self._unsent) :] if self._unsent else b""
            while b"\n" not in self._received and (part := self._socket.recv(_DATAGRAM)):
                self._received += part
            line, end, _ = self._received.partition(b"\n")
            line, self._received = line if end else b"", b""
            self.is_over = self.called is not None or not end
        except OSError as error:
            # EAGAIN: nothing has arrived yet. ENOTCONN: not connected yet.
            self.is_over = error.errno not in (errno.EAGAIN, errno.ENOTCONN)
        if self.is_over or now > self._ends_at or len(self._received) > 2 * _DATAGRAM:
            self.is_over = True
            self._socket.close()
        return line

    def answer(self, node: int, text: bytes) -> None:
        """Send the answer if this connection belongs to that node's watcher."""
        if self.caller == node and not self.is_over:
            with suppress(OSError):
                self._socket.send(text + b"\n")
            self.is_over = True
            self._socket.close()


_FIELDS = {"view": dict, "failures": list, "details": list}


def _is_whole(message: Mapping[str, Any]) -> bool:
    """Return True if a datagram of this run has all fields that a watcher sends."""
    if message["kind"] == "answer":
        return isinstance(message.get("verdict", []), list)
    return message["kind"] == "beat" and all(isinstance(message[name], kind) for name, kind in _FIELDS.items())


class NoAddress(RuntimeError):
    """The host name of rank 0's node does not resolve on this one."""

    failure_cause = "no address"


def _resolved(leader: tuple[str, int]) -> tuple[Any, ...]:
    end = time.monotonic() + _RESOLVE_S
    while True:
        try:
            return socket.getaddrinfo(leader[0], leader[1], type=socket.SOCK_DGRAM)[0]
        except socket.gaierror as error:
            if time.monotonic() > end:
                raise NoAddress(
                    f"the node of rank 0, {leader[0]!r}, has no address on {socket.gethostname()}: {error}"
                ) from None
            time.sleep(0.5)


class OwnLink:
    """The link of this node: lost if an interface has no carrier, or if no machine answers any more.

    A probe is a datagram to a port without a listener. The other machine's kernel replies by ICMP, which arrives as
    ECONNREFUSED on a connected socket; this needs no privileges. The machines are on the local network of the run's
    nodes.
    """

    def __init__(self) -> None:
        self._up_at_start = interfaces_up()
        self._asked: dict[str, socket.socket] = {}
        self._answered_at: dict[str, float] = {}
        self._asked_at = 0.0

    def look(self, now: float, node: str, silent_s: float) -> None:
        """Read answers, and probe again if it is time.

        node: address of another node of the run; silent_s: silence of the node that has been silent longest.
        """
        self._read(now)
        is_silent = silent_s > _SILENT_S
        if now - self._asked_at < (_ASK_S if is_silent else _FIRST_ASK_S):
            return
        if not is_silent:
            if len(self._answered_at) >= _NUM_ASKED:
                return
            self._choose(node)
        self._asked_at = now
        for asked in self._asked.values():
            with suppress(OSError):  # no route
                asked.send(b"")

    def _read(self, now: float) -> None:
        for address, asked in self._asked.items():
            try:
                asked.recv(1)
            except ConnectionRefusedError:
                self._answered_at[address] = now
            except OSError:
                pass  # no answer yet, or no route

    def _choose(self, node: str) -> None:
        """Replace machines that have not answered with others."""
        others = [address for address in neighbors(node) if address not in self._asked]
        for address in [each for each in self._asked if each not in self._answered_at] if others else ():
            self._asked.pop(address).close()
        for address in random.sample(others, min(len(others), _NUM_ASKED - len(self._asked))):
            asked = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            asked.setblocking(False)
            asked.connect((address, _PORT))
            self._asked[address] = asked

    def fault(self, heard_at: float, silent: str) -> str:
        """Return why this node's link is considered lost, "" if it is not.

        heard_at: when the machine at the address `silent` was last heard; its answers to probes prove nothing.
        """
        if down := sorted(self._up_at_start - interfaces_up()):
            return f"interface {', '.join(down)} has no carrier"
        answered = {address: at for address, at in self._answered_at.items() if address != silent}
        if not answered or max(answered.values()) > heard_at + _SILENT_S:
            return ""
        return f"nor does {' or '.join(sorted(answered))} answer, which did before"
