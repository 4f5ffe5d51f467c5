"""Addresses of servers, and ports that no other process can take between their choice and the server's own bind."""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from megatron_dapo.config.rules import is_loopback

_FIRST, _LAST = 20000, 65535
_DEFAULT_EPHEMERAL = (32768, 60999)
_NUM_TRIES = 2000


AUTOMATIC = "auto"
_ALL_INTERFACES = ("0.0.0.0", "::")


@dataclass(frozen=True)
class ListenAddress:
    """The address a server of this node binds, and the one at which every node of the run reaches it."""

    bind: str
    advertised: str


def listen_address(host: str, own_address: str) -> ListenAddress:
    """Return the address for servers of this node under sglang.host = `host`.

    own_address: this node's address as seen from the other nodes. "auto" binds and advertises it; 0.0.0.0 binds every
    interface and advertises it; any other `host` is both.
    """
    if host == AUTOMATIC:
        return ListenAddress(own_address, own_address)
    return ListenAddress(host, own_address if host in _ALL_INTERFACES else host)


def require_reachable(address: ListenAddress, host: str, num_nodes: int) -> None:
    """Raise ValueError if servers on several nodes would advertise loopback, where no other node reaches them."""
    if num_nodes == 1 or not is_loopback(address.advertised):
        return
    fix = (
        "the rendezvous host (MASTER_ADDR) resolves to loopback on this node: give it by an address that all nodes reach"
        if host in (AUTOMATIC, *_ALL_INTERFACES)
        else f'set it to "{AUTOMATIC}", which advertises each node\'s own address'
    )
    raise ValueError(
        f'sglang.host = "{host}" advertises servers at {address.advertised}, which is loopback, but the run has '
        f"{num_nodes} nodes: {fix}"
    )


@dataclass
class ReservedPort:
    """A port on `host`, held by a bound socket until `release`.

    Only we can use the socket at first. `hand_over` then marks it reusable: a server that asks for SO_REUSEADDR (all do)
    can bind and listen while we keep holding the port, and every other process that wants it is still refused, also
    between the death of a server and its restart.
    """

    host: str
    number: int
    _socket: socket.socket = field(repr=False)

    def hand_over(self) -> int:
        """Let the server have the port; its number."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return self.number

    def release(self) -> None:
        self._socket.close()


def reserve_port(host: str) -> ReservedPort:
    """A free port on `host`, outside the range the kernel draws from, so that no outgoing connection takes it either.

    ValueError if `host` is no address of this node; RuntimeError if no port is left.
    """
    family, address = _resolve(host)
    for number in _candidates():
        bound = socket.socket(family, socket.SOCK_STREAM)
        try:
            bound.bind((address, number))
        except OSError as error:
            bound.close()
            if error.errno == errno.EADDRNOTAVAIL:
                raise ValueError(
                    f'host {host!r} is no address of this node: give one that is, or set sglang.host to "{AUTOMATIC}"'
                ) from error
            continue
        return ReservedPort(host, number, bound)
    raise RuntimeError(f"no free port on {host} after {_NUM_TRIES} tries between {_FIRST} and {_LAST}")


def _resolve(host: str) -> tuple[socket.AddressFamily, str]:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ValueError(f"host {host!r} has no address: {error.strerror}") from error
    return family, str(address[0])


def _candidates() -> Iterator[int]:
    """Random numbers, so that two starters on one node seldom try the same one. Not from the run's seed."""
    low, high = _ephemeral_range()
    draw = random.SystemRandom()
    below, above = max(0, min(low, _LAST + 1) - _FIRST), max(0, _LAST - max(high, _FIRST - 1))
    assert below + above > 0, f"the kernel draws from {low}..{high}: no port is left outside"
    for _ in range(_NUM_TRIES):
        offset = draw.randrange(below + above)
        yield _FIRST + offset if offset < below else _LAST + 1 - (below + above - offset)


def _ephemeral_range() -> tuple[int, int]:
    try:
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()
    except OSError:
        return _DEFAULT_EPHEMERAL
    return int(low), int(high)
